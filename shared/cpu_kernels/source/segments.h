// What low-rank adapters add to a linear layer's sums before anything becomes of these: up(down(x)) for some rows each
// (LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685).
//
// down(x) is taken first (`segment_inputs.h`); its products with `up` continue the layer's own sums in float32, from the
// first of the rank to the last, one addition after the other. A row's bits depend on its additions alone.
#pragma once

#include <algorithm>
#include <atomic>

#include "pool.h"
#include "vectors.h"

namespace tessera {

// Which vectors of a panel an addition's outputs are: both, numbered through, or, of a layer whose panels have gates on
// the left and what these gate on the right, those of one side.
enum Side { BOTH_SIDES = 0, LEFT = 1, RIGHT = 2 };

// One adapter's addition to one linear layer. `up` is zero for what its vectors have beside its own outputs.
struct Addition {
    const void* down;  // [rank, inputs] of the element type
    const void* up;    // [last - first, rank, LANES] of the element type
    int64_t rank, inputs;
    int64_t first, last;  // vectors of outputs
    int64_t side;
};

// Which rows have which additions; most often alike for all layers of a step.
struct Segments {
    int64_t rows;   // of the step
    int64_t count;  // segments
    const int64_t* starts;      // [count + 1]: of each segment's rows in `members`
    const int64_t* members;     // rows, ascending within a segment
    const int64_t* row_starts;  // [rows + 1]: of each row's entries in the next two
    const int32_t* segment;     // the segments that a row is in, ascending
    const int32_t* place;       // and the how manieth of their rows it is
    const int32_t* pattern;     // [rows]: equal where rows are in the same segments
};

// What one adapter adds to each product of a decoder layer, or, of another linear layer, to the first.
struct Adapter {
    enum Product { QKV, OUTPUT, GATE_UP, DOWN };
    struct {
        const Addition* all;
        int64_t count;
    } products[4];
};

// The adapter of each segment, and which of its products is meant.
struct Additions {
    const Segments* segments;
    const Adapter* const* adapters;
    Adapter::Product product;

    bool empty() const {
        for (int64_t s = 0; s < segments->count; s++)
            if (adapters[s]->products[product].count) return false;
        return true;
    }
};

// All of them, one segment's after the other's, with what `down` makes of the rows: for each addition [rows of its segment,
// rank], at `inputs[at[i]]`. That is done in so many tiles of the region that multiplies with the layer's own weights: its
// first ones.
struct Added {
    const Segments* segments;
    const Addition* const* all;
    const int64_t* starts;  // [segments + 1]: in `all`
    const float* inputs;
    const int64_t* at;
    int tiles;
    std::atomic<int>* done;

    // Until the last of those tiles, which other threads have, is done.
    void wait() const {
        while (done->load(std::memory_order_acquire) < tiles) Pool::pause();
    }
};

// Adds one vector of outputs, or two, to the sums of R rows. Vector v of row r is multiplied with inputs[v][r] [rank].
template <class T, int R, int VECTORS>
static inline void add_vectors(const typename T::Element* const* up, int64_t rank,
                               const float* const (*inputs)[R], floats* const* sums) {
    floats held[VECTORS][R];  // in registers: what is behind a pointer would be written at every step
    for (int v = 0; v < VECTORS; v++)
        for (int r = 0; r < R; r++) held[v][r] = sums[v][r];
    for (int64_t k = 0; k < rank; k++) {
        floats columns[VECTORS];
        for (int v = 0; v < VECTORS; v++) columns[v] = T::read(up[v] + k * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                held[v][r] = fused(broadcast(inputs[v][r][k]), columns[v], held[v][r]);
        }
    }
    for (int v = 0; v < VECTORS; v++)
        for (int r = 0; r < R; r++) sums[v][r] = held[v][r];
}

// Asks for what all additions have for a panel: it lies apart from the layer's own stream of weights.
template <class T>
static inline void ask_for_segments(const Added& added, int64_t panel) {
    const int64_t count = added.starts[added.segments->count];
    for (int64_t i = 0; i < count; i++) {
        const Addition& addition = *added.all[i];
        const int64_t each = addition.side == BOTH_SIDES ? 2 : 1, bytes = addition.rank * LANES * sizeof(typename T::Element);
        const int64_t first = std::max(addition.first, each * panel), last = std::min(addition.last, each * (panel + 1));
        const char* at = (const char*)addition.up + (first - addition.first) * bytes;
        for (int64_t byte = 0; byte < (last - first) * bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
    }
}

// The vectors of a panel that get something, at most two.
template <class T, int R>
struct PanelParts {
    const typename T::Element* up[2];
    floats* sums[2];
    const float* inputs[2][R];
    int count = 0;

    // `from`: what `down` made of each row.
    void take(const Addition& addition, int64_t vector, const float* const* from, floats* to) {
        if (vector < addition.first || vector >= addition.last) return;
        up[count] = (const typename T::Element*)addition.up + (vector - addition.first) * addition.rank * LANES;
        for (int r = 0; r < R; r++) inputs[count][r] = from[r];
        sums[count++] = to;
    }

    void add(int64_t rank) const {
        if (count == 2)
            add_vectors<T, R, 2>(up, rank, inputs, sums);
        else if (count == 1)
            add_vectors<T, R, 1>(up, rank, inputs, sums);
    }
};

// What all additions add, for rows [row, row + R) that are in the same segments.
template <class T, int R>
static inline void add_to_alike(const Added& added, int64_t panel, int64_t row, floats* left, floats* right) {
    const Segments& segments = *added.segments;
    const int64_t* first = segments.row_starts + row;
    for (int64_t entry = 0; entry < first[1] - first[0]; entry++) {
        const int32_t segment = segments.segment[first[0] + entry];
        const int64_t end = added.starts[segment + 1];
        int64_t i = added.starts[segment];
        while (i < end) {
            PanelParts<T, R> parts;
            const auto take = [&](int64_t number) -> const Addition& {
                const Addition& addition = *added.all[number];
                const float* from[R];
                for (int r = 0; r < R; r++)
                    from[r] = added.inputs + added.at[number] + segments.place[first[r] + entry] * addition.rank;
                const bool numbered = addition.side == BOTH_SIDES;
                if (addition.side != RIGHT) parts.take(addition, numbered ? 2 * panel : panel, from, left);
                if (addition.side != LEFT) parts.take(addition, numbered ? 2 * panel + 1 : panel, from, right);
                return addition;
            };
            const Addition& one = take(i++);
            // Gates and what they gate, most often side by side, are added together.
            if (one.side == LEFT && i < end) {
                const Addition& next = *added.all[i];
                if (next.side == RIGHT && next.rank == one.rank) take(i++);
            }
            parts.add(one.rank);
        }
    }
}

// What the segments add to the sums of rows [row, row + R) and one panel: together where the rows are in the same ones.
// Not inlined: the caller's sums stay in registers until here.
template <class T, int R>
[[gnu::noinline]] static void add_segments(const Added& added, int64_t panel, int64_t row, floats* left, floats* right) {
    added.wait();
    const int32_t* pattern = added.segments->pattern + row;
    bool alike = true;
    for (int r = 1; r < R; r++) alike &= pattern[r] == pattern[0];
    if (alike) return add_to_alike<T, R>(added, panel, row, left, right);
    for (int r = 0; r < R; r++) add_to_alike<T, 1>(added, panel, row + r, left + r, right + r);
}

}  // namespace tessera
