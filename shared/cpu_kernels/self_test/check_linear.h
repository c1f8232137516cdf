// Linear layers, and the largest output of a row by way of a sketch.
#pragma once

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
        panels.resize(count * PANEL * weight.columns);
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
