// y = x w^T + b over packed weights, for any number of rows.
//
// A packed weight is a row of panels, each of two vectors of columns (outputs): for every unit of
// the inputs the columns' units side by side, so that one row reads memory in one stream, and a tile
// of rows keeps its sums in registers. Each output is one sum over the inputs in their order, or in steps
// (`pairs.h`).
//
// Where there are more rows than a tile or a few have, a panel is taken in blocks of inputs that stay in a
// core's own cache while all rows pass: between blocks the sums are kept in memory, unrounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear_call.h"
#include "../pool.h"
#include "segment_inputs.h"
#include "tile_linear.h"

namespace tessera {

// Words of each column in a block: with the rows of a tile they fill most of the second cache (three
// quarters of 512 KiB for AVX2, of 1 MiB for AVX-512). Smaller blocks were slower (benchmarks/README.md).
constexpr int64_t BLOCK = 6144;
constexpr int WIDEN_TILES = 4;  // of rows: with more it pays to widen a block before they pass
constexpr int AHEAD_WORDS = 512;  // how far ahead of the sums weights are asked for

// Rows whose sums stay in registers.
template <class T>
constexpr int ROWS_AT_ONCE = IN_STEPS<T> ? STEP_ROWS : TILE_ROWS;

// Adds the products of `units` of a panel with R rows of words.
template <class T, int R>
static inline void add_products(const int32_t* w, const int32_t* x, int64_t stride, int64_t units,
                                floats* left, floats* right) {
    for (int64_t u = 0; u < units; u++, w += PANEL, x += T::PARTS) {
        for (int word = 0; word < PANEL; word += 16) __builtin_prefetch(w + AHEAD_WORDS + word);
#pragma GCC unroll 2
        for (int part = 0; part < T::PARTS; part++) {
            const ints a = T::column(load<ints>(w), part);
            const ints b = T::column(load<ints>(w + LANES), part);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int32_t word = x[r * stride + part];
                left[r] = T::dot(left[r], a, word);
                right[r] = T::dot(right[r], b, word);
            }
        }
    }
}

// Some inputs of a panel, as P reads them: the weight's type, or float32 where they were widened.
struct Block {
    int64_t panel;  // its number
    const int32_t* units;
    int64_t count;  // units
    int64_t first;  // word of x that belongs to the first
    floats* sums;   // [rows][2]: of the blocks before and after; null: this block is all there is
    bool begins, ends;
    const floats* added = nullptr;  // [rows][2]: what adapters add, or null
};

// Rows [row, row + R) of one block.
template <class P, class T, int R>
static inline void multiply(const LinearCall& call, const Block& block, int64_t row,
                            Running* best) {
    floats left[R] = {}, right[R] = {};
    floats* sums = block.sums + 2 * row;
    if (!block.begins)
        for (int r = 0; r < R; r++) {
            left[r] = sums[2 * r];
            right[r] = sums[2 * r + 1];
        }
    const int32_t* x = call.x + row * call.x_stride + block.first;
    if constexpr (IN_STEPS<T>)
        add_steps<P, R>(block.units, x, call.x_stride, block.count, left, right);
    else
        add_products<P, R>(block.units, x, call.x_stride, block.count, left, right);
    if (block.ends && block.added) {
        const floats* added = block.added + 2 * row;
        for (int r = 0; r < R; r++) {
            left[r] = left[r] + added[2 * r];
            right[r] = right[r] + added[2 * r + 1];
        }
    }
    if (block.ends) return finish_rows<T, R>(call, block.panel, row, left, right, best);
    for (int r = 0; r < R; r++) {
        sums[2 * r] = left[r];
        sums[2 * r + 1] = right[r];
    }
}

template <class P, class T, int R>
static inline void multiply_some(const LinearCall& call, const Block& block, int64_t row, int rows,
                                 Running* best) {
    if constexpr (R > 0) {
        if (rows == R) return multiply<P, T, R>(call, block, row, best);
        multiply_some<P, T, R - 1>(call, block, row, rows, best);
    }
}

// All rows of one block.
template <class P, class T>
static void multiply_rows(const LinearCall& call, const Block& block, Running* best) {
    constexpr int MOST = ROWS_AT_ONCE<T>;
    const int64_t groups = (call.rows + MOST - 1) / MOST;
    for (int64_t group = 0; group < groups; group++) {
        // Groups of like size: a last one of one row would cost as much as one of many.
        const int64_t row = call.rows * group / groups;
        const int64_t end = call.rows * (group + 1) / groups;
        multiply_some<P, T, MOST>(call, block, row, (int)(end - row), best);
    }
}

// The parts of `units`, each as a unit of float32.
template <class T>
static void widen_units(const int32_t* units, int64_t count, int32_t* widened) {
    for (int64_t u = 0; u < count; u++)
        for (int part = 0; part < T::PARTS; part++)
            for (int c = 0; c < PANEL; c += LANES, widened += LANES)
                store(widened, T::column(load<ints>(units + u * PANEL + c), part));
}

