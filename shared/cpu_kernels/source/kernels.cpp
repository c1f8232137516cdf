// The CPU device's kernels behind a C interface. Compiled once for each instruction set
// (`build.py`); `binding.py` declares the same functions for Python.
//
// `type` is 0 for float32 and 1 for bfloat16 everywhere.

#include "admission.h"
#include "attention/attention.h"
#include "attention/coded_attention.h"
#include "layer.h"
#include "linear/linear.h"
#include "pool.h"
#include "linear/quantized_linear.h"
#include "rows.h"
#include "linear/shortlist.h"

using namespace tessera;

namespace {

Pool* pool = nullptr;

// Runs body(first, last) over `count` rows, in pieces, where they are worth a second thread.
template <class Body>
void over_rows(int64_t count, int64_t bytes_each, Body body) {
    struct Region {
        Body* body;
        int64_t count, each;
    };
    if (count * bytes_each < LEAST_BYTES || pool->threads() == 1) return body(0, count);
    const int64_t tiles = std::min<int64_t>(count, 4 * pool->threads());
    Region region{&body, count, (count + tiles - 1) / tiles};
    pool->run((int)((count + region.each - 1) / region.each), [](void* context, int tile) {
        auto& r = *(Region*)context;
        (*r.body)(tile * r.each, std::min(r.count, (tile + 1) * r.each));
    }, &region);
}

// A linear layer with what adapters add to it.
template <class T>
void adapted_linear(const Linear& layer, const Additions& additions, const void* x, void* y, int64_t rows,
                    int64_t x_stride, int64_t y_stride) {
    const auto* in = (const typename T::Element*)x;
    const Additions* some = additions.empty() ? nullptr : &additions;
    if (layer.quantized) return quantized_linear<T>(*pool, layer, in, x_stride, y, y_stride, rows, some);
    linear<T>(*pool, layer, in, x_stride, y, y_stride, rows, nullptr, some);
}

}  // namespace

#define TYPED(type, CALL)       \
    do {                        \
        if (type) {             \
            typedef BFloat16 T; \
            CALL;               \
        } else {                \
            typedef Float32 T;  \
            CALL;               \
        }                       \
    } while (0)

#pragma GCC visibility push(default)
extern "C" {

// What the layouts of weights and cache are made of in this instruction set; see `vectors.h`,
// `linear.h`, `attention.h`. step: inputs of a packed bfloat16 weight are a multiple of it.
struct Sizes {
    int32_t lanes, panel, page, step;
};

Sizes tessera_sizes() { return {LANES, PANEL, PAGE, IN_STEPS<BFloat16> ? (int32_t)STEP : BFloat16::PER_UNIT}; }

// An `Admission`; every process that computes has to ask, before its first call of a kernel.
int tessera_admit() { return admit(); }

// Begins anew with this many threads, the caller's included.
void tessera_start(int threads) {
    delete pool;
    pool = new Pool(threads);
}

void tessera_pack(int type, const void* weight, int64_t outputs, int64_t inputs, int epilogue,
                  void* panels) {
    TYPED(type, pack<T>(*pool, (const T::Element*)weight, outputs, inputs, epilogue,
                        (T::Element*)panels));
}

// See `pack_codes`.
void tessera_pack_codes(const void* codes, int64_t outputs, int64_t inputs, int bits, int64_t group, int epilogue,
                        void* panels) {
    pack_codes(*pool, (const uint8_t*)codes, outputs, inputs, bits, group, epilogue, (int32_t*)panels);
}

// y = x w^T in bfloat16, all of it contiguous, for one that has no `Linear` to pass: `trial_process.py`.
void tessera_try_linear(const void* panels, int64_t inputs, int64_t outputs, const void* x, void* y,
                        int64_t rows) {
    const Linear layer = {(const int32_t*)panels, nullptr, inputs, outputs, PLAIN, SAME, nullptr};
    linear<BFloat16>(*pool, layer, (const BFloat16::Element*)x, inputs, y, outputs, rows);
}

// y: rows of the layer's outputs, or one `Largest` for each row; see `Result`.
void tessera_linear(int type, const Linear* layer, const void* x, void* y, int64_t rows,
                    int64_t x_stride, int64_t y_stride) {
    if (layer->quantized)
        TYPED(type, quantized_linear<T>(*pool, *layer, (const T::Element*)x, x_stride, y, y_stride, rows));
    else
        TYPED(type, linear<T>(*pool, *layer, (const T::Element*)x, x_stride, y, y_stride, rows));
}

// The same with what is added by the adapter of each segment, its first product's additions; `segments` are of so many
// rows. Not for the largest output alone.
void tessera_adapted_linear(int type, const Linear* layer, const Segments* segments, const Adapter* const* adapters,
                            const void* x, void* y, int64_t rows, int64_t x_stride, int64_t y_stride) {
    const Additions additions{segments, adapters, Adapter::QKV};
    TYPED(type, adapted_linear<T>(*layer, additions, x, y, rows, x_stride, y_stride));
}

// weight: rows [outputs, inputs]; fills what `list` points to and the rest of it.
void tessera_sketch(int type, const void* weight, int64_t outputs, int64_t inputs,
                    Shortlist* list) {
    TYPED(type, make_sketch<T>(*pool, (const T::Element*)weight, outputs, inputs, *list));
}

// y: one `Largest` for each row, as `tessera_linear` gives for a layer with that result.
void tessera_largest(int type, const Linear* layer, Shortlist* list, const void* x, void* y,
                     int64_t rows, int64_t x_stride) {
    TYPED(type, largest_of<T>(*pool, *layer, *list, (const T::Element*)x, x_stride, (Largest*)y,
                              rows));
}

void tessera_rms_norm(int type, const void* x, const void* weight, float eps, int64_t rows,
                      int64_t size, void* out) {
    TYPED(type, over_rows(rows, 4 * size, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            rms_norm<T>((const T::Element*)x + r * size, (const T::Element*)weight, eps, size,
                        (T::Element*)out + r * size);
    }));
}

