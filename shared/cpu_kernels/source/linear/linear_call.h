// A linear layer's weight and call, and what becomes of its sums: the same for every way to multiply.
#pragma once

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "../arithmetic/pairs.h"
#include "segments.h"
#include "../arithmetic/vectors.h"

namespace tessera {

constexpr int PANEL = 2 * LANES;  // columns

// What is done with a sum: nothing, gating (SwiGLU), or an activation (`activations.h`).
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

struct Quantized;  // `quantized_linear.h`

struct Linear {
    const int32_t* panels;
    const float* bias;  // one for each column of the panels, or null
    int64_t inputs;     // elements of a row of x; whole units
    int64_t outputs;    // real columns; for SWIGLU those of the result
    int32_t epilogue;
    int32_t result;  // in the weight's type, in float32, or of each row the largest alone
    const Quantized* quantized;  // what codes in `panels` mean; null: they are numbers
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

struct InputCall;

struct LinearCall {
    const Linear* layer;
    const int32_t* x;  // rows of words (`vectors.h`)
    int64_t x_stride;  // words
    void* y;
    int64_t y_stride;  // elements
    int64_t rows;
    int64_t panels, panels_each;
    Largest* largest;  // [tiles, rows], for LARGEST
    const int32_t* chosen;  // of the panels, ascending; null: all
    bool by_tiles;          // x's words are pairs of bfloat16 then
    const uint16_t* rest = nullptr;  // for tiles: `rest_of_rows` (`tile_linear.h`)
    Added* added = nullptr;
    const InputCall* added_inputs = nullptr;
    int64_t passes = 1;  // in which parts of the rows take all panels, one part after the other

    int64_t panel(int64_t place) const { return chosen ? chosen[place] : place; }
};

static inline void compare(Running& best, floats v, int64_t column, int64_t outputs) {
    const ints here = LANE + (int32_t)column;
    const ints real = here < (int32_t)outputs;
    best.poisoned |= (v != v) & real;
    const ints better = (v > best.value) & real;
    best.value = better ? v : best.value;
    best.column = better ? here : best.column;
}

// Of a panel without padding, whose columns these are.
static inline void compare_whole(Running& best, floats a, floats b, ints left, ints right) {
    best.poisoned |= (a != a) | (b != b);
    const ints first = a > best.value;
    const floats value = first ? a : best.value;
    const ints second = b > value;
    best.value = second ? b : value;
    best.column = second ? right : first ? left : best.column;
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

// Writes the two vectors of sums of one row and panel, with bias, gate or activation.
template <class T>
static inline void finish(const LinearCall& call, int64_t panel, int64_t row, floats a, floats b,
                          Running* best) {
    const Linear& layer = *call.layer;
    if (layer.bias) {
        a = a + load<floats>(layer.bias + panel * PANEL);
        b = b + load<floats>(layer.bias + panel * PANEL + LANES);
    }
    if (layer.epilogue == SWIGLU) {
        // Gates in the left half of a panel, what they gate in the right one.
        const int64_t column = panel * LANES;
        const floats gated = a * sigmoid(a) * b;
        const int count = (int)std::min<int64_t>(LANES, layer.outputs - column);
        auto* y = (typename T::Element*)call.y + row * call.y_stride + column;
        return write_some<T>(y, gated, count);
    }
    a = activate(layer.epilogue, a);
    b = activate(layer.epilogue, b);
    const int64_t column = panel * PANEL;
    const int64_t count = layer.outputs - column;
    if (layer.result == LARGEST) {
        compare(best[row], a, column, layer.outputs);
        compare(best[row], b, column + LANES, layer.outputs);
    } else if (layer.result == WIDE) {
        auto* y = (float*)call.y + row * call.y_stride + column;
        write_some<Float32>(y, a, (int)std::min<int64_t>(LANES, count));
        if (count > LANES)
            write_some<Float32>(y + LANES, b, (int)std::min<int64_t>(LANES, count - LANES));
    } else {
        auto* y = (typename T::Element*)call.y + row * call.y_stride + column;
        write_some<T>(y, a, (int)std::min<int64_t>(LANES, count));
        if (count > LANES)
            write_some<T>(y + LANES, b, (int)std::min<int64_t>(LANES, count - LANES));
    }
}

// The same for R rows from `row` on, whose sums stay in registers where nothing but their largest is asked for.
template <class T, int R>
static inline void finish_rows(const LinearCall& call, int64_t panel, int64_t row, const floats* left,
                               const floats* right, Running* best) {
    const Linear& layer = *call.layer;
    const int64_t column = panel * PANEL;
    if (layer.result == LARGEST && layer.epilogue == PLAIN && !layer.bias && column + PANEL <= layer.outputs) {
        const ints here = LANE + (int32_t)column, there = here + LANES;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) compare_whole(best[row + r], left[r], right[r], here, there);
        return;
    }
    for (int r = 0; r < R; r++) finish<T>(call, panel, row + r, left[r], right[r], best);
}

// Which row of a weight is column `c` of a panel; -1 for padding. For SWIGLU the rows are `outputs` gates followed by what
// they gate.
static inline int64_t row_of_column(int64_t outputs, int epilogue, int64_t panel, int c) {
    if (epilogue != SWIGLU) {
        const int64_t row = panel * PANEL + c;
        return row < outputs ? row : -1;
    }
    const int64_t column = panel * LANES + c % LANES;
    return column < outputs ? column + (c < LANES ? 0 : outputs) : -1;
}

// Regions smaller than this are not worth waking other threads for: bytes of weights, or of work that
// takes as long as reading them.
constexpr int64_t LEAST_BYTES = 256 << 10;

}  // namespace tessera