// added: [rows][2], what adapters add, or null.
template <class T>
static void multiply_panel(const LinearCall& call, int64_t panel, const floats* added, Running* best) {
    typedef typename VectorsOf<T>::Type V;
    const int64_t units = whole_steps<T>(call.layer->inputs) / V::PER_UNIT;
    const int32_t* w = call.layer->panels + panel * units * PANEL;
    if (call.rows <= (V::WIDENS ? WIDEN_TILES : 1) * TILE_ROWS)
        return multiply_rows<V, T>(call, Block{panel, w, units, 0, nullptr, true, true, added}, best);
    static thread_local std::vector<floats> sums;
    static thread_local std::vector<int32_t> widened;
    sums.resize(2 * call.rows);
    widened.resize(V::WIDENS ? BLOCK * PANEL : 0);
    const int64_t most = BLOCK / V::PARTS;
    for (int64_t first = 0; first < units; first += most) {
        const int64_t count = std::min(most, units - first);
        const bool begins = first == 0, ends = first + count == units;
        Block block{panel, w + first * PANEL, count, first * V::PARTS, sums.data(), begins, ends, added};
        if constexpr (V::WIDENS) {
            widen_units<V>(block.units, count, widened.data());
            block.units = widened.data();
            block.count = count * V::PARTS;
            multiply_rows<Float32, T>(call, block, best);
        } else {
            multiply_rows<V, T>(call, block, best);
        }
    }
}

// The largest of each row of a tile of panels so far, where they are asked for; this thread's until the next call.
static inline Running* begin_largest(const LinearCall& call) {
    static thread_local std::vector<Running> best;
    if (call.largest) best.assign(call.rows, Running{broadcast(-INFINITY), broadcast_int(-1), ints{}});
    return best.data();
}

static inline void end_largest(const LinearCall& call, int tile, const Running* best) {
    if (call.largest)
        for (int64_t r = 0; r < call.rows; r++) call.largest[tile * call.rows + r] = settle(best[r]);
}

// The inputs of what is added come first: whether that is what this tile is, else which of the panels' tiles it is.
// Nobody waits for all of them before the sums they are added to.
template <class T>
static inline bool takes_inputs(const LinearCall& call, int& tile) {
    if (!call.added) return false;
    if (tile >= call.added->tiles) {
        tile -= call.added->tiles;
        return false;
    }
    ask_after_inputs<T>(*call.added_inputs, *call.added, tile);
    take_input_tile<T>(*call.added_inputs, tile);
    call.added->done->fetch_add(1, std::memory_order_release);
    return true;
}

// Calls body(place, added) for places [first, last) of the panels: `added` is what adapters add to the panel, [rows][2], or
// null. Where they do, the panels are all there are.
template <class T, class Body>
static inline void for_panels(const LinearCall& call, int64_t first, int64_t last, const Body& body) {
    int64_t end = last, each = 0;
    for (int64_t place = first; place < last;) {
        const floats* sums = nullptr;
        if (call.added) {
            const AddedPanels& panels = added_to_panels<T>(*call.added, place, last);
            end = std::min(last, panels.last);
            each = panels.each;
            sums = panels.of(place);
        }
        for (; place < end; place++, sums += each) body(place, sums);
    }
    if (!call.added || !call.added->next) return;
    const Added::Run run = call.added->run_of(last - 1);
    if (last == run.last) ask_for(call.added->next[run.number]);
}

template <class T>
static void linear_tile(void* context, int tile) {
    const auto& call = *(const LinearCall*)context;
    const DenormalsAreZero<T> flushed;
    if (takes_inputs<T>(call, tile)) return;
    const int64_t first = tile * call.panels_each;
    const int64_t last = std::min(call.panels, first + call.panels_each);
    Running* best = begin_largest(call);
    if (call.by_tiles)
        multiply_by_tiles(call, first, last, best);
    else
        for_panels<T>(call, first, last, [&](int64_t place, const floats* added) {
            multiply_panel<T>(call, call.panel(place), added, best);
        });
    end_largest(call, tile, best);
}

// Divides the panels of a call, all or those chosen, into tiles for the threads, and merges what they found.
static void run_panels(Pool& pool, LinearCall& call, int64_t panel_bytes, Pool::Work work, void* context) {
    const Linear& layer = *call.layer;
    const int64_t width = layer.epilogue == SWIGLU ? LANES : PANEL;
    if (!call.chosen) call.panels = (layer.outputs + width - 1) / width;
    const int64_t bytes = panel_bytes * call.panels * std::max<int64_t>(1, call.rows / 4);
    // Few enough that taking one costs nothing, many enough that a delayed thread costs little.
    const bool alone = bytes < LEAST_BYTES || pool.threads() == 1;
    const int64_t most = alone ? 1 : std::min<int64_t>(call.panels, 16 * pool.threads());
    call.panels_each = (call.panels + most - 1) / most;
    const int64_t tiles = (call.panels + call.panels_each - 1) / call.panels_each;
    const int64_t inputs = call.added ? call.added->tiles : 0;
    if (call.added) {
        call.added->panels = call.panels;
        call.added->panels_each = call.panels_each;
        call.added->weights = (const char*)layer.panels;
        call.added->panel_bytes = panel_bytes;
    }
    static thread_local std::vector<Largest> found;
    if (layer.result == LARGEST) {
        found.resize(tiles * call.rows);
        call.largest = found.data();
    }
    pool.run((int)(inputs + tiles * call.passes), (int)inputs, work, context);
    if (layer.result != LARGEST) return;
    auto* results = (Largest*)call.y;
    for (int64_t r = 0; r < call.rows; r++) {
        results[r] = found[r];
        for (int64_t tile = 1; tile < tiles; tile++) {
            const Largest& other = found[tile * call.rows + r];
            if (other.value > results[r].value || other.value != other.value) results[r] = other;
            if (results[r].value != results[r].value) break;
        }
    }
}

