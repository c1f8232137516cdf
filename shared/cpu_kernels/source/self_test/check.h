// The C interface of `kernels.cpp`, and how what it gives is compared with what it should.
#pragma once

#include <cstdio>

#include "../layer.h"
#include "../linear/shortlist.h"
#include "plain.h"

extern "C" {
int tessera_admit();
void tessera_start(int threads);
void tessera_pack(int type, const void* weight, int64_t outputs, int64_t inputs, int epilogue,
                  void* panels);
void tessera_linear(int type, const tessera::Linear* layer, const void* x, void* y, int64_t rows,
                    int64_t x_stride, int64_t y_stride);
void tessera_adapted_linear(int type, const tessera::Linear* layer, const tessera::Segments* segments,
                            const tessera::Adapter* const* adapters, const void* x, void* y, int64_t rows,
                            int64_t x_stride, int64_t y_stride);
void tessera_sketch(int type, const void* weight, int64_t outputs, int64_t inputs,
                    tessera::Shortlist* list);
void tessera_largest(int type, const tessera::Linear* layer, tessera::Shortlist* list,
                     const void* x, void* y, int64_t rows, int64_t x_stride);
void tessera_rms_norm(int type, const void* x, const void* weight, float eps, int64_t rows,
                      int64_t size, void* out);
void tessera_add_rms_norm(int type, const void* x, void* residual, const void* weight, float eps,
                          int64_t rows, int64_t size, void* out);
void tessera_add_layer_norm(int type, const void* x, void* residual, const void* weight,
                            const void* bias, float eps, int64_t rows, int64_t size, void* out);
void tessera_rope_write(int type, const tessera::RopeWrite* call, const tessera::Cache* cache);
void tessera_attention(int type, const tessera::Attention* call, const tessera::Cache* cache);
void tessera_layer(int type, const tessera::Layer* layer, const tessera::LayerStep* step,
                   const tessera::Cache* cache, const tessera::Segments* segments,
                   const tessera::Adapter* const* adapters);
void tessera_kv_write(int type, const void* keys, const void* values, const int64_t* slots,
                      int64_t tokens, const tessera::Cache* cache);
void tessera_kv_read(int type, void* keys, void* values, const int64_t* slots, int64_t tokens,
                     const tessera::Cache* cache);
}

namespace self_test {

using namespace plain;
using tessera::Float32;
using tessera::LANES;
using tessera::PAGE;
using tessera::PANEL;

constexpr float EPS = 0.01f;  // large enough to be seen

// Of an element type: its number in the C interface, and how far a result may be off, against one
// and its own size together: by what sums in float32 differ, or by the last bit of bfloat16.
template <class T>
constexpr int TYPE = T::PER_UNIT - 1;
template <class T>
constexpr double TOLERANCE = T::PER_UNIT == 1 ? 2e-5 : 1.0 / 128;

// What is compared of one kernel; its end prints a line.
class Check {
public:
    static inline bool failed = false;  // any of them

    Check(const char* kernel, int type) : kernel_(kernel), type_(type) {}
    Check(const Check&) = delete;

    ~Check() {
        failed |= wrong_ > 0;
        std::printf("%-6s  %-17s  %-8s  %7ld compared, off by %.2f of what is allowed",
                    wrong_ ? "FAILED" : "ok", kernel_, type_ ? "bfloat16" : "float32", compared_,
                    worst_);
        if (wrong_) std::printf("\n        %ld wrong; the first: %s", wrong_, first_);
        std::printf("\n");
    }

    template <class T>
    void near(const Elements<T>& found, const Matrix& wanted, double tolerance = TOLERANCE<T>) {
        for (size_t i = 0; i < found.size(); i++) {
            const double value = T::widen(found[i]), right = wanted.values[i];
            const double off = std::fabs(value - right) / (1 + std::fabs(right)) / tolerance;
            worst_ = std::max(worst_, off);
            compared_++;
            if (off <= 1 || wrong_++) continue;  // not-a-number is wrong, too
            const long columns = wanted.columns;
            std::snprintf(first_, sizeof first_, "%.7g, should be %.7g: row %ld, column %ld of %ld",
                          value, right, (long)i / columns, (long)i % columns, columns);
        }
    }

    // That `part` is, bit for bit, what `whole` has from `first` on.
    template <class E>
    void same(const std::vector<E>& part, const std::vector<E>& whole, size_t first,
              const char* what) {
        compared_++;
        const size_t count = std::min(part.size(), whole.size() - first);
        if (count == part.size() && !std::memcmp(part.data(), &whole[first], count * sizeof(E)))
            return;
        if (wrong_++ == 0) std::snprintf(first_, sizeof first_, "bits of %s", what);
    }

private:
    const char* kernel_;
    int type_;
    long compared_ = 0, wrong_ = 0;
    double worst_ = 0;
    char first_[120] = "";
};

}  // namespace self_test
