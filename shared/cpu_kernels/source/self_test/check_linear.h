// Linear layers, and the largest output of a row by way of a sketch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

namespace self_test {

using tessera::Largest;
using tessera::Linear;

// Rows: so many that weights are widened first, and no whole number of register tiles.
constexpr int64_t MANY = (tessera::WIDEN_TILES + 1) * tessera::TILE_ROWS + 5;

// A packed layer and what it points to.
template <class T>
struct Packed {
    Elements<T> panels;
    std::vector<float> bias;  // one number for each column of the panels
    Linear layer;

    // from: the bias, one number for each row of the weight, or null.
    Packed(const Matrix& weight, const double* from, int epilogue) {
        const bool gated = epilogue == tessera::SWIGLU;
        const int64_t outputs = gated ? weight.rows / 2 : weight.rows;
        const int64_t width = gated ? PANEL / 2 : PANEL, count = (outputs + width - 1) / width;
        panels.resize(count * PANEL * tessera::whole_steps<T>(weight.columns));
        tessera_pack(TYPE<T>, elements<T>(weight).data(), outputs, weight.columns, epilogue,
                     panels.data());
        bias.resize(from ? count * PANEL : 0);
        for (int64_t row = 0; row < weight.rows && from; row++) {
            const int64_t column = row % outputs, half = row / outputs;
            bias[column / width * PANEL + half * width + column % width] = (float)from[row];
        }
        layer = {(const int32_t*)panels.data(), from ? bias.data() : nullptr, weight.columns,
                 outputs, epilogue, tessera::SAME};
    }
};

// Rows `stride` elements apart with not-a-number between them; the last one ends where memory ends.
template <class T>
class GuardedRows {
public:
    GuardedRows(const Elements<T>& from, int64_t columns, int64_t stride) {
        const int64_t rows = (int64_t)from.size() / columns, page = sysconf(_SC_PAGESIZE);
        const int64_t count = (rows - 1) * stride + columns, bytes = count * sizeof(Element);
        size_ = (bytes + page - 1) / page * page + page;
        memory_ = (char*)mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(memory_ + size_ - page, page, PROT_NONE);
        data_ = (Element*)(memory_ + size_ - page - bytes);
        std::memset(data_, 0xff, bytes);
        for (int64_t r = 0; r < rows; r++)
            std::copy_n(from.data() + r * columns, columns, data_ + r * stride);
    }
    GuardedRows(const GuardedRows&) = delete;
    ~GuardedRows() { munmap(memory_, size_); }
    const typename T::Element* data() const { return data_; }

private:
    typedef typename T::Element Element;
    char* memory_;
    int64_t size_;
    Element* data_;
};

template <class T>
Matrix drawn_weight(int64_t outputs, int64_t inputs) {
    return drawn<T>(outputs, inputs, 1 / std::sqrt((double)inputs));
}

// What the layer makes of `rows` of x from `first` on.
template <class R, class E>
std::vector<R> applied(int type, const Linear& layer, const std::vector<E>& x, int64_t first,
                       int64_t rows) {
    const int64_t columns = layer.result == tessera::LARGEST ? 1 : layer.outputs;
    std::vector<R> y(rows * columns);
    tessera_linear(type, &layer, x.data() + first * layer.inputs, y.data(), rows, layer.inputs,
                   columns);
    return y;
}

template <class T>
void check_layer_of(Check& check, const Matrix& x, const Matrix& w, const double* bias,
                    int epilogue) {
    typedef typename T::Element Element;
    const Packed<T> packed(w, bias, epilogue);
    const auto in = elements<T>(x);
    const auto y = applied<Element>(TYPE<T>, packed.layer, in, 0, MANY);
    check.near<T>(y, linear(x, w, bias, epilogue));
    for (int64_t count = 1; count <= 2 * tessera::TILE_ROWS + 1; count++) {
        const auto few = applied<Element>(TYPE<T>, packed.layer, in, MANY - count, count);
        check.same(few, y, y.size() - few.size(), "fewer rows");
    }
}

// The same sums in float32, and the largest of them.
template <class T>
void check_results_of(Check& wide, Check& largest, const Matrix& x, const Matrix& w,
                      const double* bias) {
    Packed<T> packed(w, bias, tessera::PLAIN);
    packed.layer.result = tessera::WIDE;
    const auto sums = applied<float>(TYPE<T>, packed.layer, elements<T>(x), 0, MANY);
    wide.near<Float32>(sums, linear(x, w, bias, tessera::PLAIN));
    std::vector<Largest> right;
    for (auto row = sums.begin(); row < sums.end(); row += w.rows) {
        const auto best = std::max_element(row, row + w.rows);
        right.push_back({*best, (int32_t)(best - row)});
    }
    packed.layer.result = tessera::LARGEST;
    for (int64_t count : {(int64_t)1, MANY}) {
        const auto found = applied<Largest>(TYPE<T>, packed.layer, elements<T>(x), 0, count);
        largest.same(found, right, 0, "the largest of each row");
    }
}

template <class T>
void check_linear() {
    Check largest("linear, largest", TYPE<T>), wide("linear, wide", TYPE<T>),
        check("linear", TYPE<T>);
    const int64_t sizes[][2] = {{2, 1},
                                {34, PANEL - 1},
                                {70, PANEL},
                                {70, 3 * PANEL + PANEL / 2 + 1},
                                {514, 20 * PANEL + 2},
                                {2 * tessera::BLOCK + 2, PANEL + 1}};
    for (const auto& [inputs, outputs] : sizes) {
        const Matrix x = drawn<T>(MANY, inputs), bias = drawn<Float32>(1, 2 * outputs);
        Matrix w = drawn_weight<T>(2 * outputs, inputs);
        check_layer_of<T>(check, x, w, nullptr, tessera::SWIGLU);
        check_layer_of<T>(check, x, w, bias[0], tessera::SWIGLU);
        w = drawn_weight<T>(outputs, inputs);
        check_layer_of<T>(check, x, w, nullptr, tessera::PLAIN);
        check_layer_of<T>(check, x, w, bias[0], tessera::PLAIN);
        for (int kind : {tessera::GELU, tessera::GELU_TANH, tessera::QUICK_GELU})
            check_layer_of<T>(check, x, w, bias[0], kind);
        // Two panels of equals: the first counts.
        for (int64_t c = PANEL; c < std::min<int64_t>(2 * PANEL, outputs); c++)
            std::copy(w[c - PANEL], w[c - PANEL + 1], w[c]);
        check_results_of<T>(wide, largest, x, w, nullptr);
        check_results_of<T>(wide, largest, x, w, bias[0]);
    }
}

// Numbers whose products and sums come to every edge: of any size, near the least normal ones, denormal, cancelling.
template <class T>
Elements<T> drawn_bits(int64_t count) {
    Elements<T> to;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t kind = numbers()() % 5, near = numbers()() % 4, any = numbers()() % 200;
        const uint32_t exponents[] = {0, 1, 60 + near, any, 126};
        const uint32_t bits = exponents[kind] << 7 | (numbers()() & 0x807f);
        to.push_back((typename T::Element)bits);
    }
    return to;
}