template <class T>
struct Widening {
    const typename T::Element* x;
    int64_t x_stride, inputs, rows, rows_each;
    int64_t width;   // words of a row, those beyond `inputs` zero
    int32_t* words;  // [rows, width]
};

template <class T>
static void widen_tile(void* context, int tile) {
    const auto& call = *(const Widening<T>*)context;
    const int64_t last = std::min(call.rows, (tile + 1) * call.rows_each);
    for (int64_t r = tile * call.rows_each; r < last; r++) {
        int32_t* words = call.words + r * call.width;
        to_words<T>(call.x + r * call.x_stride, call.inputs, words);
        std::fill(words + call.inputs, words + call.width, 0);
    }
}

// Widens rows of x once, not in every panel; the result is the calling thread's until its next call.
template <class T>
static const int32_t* widen_rows(Pool& pool, const typename T::Element* x, int64_t x_stride,
                                 int64_t inputs, int64_t width, int64_t rows) {
    static thread_local std::vector<int32_t> words;
    words.resize(std::max<int64_t>(words.size(), rows * width));
    const int64_t each = std::max<int64_t>(1, LEAST_BYTES / 8 / inputs);
    Widening<T> call{x, x_stride, inputs, rows, each, width, words.data()};
    pool.run((int)((rows + each - 1) / each), widen_tile<T>, &call);
    return words.data();
}

// chosen: the panels to multiply, ascending, at least one; null: all of them. additions: of adapters, or null.
template <class T>
static void linear(Pool& pool, const Linear& layer, const typename T::Element* x, int64_t x_stride,
                   void* y, int64_t y_stride, int64_t rows,
                   const std::vector<int32_t>* chosen = nullptr, const Additions* additions = nullptr) {
    if (rows == 0) return;
    typedef typename VectorsOf<T>::Type V;
    LinearCall call{&layer, nullptr, 0, y, y_stride, rows, 0, 0, nullptr, nullptr, false};
    Added added;
    InputCall inputs;
    if (additions) {
        inputs = plan_inputs<T>(pool, *additions, x, x_stride, added);
        call.added = &added;
        call.added_inputs = &inputs;
    }
    call.by_tiles = TILES_MULTIPLY<T> && rows >= TILES_FROM;
    if (V::WIDENS && !call.by_tiles) {
        call.x_stride = whole_steps<T>(layer.inputs);
        call.x = widen_rows<V>(pool, x, x_stride, layer.inputs, call.x_stride, rows);
    } else {
        call.x = (const int32_t*)x;
        call.x_stride = x_stride / T::PER_UNIT;
        if (call.by_tiles) call.rest = rest_of_rows((const uint16_t*)x, x_stride, layer.inputs, rows);
    }
    if (chosen) {
        call.chosen = chosen->data();
        call.panels = (int64_t)chosen->size();
    }
    const int64_t panel_bytes = whole_steps<T>(layer.inputs) * PANEL * sizeof(typename T::Element);
    run_panels(pool, call, panel_bytes, linear_tile<T>, &call);
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
    const int64_t padded = whole_steps<T>(call.inputs), units = padded / T::PER_UNIT;
    auto* to = call.panels + panel * padded * PANEL;
    for (int64_t u = 0; u < units; u++)
        for (int c = 0; c < PANEL; c++) {
            const int64_t row = row_of_column(call.outputs, call.epilogue, panel, c);
            const bool real = row >= 0 && u * T::PER_UNIT < call.inputs;
            for (int i = 0; i < T::PER_UNIT; i++)
                *to++ = real ? call.weight[row * call.inputs + u * T::PER_UNIT + i] : 0;
        }
}

// Packs rows [outputs, inputs] of the element type, `inputs` in whole units; `panels` has room for
// whole panels of whole steps. For SWIGLU the rows are `outputs` gates followed by what they gate.
template <class T>
static void pack(Pool& pool, const typename T::Element* weight, int64_t outputs, int64_t inputs,
                 int epilogue, typename T::Element* panels) {
    PackCall<T> call{weight, outputs, inputs, epilogue, panels};
    const int64_t width = epilogue == SWIGLU ? LANES : PANEL;
    pool.run((int)((outputs + width - 1) / width), pack_panel<T>, &call);
}

}  // namespace tessera
