// y = x w^T + b over packed weights, for any number of rows.
//
// A packed weight is a row of panels, each of 32 columns (outputs): for every unit of the inputs
// the 32 columns' units side by side, so that one row reads memory in one stream and twelve rows
// keep 24 accumulators in registers. Each output is one sum over the inputs in their order.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "pool.h"
#include "vectors.h"

namespace tessera {

constexpr int PANEL = 2 * LANES;  // columns
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12;  // of one register tile
#else
constexpr int MOST_ROWS = 3;
#endif

// What becomes of a sum: itself, what it is gated by, or an activation of it (`activations.h`).
enum Epilogue { PLAIN = 0, SWIGLU = 1, GELU = 2, GELU_TANH = 3, QUICK_GELU = 4 };
enum Result { SAME = 0, WIDE = 1, LARGEST = 2 };

static inline floats activate(int epilogue, floats x) {
    switch (epilogue) {
        case GELU: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        case QUICK_GELU: return quick_gelu(x);
        default: return x;
    }
}

struct Linear {
    const int32_t* panels;
    const float* bias;  // one for each column of the panels, or null
    int64_t inputs;     // elements of a row of x; whole units
    int64_t outputs;    // real columns; for SWIGLU those of the result
    int32_t epilogue;
    int32_t result;  // in the weight's type, in float32, or of each row the largest alone
};

// The largest output of a row, the first of equals; not-a-number if there is one.
struct Largest {
    float value;
    int32_t column;
};

// A row's largest so far, lane by lane.
struct Running {
    floats value;
    ints column, poisoned;
};

template <class T>
struct LinearCall {
    const Linear* layer;
    const typename T::Element* x;
    int64_t x_stride;  // elements
    void* y;
    int64_t y_stride;  // elements
    int64_t rows;
    int64_t panels, panels_each;
    Largest* largest;  // [tiles, rows], for LARGEST
    const int32_t* chosen;  // of the panels, ascending; null: all
};

static inline void compare(Running& best, floats v, int64_t column, int64_t outputs) {
    const ints here = LANE + (int32_t)column;
    const ints real = here < (int32_t)outputs;
    best.poisoned |= (v != v) & real;
    const ints better = (v > best.value) & real;
    best.value = better ? v : best.value;
    best.column = better ? here : best.column;
}

static inline Largest settle(const Running& best) {
    Largest found = {-INFINITY, 0};
    bool bad = false, any = false;
    for (int i = 0; i < LANES; i++) {
        const float v = best.value[i];
        const int32_t column = best.column[i];
        bad |= best.poisoned[i] != 0;
        if (column < 0) continue;
        if (!any || v > found.value || (v == found.value && column < found.column))
            found = {v, column};
        any = true;
    }
    if (bad) found = {NAN, -1};
    return found;
}

// Rows [row, row + R) of one panel.
template <class T, int R>
static inline void multiply(const LinearCall<T>& call, int64_t panel, int64_t row, Running* best) {
    const Linear& layer = *call.layer;
    const int64_t units = layer.inputs / T::PER_UNIT, stride = call.x_stride / T::PER_UNIT;
    const int32_t* w = layer.panels + panel * units * PANEL;
    const int32_t* x = (const int32_t*)(call.x + row * call.x_stride);
    floats left[R] = {}, right[R] = {};
    for (int64_t u = 0; u < units; u++, w += PANEL) {
        const ints a = load<ints>(w), b = load<ints>(w + LANES);
        __builtin_prefetch(w + 16 * PANEL);
        __builtin_prefetch(w + 16 * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const int32_t unit = x[r * stride + u];
            left[r] = T::dot(left[r], a, unit);
            right[r] = T::dot(right[r], b, unit);
        }
    }
    floats bias_left = {}, bias_right = {};
    if (layer.bias) {
        bias_left = load<floats>(layer.bias + panel * PANEL);
        bias_right = load<floats>(layer.bias + panel * PANEL + LANES);
    }
    for (int r = 0; r < R; r++) {
        floats a = left[r] + bias_left, b = right[r] + bias_right;
        if (layer.epilogue == SWIGLU) {
            // Gates in the left half of a panel, what they gate in the right one.
            const int64_t column = panel * LANES;
            const floats gated = a / (exp(-a) + 1.0f) * b;
            const int count = (int)std::min<int64_t>(LANES, layer.outputs - column);
            auto* y = (typename T::Element*)call.y + (row + r) * call.y_stride + column;
            write_some<T>(y, gated, count);
            continue;
        }
        a = activate(layer.epilogue, a);
        b = activate(layer.epilogue, b);
        const int64_t column = panel * PANEL;
        const int64_t count = layer.outputs - column;
        if (layer.result == LARGEST) {
            compare(best[row + r], a, column, layer.outputs);
            compare(best[row + r], b, column + LANES, layer.outputs);
        } else if (layer.result == WIDE) {
            auto* y = (float*)call.y + (row + r) * call.y_stride + column;
            write_some<Float32>(y, a, (int)std::min<int64_t>(LANES, count));
            if (count > LANES)
                write_some<Float32>(y + LANES, b, (int)std::min<int64_t>(LANES, count - LANES));
        } else {
            auto* y = (typename T::Element*)call.y + (row + r) * call.y_stride + column;
            write_some<T>(y, a, (int)std::min<int64_t>(LANES, count));
            if (count > LANES)
                write_some<T>(y + LANES, b, (int)std::min<int64_t>(LANES, count - LANES));
        }
    }
}

template <class T, int R>
static inline void multiply_some(const LinearCall<T>& call, int64_t panel, int64_t row, int rows,
                                 Running* best) {
    if constexpr (R > 0) {
        if (rows == R) return multiply<T, R>(call, panel, row, best);
        multiply_some<T, R - 1>(call, panel, row, rows, best);
    }
}

template <class T>
static void linear_tile(void* context, int tile) {
    const auto& call = *(const LinearCall<T>*)context;
    const int64_t first = tile * call.panels_each;
    const int64_t last = std::min(call.panels, first + call.panels_each);
    const int64_t groups = (call.rows + MOST_ROWS - 1) / MOST_ROWS;
    static thread_local std::vector<Running> best;
    if (call.largest)
        best.assign(call.rows, Running{broadcast(-INFINITY), broadcast_int(-1), ints{}});
    for (int64_t place = first; place < last; place++) {
        const int64_t panel = call.chosen ? call.chosen[place] : place;
        for (int64_t group = 0; group < groups; group++) {
            // Groups of like size: a last one of one row would cost as much as one of many.
            const int64_t row = call.rows * group / groups;
            const int64_t end = call.rows * (group + 1) / groups;
            multiply_some<T, MOST_ROWS>(call, panel, row, (int)(end - row), best.data());
        }
    }
    if (call.largest)
        for (int64_t r = 0; r < call.rows; r++)
            call.largest[tile * call.rows + r] = settle(best[r]);
}

// Regions smaller than this are not worth waking anybody for: bytes of weights, or of work that
// takes as long as reading them.
constexpr int64_t LEAST_BYTES = 256 << 10;

// chosen: the panels to multiply, ascending, at least one; null: all of them.
template <class T>
static void linear(Pool& pool, const Linear& layer, const typename T::Element* x, int64_t x_stride,
                   void* y, int64_t y_stride, int64_t rows,
                   const std::vector<int32_t>* chosen = nullptr) {
    if (rows == 0) return;
    const int64_t width = layer.epilogue == SWIGLU ? LANES : PANEL;
    LinearCall<T> call{&layer, x, x_stride, y, y_stride, rows, 0, 0, nullptr, nullptr};
    call.panels = (layer.outputs + width - 1) / width;
    if (chosen) {
        call.chosen = chosen->data();
        call.panels = (int64_t)chosen->size();
    }
    const int64_t panel_bytes = layer.inputs * PANEL * sizeof(typename T::Element);
    const int64_t work = panel_bytes * call.panels * std::max<int64_t>(1, rows / 4);
    // Few enough that taking one costs nothing, many enough that a thread held up costs little.
    const bool alone = work < LEAST_BYTES || pool.threads() == 1;
    const int64_t most = alone ? 1 : std::min<int64_t>(call.panels, 16 * pool.threads());
    call.panels_each = (call.panels + most - 1) / most;
    const int64_t tiles = (call.panels + call.panels_each - 1) / call.panels_each;
    static thread_local std::vector<Largest> found;
    if (layer.result == LARGEST) {
        found.resize(tiles * rows);
        call.largest = found.data();
    }
    pool.run((int)tiles, linear_tile<T>, &call);
    if (layer.result != LARGEST) return;
    auto* results = (Largest*)y;
    for (int64_t r = 0; r < rows; r++) {
        results[r] = found[r];
        for (int64_t tile = 1; tile < tiles; tile++) {
            const Largest& other = found[tile * rows + r];
            if (other.value > results[r].value || other.value != other.value) results[r] = other;
            if (results[r].value != results[r].value) break;
        }
    }
}

template <class T>
struct PackCall {
    const typename T::Element* weight;
    int64_t outputs, inputs;
    int epilogue;
    typename T::Element* panels;
};

template <class T>
static void pack_panel(void* context, int panel) {
    const auto& call = *(const PackCall<T>*)context;
    const int64_t units = call.inputs / T::PER_UNIT;
    auto* to = call.panels + panel * call.inputs * PANEL;
    for (int64_t u = 0; u < units; u++)
        for (int c = 0; c < PANEL; c++) {
            int64_t row = (int64_t)panel * PANEL + c;
            bool real = row < call.outputs;
            if (call.epilogue == SWIGLU) {
                const int64_t column = (int64_t)panel * LANES + c % LANES;
                real = column < call.outputs;
                row = column + (c < LANES ? 0 : call.outputs);
            }
            for (int i = 0; i < T::PER_UNIT; i++)
                *to++ = real ? call.weight[row * call.inputs + u * T::PER_UNIT + i] : 0;
        }
}

// Packs rows [outputs, inputs] of the element type, `inputs` in whole units; `panels` has room for
// whole panels. For SWIGLU the rows are `outputs` gates followed by what they gate.
template <class T>
static void pack(Pool& pool, const typename T::Element* weight, int64_t outputs, int64_t inputs,
                 int epilogue, typename T::Element* panels) {
    PackCall<T> call{weight, outputs, inputs, epilogue, panels};
    const int64_t width = epilogue == SWIGLU ? LANES : PANEL;
    pool.run((int)((outputs + width - 1) / width), pack_panel<T>, &call);
}

}  // namespace tessera