// Sums in steps are, bit for bit, those of plain loops: every number of rows, every rest of inputs, more rows than one
// pass and more inputs than one stretch; and what lies beside a row is never read.
template <class T>
void check_steps() {
    if constexpr (tessera::IN_STEPS<T>) {
        Check check("linear, in steps", TYPE<T>);
        struct Shape { int64_t most, inputs, outputs; };
        std::vector<Shape> shapes = {{70, 96, 33}, {645, 70, PANEL}, {700, 2 * 1216 + 34, 2 * PANEL}};
        for (int64_t inputs = 2; inputs <= 66; inputs += 2) shapes.push_back({35, inputs, 3});
        for (const auto& [most, inputs, outputs] : shapes) {
            const auto w = drawn_bits<T>(outputs * inputs), x = drawn_bits<T>(most * inputs);
            Elements<T> panels((outputs + PANEL - 1) / PANEL * PANEL * tessera::whole_steps<T>(inputs));
            tessera_pack(TYPE<T>, w.data(), outputs, inputs, tessera::PLAIN, panels.data());
            const Linear layer{(const int32_t*)panels.data(), nullptr, inputs, outputs, tessera::PLAIN, tessera::WIDE};
            const auto right = sums_in_steps<T>(x, w, inputs);
            // Rows apart, with not-a-number between them and after the last one, whose end is that of a page.
            const int64_t stride = inputs + 6;
            const GuardedRows<T> rows(x, inputs, stride);
            for (int64_t count = most > 70 ? most : 1; count <= most; count++) {
                std::vector<float> y(count * outputs);
                const auto* from = rows.data() + (most - count) * stride;
                tessera_linear(TYPE<T>, &layer, from, y.data(), count, stride, outputs);
                check.same(y, right, (most - count) * outputs, "sums in steps");
            }
        }
    }
}

// The sketch finds what the whole pass finds, also where its bounds do not hold.
template <class T>
void check_sketch() {
    Check check("sketch, largest", TYPE<T>);
    for (int64_t inputs : {34, 130, 514}) {
        const int64_t outputs = 60 * PANEL + PANEL / 2 + 1, panels = outputs / PANEL + 1;
        const int64_t whole = (inputs + 3) / 4 * 4;
        Matrix w = drawn_weight<T>(outputs, inputs);
        // Columns beside which a row will lie, and near ones in other panels, closer than the sketch.
        const auto column = [=](int64_t row) { return (row + 1) * outputs / 9; };
        for (int64_t row = 0; row < 6; row++)
            for (int64_t k = 0; k < inputs; k++)
                w[column(row) + 2 * PANEL][k] = w[column(row)][k] * (k % 3 ? 1.01 : 0.98);
        w = rounded<T>(w);
        Packed<T> packed(w, nullptr, tessera::PLAIN);
        packed.layer.result = tessera::LARGEST;
        std::vector<int32_t> sketch(panels * whole / 4 * PANEL);
        std::vector<tessera::Columns> columns(panels);
        tessera::Shortlist list{sketch.data(), columns.data(), whole, 0, 0, 0};
        tessera_sketch(TYPE<T>, elements<T>(w).data(), outputs, inputs, &list);
        for (int64_t rows = 1; rows <= tessera::SHORTLIST_ROWS + 1; rows++)
            for (double strange : {1.0, 0.0, 1e30, (double)NAN}) {
                Matrix x = drawn<T>(rows, inputs, 0.1);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t k = 0; k < inputs; k++) x[r][k] += 8 * w[column(r)][k];
                if (strange == 0) std::fill(x[rows - 1], x[rows], 0.0);
                x[rows - 1][inputs / 2] *= strange;
                const auto in = elements<T>(x);
                std::vector<Largest> found(rows);
                list.rest = 0;  // not skipped, whatever the last call left
                tessera_largest(TYPE<T>, &packed.layer, &list, in.data(), found.data(), rows,
                                inputs);
                const auto right = applied<Largest>(TYPE<T>, packed.layer, in, 0, rows);
                check.same(found, right, 0, "the largest of each row");
            }
    }
}

}  // namespace self_test
