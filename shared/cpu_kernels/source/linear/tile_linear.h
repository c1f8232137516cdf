// y = x w^T + b in bfloat16 by Intel's tiles (`tiles.h`), over the same panels as vectors have.
//
// A panel's step of 32 inputs is two tiles as it lies: 16 pairs of 32 columns. 32 rows of x, which are not packed, and
// a panel make four tiles of sums; four products need four loads. All rows pass over a panel before the next one:
// x stays in the core's second cache, weights are read once.
//
// Where x is too large for that it is taken in stretches of inputs. Between two of them sums lie in memory, unrounded,
// for as many panels as have room. Neither that nor how rows are grouped changes a bit.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_call.h"
#include "../arithmetic/tiles.h"

namespace tessera {

constexpr int TILES_FROM = 2;  // rows: one is faster by vectors where weights lie in a cache, and as fast elsewhere

#if !TESSERA_TILES

template <class T>
constexpr bool TILES_MULTIPLY = false;

static inline const uint16_t* rest_of_rows(const uint16_t*, int64_t, int64_t, int64_t) { return nullptr; }
static inline void multiply_by_tiles(const LinearCall&, int64_t, int64_t, Running*) {}

#else

template <class T>
constexpr bool TILES_MULTIPLY = T::PER_UNIT == 2;

static_assert(PANEL == 2 * TILE_SIDE && STEP == 2 * TILE_SIDE, "a step of a panel is two tiles");

constexpr int64_t GROUP_ROWS = 2 * TILE_SIDE;
constexpr int64_t PASS_ROWS = 320;           // at most, over one panel
constexpr int64_t STRETCH_BYTES = 768 << 10;  // of x, in a second cache of 2 MB
constexpr int64_t SUMS_BYTES = 512 << 10;     // between two stretches
constexpr int64_t STEP_BYTES = STEP * PANEL * 2;  // of weights
constexpr int64_t LINE = 64;
constexpr int64_t AHEAD_BYTES = 1024;  // of weights that pass once, of what is asked for
// A tile's store takes a thousand cycles where the last one was more than some twenty products ago (measured; the
// manual does not say why): one that nobody reads, every few steps, is cheaper.
constexpr int64_t STORE_EVERY = 8;
constexpr int64_t WRITE_AHEAD = 8;  // steps before the end in which lines of y are asked for

// The last inputs of each row, fewer than a step, filled up with zeros: [rows, STEP]; null where there are none. What
// lies behind a row of x is not read: zero times what is no number there would be none. The result is the calling
// thread's until its next call.
static inline const uint16_t* rest_of_rows(const uint16_t* x, int64_t stride, int64_t inputs, int64_t rows) {
    const int64_t count = inputs % STEP;
    if (count == 0) return nullptr;
    static thread_local std::vector<uint16_t> rest;
    rest.assign(rows * STEP, 0);
    for (int64_t r = 0; r < rows; r++)
        std::memcpy(rest.data() + r * STEP, x + r * stride + inputs - count, count * sizeof *x);
    return rest.data();
}

// Rows in groups of one size, so that one shape of tiles serves all: the last one begins within the one before it.
struct RowGroups {
    int64_t first, rows, count, size;
    int upper, lower;  // rows of a group's two tiles

    // most: rows of a group, two tiles full of them.
    RowGroups(int64_t first, int64_t rows, int64_t most = GROUP_ROWS) : first(first), rows(rows) {
        count = (rows + most - 1) / most;
        size = (rows + count - 1) / count;
        upper = (int)(size <= most / 2 ? size : (size + 1) / 2);
        lower = (int)size - upper;
    }
    int64_t row(int64_t group) const { return first + std::min(group * size, rows - size); }

    // Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.
    void shape() const {
        TileShapes shapes;
        for (int tile : {0, 1, 4}) shapes.set(tile, upper);
        if (lower)
            for (int tile : {2, 3, 5}) shapes.set(tile, lower);
        for (int tile : {6, 7}) shapes.set(tile, TILE_SIDE);
        shape_tiles(shapes);
    }
};

// What one group's steps ask of memory beside what they multiply.
struct Wanted {
    const char* weights = nullptr;  // `lines` of them in each step, for the second cache
    int64_t lines = 0;
    char* y = nullptr;  // a line of each of `y_rows` rows is written after the last step
    int64_t y_stride = 0, y_rows = 0;
};

// One step: `rows` and `lower_rows` are 32 inputs of each row of the group's two tiles.
template <bool BOTH>
static inline void multiply_step(const char* rows, const char* lower_rows, int64_t stride, const char* columns) {
    load_tile<6>(columns, 2 * TILE_STRIDE);
    load_tile<4>(rows, stride);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(columns + TILE_STRIDE, 2 * TILE_STRIDE);
    multiply_tiles<1, 4, 7>();
    if (BOTH) {
        load_tile<5>(lower_rows, stride);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
    }
}

template <bool BOTH>
static inline void multiply_steps(const char* rows, const char* lower_rows, int64_t stride, const char* columns,
                                  int64_t steps, Wanted want) {
    alignas(64) static thread_local char unread[TILE_SIDE * TILE_STRIDE];
    char* const nowhere = unread;
    for (int64_t step = 0; step < steps; step++) {
        if (step % STORE_EVERY == STORE_EVERY - 1) store_tile<6>(nowhere, TILE_STRIDE);
        for (int64_t line = 0; line < want.lines; line++, want.weights += LINE)
            __builtin_prefetch(want.weights, 0, 2);
        // Early, since they may come from afar, and again at the end: what passes meanwhile pushes them out.
        if (step < want.y_rows) __builtin_prefetch(want.y + step * want.y_stride, 1);
        if (want.y_rows && step >= steps - WRITE_AHEAD)
            for (int64_t r = (step - steps + WRITE_AHEAD) * 4, end = std::min(r + 4, want.y_rows); r < end; r++)
                __builtin_prefetch(want.y + r * want.y_stride, 1);
        multiply_step<BOTH>(rows, lower_rows, stride, columns);
        rows += STEP * 2;
        lower_rows += STEP * 2;
        columns += STEP_BYTES;
    }
}

// Some steps of one panel for all groups of rows.
struct Stretch {
    int64_t first, count;  // steps; the last one of an incomplete row is among them
    bool begins, ends;
};

class TileProducts {
public:
    TileProducts(const LinearCall& call, const RowGroups& groups, Running* best)
        : call_(call), groups_(groups), best_(best), stride_(call.x_stride * 4) {
        const int64_t inputs = call.layer->inputs;
        whole_ = inputs / STEP;
        steps_ = (inputs + STEP - 1) / STEP;
        if (call.layer->result == LARGEST) return;
        const bool gated = call.layer->epilogue == SWIGLU;
        const int64_t size = call.layer->result == WIDE ? 4 : 2;
        y_stride_ = call.y_stride * size;
        y_panel_ = (gated ? LANES : PANEL) * size;
    }

    const char* weights(int64_t panel, int64_t step) const {
        return (const char*)call_.layer->panels + (panel * steps_ + step) * STEP_BYTES;
    }