// residual += x; out = norm(residual).
void tessera_add_rms_norm(int type, const void* x, void* residual, const void* weight, float eps,
                          int64_t rows, int64_t size, void* out) {
    TYPED(type, over_rows(rows, 8 * size, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            auto* sums = (T::Element*)residual + r * size;
            add<T>((const T::Element*)x + r * size, sums, size);
            rms_norm<T>(sums, (const T::Element*)weight, eps, size, (T::Element*)out + r * size);
        }
    }));
}

// out = norm(residual); first residual += x where there is an x.
void tessera_add_layer_norm(int type, const void* x, void* residual, const void* weight,
                            const void* bias, float eps, int64_t rows, int64_t size, void* out) {
    TYPED(type, over_rows(rows, 8 * size, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            auto* sums = (T::Element*)residual + r * size;
            if (x) add<T>((const T::Element*)x + r * size, sums, size);
            layer_norm<T>(sums, (const T::Element*)weight, (const T::Element*)bias, eps, size,
                          (T::Element*)out + r * size);
        }
    }));
}

void tessera_rope_write(int type, const RopeWrite* call, const Cache* cache) {
    const int64_t bytes = (call->q_heads + 2 * cache->heads) * cache->size * 8;
    TYPED(type, over_rows(call->tokens, bytes, [=](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++)
            call->wide ? rope_write_token<T, Float32>(*call, *cache, t)
                       : rope_write_token<T, T>(*call, *cache, t);
    }));
}

void tessera_attention(int type, const Attention* call, const Cache* cache) {
    if (cache->coded)
        TYPED(type, coded_attention<T>(*pool, *call, *cache));
    else
        TYPED(type, attention<T>(*pool, *call, *cache));
}

// segments, adapters: what is added, by the adapter of each segment; or null.
void tessera_layer(int type, const Layer* layer, const LayerStep* step, const Cache* cache,
                   const Segments* segments, const Adapter* const* adapters) {
    RopeWrite rope = step->rope;
    Attention attention = step->attention;
    rope.q_norm = layer->q_norm;
    rope.k_norm = layer->k_norm;
    attention.window = layer->window;
    const int64_t rows = step->rows, hidden = layer->output.outputs;
    void* normed = step->normed;
    const auto linear = [&](const Linear& product, Adapter::Product which, const void* x, void* y, int64_t x_stride,
                            int64_t y_stride) {
        if (!segments) return tessera_linear(type, &product, x, y, rows, x_stride, y_stride);
        const Additions additions{segments, adapters, which};
        TYPED(type, adapted_linear<T>(product, additions, x, y, rows, x_stride, y_stride));
    };
    linear(layer->qkv, Adapter::QKV, normed, rope.qkv, hidden, layer->qkv.outputs);
    tessera_rope_write(type, &rope, cache);
    tessera_attention(type, &attention, cache);
    linear(layer->output, Adapter::OUTPUT, attention.out, normed, layer->output.inputs, hidden);
    tessera_add_rms_norm(type, normed, step->residual, layer->post_norm, layer->eps, rows, hidden,
                         normed);
    linear(layer->gate_up, Adapter::GATE_UP, normed, step->gated, hidden, layer->gate_up.outputs);
    linear(layer->down, Adapter::DOWN, step->gated, normed, layer->down.inputs, hidden);
    tessera_add_rms_norm(type, normed, step->residual, layer->after_norm, layer->eps, rows, hidden,
                         normed);
}

// Of a page of codes of heads of this size, in whole vectors, with so many elements kept beside a key's codes.
int64_t tessera_coded_page_bytes(int type, int64_t size, int64_t kept) {
    Cache cache{};
    cache.size = size;
    cache.kept_count = kept;
    TYPED(type, return coded_page_bytes<T>(cache));
}

// keys, values: [tokens, kv heads, size].
void tessera_kv_write(int type, const void* keys, const void* values, const int64_t* slots,
                      int64_t tokens, const Cache* cache) {
    const int64_t heads = cache->heads, size = cache->real;
    TYPED(type, for (int64_t t = 0; t < tokens; t++) for (int64_t h = 0; h < heads; h++) {
        const int64_t first = (t * heads + h) * size;
        write_token<T>(*cache, slots[t], h, (const T::Element*)keys + first, (const T::Element*)values + first);
    });
}

void tessera_kv_read(int type, void* keys, void* values, const int64_t* slots, int64_t tokens,
                     const Cache* cache) {
    const int64_t heads = cache->heads, size = cache->real;
    TYPED(type, for (int64_t t = 0; t < tokens; t++) for (int64_t h = 0; h < heads; h++) {
        auto* to_k = (T::Element*)keys + (t * heads + h) * size;
        auto* to_v = (T::Element*)values + (t * heads + h) * size;
        if (cache->coded) {
            read_codes<T>(*cache, slots[t], h, to_k, to_v);
            continue;
        }
        const auto* page = page_at<T>(*cache, slots[t], h);
        for (int64_t d = 0; d < size; d++) {
            to_k[d] = page[key_place<T>(slots[t] % PAGE, d)];
            to_v[d] = page[value_place<T>(slots[t] % PAGE, d, cache->size)];
        }
    });
}
}
#pragma GCC visibility pop