    // sums: [groups][GROUP_ROWS, PANEL] of the stretches before and after; null: this one is all there is. next: the
    // weights that follow, or null.
    void multiply(int64_t panel, const Stretch& part, float* sums, const char* next) const {
        alignas(64) float scratch[GROUP_ROWS * PANEL];
        const bool once = groups_.count == 1;
        const int64_t whole = std::min(part.count, whole_ - part.first);
        const char* w = weights(panel, part.first);
        const int64_t passed = part.count * STEP_BYTES / LINE;
        for (int64_t group = 0; group < groups_.count; group++) {
            Wanted want;
            if (once) {
                want.weights = w + AHEAD_BYTES;
                want.lines = STEP_BYTES / LINE;
            } else if (next) {
                want.lines = (passed + part.count * groups_.count - 1) / (part.count * groups_.count);
                want.weights = next + group * part.count * want.lines * LINE;
            }
            const int64_t row = groups_.row(group);
            if (part.ends && y_stride_) {
                want.y = (char*)call_.y + row * y_stride_ + panel * y_panel_;
                want.y_stride = y_stride_;
                want.y_rows = groups_.size;
            }
            float* to = sums ? sums + group * GROUP_ROWS * PANEL : scratch;
            if (groups_.lower)
                add<true>(row, w, part, whole, to, want);
            else
                add<false>(row, w, part, whole, to, want);
            if (!part.ends) continue;
            const floats* added = call_.added ? added_to_panels<BFloat16>(*call_.added, panel, panel + 1).of(panel) : nullptr;
            for (int64_t r = 0; r < groups_.size; r++) {
                const float* of = to + r * PANEL;
                floats left = load<floats>(of), right = load<floats>(of + LANES);
                if (added) {
                    left = left + added[2 * (row + r)];
                    right = right + added[2 * (row + r) + 1];
                }
                finish<BFloat16>(call_, panel, row + r, left, right, best_);
            }
        }
    }

private:
    template <bool BOTH>
    void add(int64_t row, const char* w, const Stretch& part, int64_t whole, float* sums, const Wanted& want) const {
        constexpr int64_t BYTES = PANEL * sizeof(float);
        float* const lower_sums = sums + groups_.upper * PANEL;
        if (part.begins) {
            zero_tile<0>();
            zero_tile<1>();
            if (BOTH) zero_tile<2>();
            if (BOTH) zero_tile<3>();
        } else {
            load_tile<0>(sums, BYTES);
            load_tile<1>(sums + TILE_SIDE, BYTES);
            if (BOTH) load_tile<2>(lower_sums, BYTES);
            if (BOTH) load_tile<3>(lower_sums + TILE_SIDE, BYTES);
        }
        const char* x = (const char*)call_.x + row * stride_ + part.first * STEP * 2;
        multiply_steps<BOTH>(x, x + groups_.upper * stride_, stride_, w, whole, want);
        if (whole < part.count) {
            const char* rest = (const char*)(call_.rest + row * STEP);
            multiply_step<BOTH>(rest, rest + groups_.upper * TILE_STRIDE, TILE_STRIDE, w + whole * STEP_BYTES);
        }
        store_tile<0>(sums, BYTES);
        store_tile<1>(sums + TILE_SIDE, BYTES);
        if (BOTH) store_tile<2>(lower_sums, BYTES);
        if (BOTH) store_tile<3>(lower_sums + TILE_SIDE, BYTES);
    }

    const LinearCall& call_;
    const RowGroups& groups_;
    Running* best_;
    int64_t stride_;  // bytes between rows of x
    int64_t whole_, steps_;  // of a row: those without and with an incomplete last one
    int64_t y_stride_ = 0, y_panel_ = 0;  // bytes
};

// Rows [begin, end) of places [first, last) of the panels.
static void pass_rows(const LinearCall& call, int64_t first, int64_t last, int64_t begin, int64_t end,
                      Running* best) {
    static thread_local std::vector<float> memory;
    const RowGroups groups(begin, end - begin);
    groups.shape();
    const TileProducts products(call, groups, best);
    const int64_t steps = (call.layer->inputs + STEP - 1) / STEP;
    const int64_t most = std::max<int64_t>(8, STRETCH_BYTES / (groups.rows * STEP * 2));
    const int64_t stretches = groups.count == 1 ? 1 : (steps + most - 1) / most;
    const int64_t each = (steps + stretches - 1) / stretches, floats_each = groups.count * GROUP_ROWS * PANEL;
    int64_t panels = last - first;
    float* sums = nullptr;
    if (stretches > 1) {
        panels = std::clamp<int64_t>(SUMS_BYTES / 4 / floats_each, 1, panels);
        memory.resize(panels * floats_each + LINE / 4);
        sums = (float*)(((uintptr_t)memory.data() + LINE - 1) & ~(uintptr_t)(LINE - 1));
    }
    for (int64_t p = first; p < last; p += panels) {
        const int64_t stop = std::min(last, p + panels);
        for (int64_t step = 0; step < steps; step += each) {
            const Stretch part{step, std::min(each, steps - step), step == 0, step + each >= steps};
            for (int64_t place = p; place < stop; place++) {
                const char* next = nullptr;
                if (place + 1 < stop)
                    next = products.weights(call.panel(place + 1), step);
                else if (!part.ends)
                    next = products.weights(call.panel(p), step + each);
                else if (stop < last)
                    next = products.weights(call.panel(stop), 0);
                products.multiply(call.panel(place), part, sums ? sums + (place - p) * floats_each : nullptr, next);
            }
        }
    }
}

// Places [first, last) of the panels for all rows.
static void multiply_by_tiles(const LinearCall& call, int64_t first, int64_t last, Running* best) {
    const int64_t passes = (call.rows + PASS_ROWS - 1) / PASS_ROWS;
    for (int64_t pass = 0; pass < passes; pass++)
        pass_rows(call, first, last, call.rows * pass / passes, call.rows * (pass + 1) / passes, best);
    release_tiles();
}

#endif

}  // namespace tessera
