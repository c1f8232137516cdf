// What low-rank adapters add to a linear layer's sums before anything becomes of these: up(down(x)) for some rows each
// (LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685).
//
// down(x) is taken first (`segment_inputs.h`). Its products with `up` are added up in float32 for some panels before these
// are multiplied, from the first of the rank to the last, one addition after the other, and join the layer's own sums at
// the end of each panel. A row's bits depend on its additions alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "../pool.h"
#include "../arithmetic/vectors.h"

namespace tessera {

// Which vectors of a panel an addition's outputs are: both, numbered through, or, of a layer whose panels have gates on
// the left and what these gate on the right, those of one side.
enum Side { BOTH_SIDES = 0, LEFT = 1, RIGHT = 2 };

// One adapter's addition to one linear layer. `up` is zero for what its vectors have beside its own outputs.
struct Addition {
    const void* down;  // as `segment_inputs.h` has it
    const void* up;    // [last - first, units, LANES]: units (`vectors.h`) of ranks, the last one filled up with zeros
    int64_t rank, inputs;
    int64_t first, last;  // vectors of outputs
    int64_t side;
};

// Which rows have which additions; most often alike for all layers of a step.
struct Segments {
    int64_t rows;   // of the step
    int64_t count;  // segments
    const int64_t* starts;   // [count + 1]: of each segment's rows in `members`
    const int64_t* members;  // rows, ascending within a segment
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
    uint64_t number;  // of the call, which no other has
    int64_t panels, panels_each;  // of the product, and in a tile
    int threads;
    const char* weights;  // of the layer itself, its panels
    int64_t panel_bytes;
    const void* const* next;  // what each thread first reads of `down` of the layer's next product, or null

    // Until the last of those tiles, which other threads have, is done.
    void wait() const {
        while (done->load(std::memory_order_acquire) < tiles) Pool::pause();
    }

    // Panels that a thread has a run of.
    struct Run {
        int number;
        int64_t first, last;
    };

    Run run(int number) const {
        const int all = (int)((panels + panels_each - 1) / panels_each);
        const auto end = [&](int runs) { return std::min(panels, Pool::runs_end(all, threads, runs) * panels_each); };
        return {number, end(number), end(number + 1)};
    }

    Run run_of(int64_t panel) const {
        int number = 0;
        while (run(number).last <= panel) number++;
        return run(number);
    }
};

// Asks for the beginning of what will be read in one stream: from where memory has nothing under way it takes as long to
// come as kilobytes later.
constexpr int64_t BEGINNING = 4096;

static inline void ask_for(const void* beginning) {
    for (int64_t byte = 0; byte < BEGINNING; byte += 64) __builtin_prefetch((const char*)beginning + byte);
}

constexpr int64_t ADDED_BYTES = 128 << 10;  // of sums at once; fewer were no faster (benchmarks/README.md)

// In how many units so many ranks are.
template <class T>
static inline int64_t rank_units(int64_t ranks) {
    return (ranks + UNIT<T> - 1) / UNIT<T>;
}

// Multiplies a vector of outputs with what `down` made of R rows and adds that to `sums`, of each row. One vector after the
// other: they are one stream then, and processors overlap the chains of several by themselves.
template <class T, int R>
static inline void add_vector(const int32_t* up, int64_t rank, const float* const* inputs, floats* const* sums) {
    floats held[R];  // in registers: what is behind a pointer would be written at every step
    for (int r = 0; r < R; r++) held[r] = *sums[r];
    const auto add = [&](int64_t k, int count) __attribute__((always_inline)) {
        const ints units = load<ints>(up + k / UNIT<T> * LANES);
#pragma GCC unroll 2
        for (int number = 0; number < count; number++) {
            const floats column = read_unit<T>(units, number);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) held[r] = fused(broadcast(inputs[r][k + number]), column, held[r]);
        }
    };
    int64_t k = 0;
    for (; k + UNIT<T> <= rank; k += UNIT<T>) add(k, UNIT<T>);
    if (k < rank) add(k, 1);
    for (int r = 0; r < R; r++) *sums[r] = held[r];
}

// Which vectors of an addition lie in panels [first, last): none where `begin` is not below `end`.
struct PanelVectors {
    int64_t begin, end;
};

static inline PanelVectors vectors_in(const Addition& addition, int64_t first, int64_t last) {
    const int64_t each = addition.side == BOTH_SIDES ? 2 : 1;
    return {std::max(addition.first, each * first), std::min(addition.last, each * last)};
}

// An addition's vector of outputs: [units, LANES].
template <class T>
static inline const int32_t* up_of(const Addition& addition, int64_t vector) {
    return (const int32_t*)addition.up + (vector - addition.first) * rank_units<T>(addition.rank) * LANES;
}

// What segments add to panels [first, last) of all rows: [last - first][rows][2] vectors.
struct AddedSums {
    floats* at;
    int64_t first, last, rows;

    // Of an addition's vector and a row.
    floats* of(const Addition& addition, int64_t vector, int64_t row) const {
        const bool numbered = addition.side == BOTH_SIDES;
        const int64_t panel = numbered ? vector / 2 : vector, half = numbered ? vector % 2 : addition.side == RIGHT;
        return at + ((panel - first) * rows + row) * 2 + half;
    }
};

// Vectors [begin, end) of an addition for R rows.
template <class T, int R>
static inline void add_to_rows(const Addition& addition, int64_t begin, int64_t end, const int64_t* rows,
                               const float* const* inputs, const AddedSums& sums) {
    for (int64_t vector = begin; vector < end; vector++) {
        floats* to[R];
        for (int r = 0; r < R; r++) to[r] = sums.of(addition, vector, rows[r]);
        add_vector<T, R>(up_of<T>(addition, vector), addition.rank, inputs, to);
    }
}

// What one addition adds to the rows of its segment, for which `down` made `inputs` [rows, rank].
template <class T>
static inline void add_to_segment(const Addition& addition, const int64_t* members, int64_t count, const float* inputs,
                                  const AddedSums& sums) {
    const auto [begin, end] = vectors_in(addition, sums.first, sums.last);
    if (begin >= end) return;
    for (int64_t member = 0; member < count; member += 4) {
        const float* from[4];
        const int64_t rows = std::min<int64_t>(4, count - member);
        for (int64_t r = 0; r < rows; r++) from[r] = inputs + (member + r) * addition.rank;
        switch (rows) {
            case 1: add_to_rows<T, 1>(addition, begin, end, members + member, from, sums); break;
            case 2: add_to_rows<T, 2>(addition, begin, end, members + member, from, sums); break;
            case 3: add_to_rows<T, 3>(addition, begin, end, members + member, from, sums); break;
            default: add_to_rows<T, 4>(addition, begin, end, members + member, from, sums);
        }
    }
}

// Asks for what an addition to panels [first, last) reads first.
template <class T>
static inline void ask_for_up(const Addition& addition, int64_t first, int64_t last) {
    const auto [begin, end] = vectors_in(addition, first, last);
    if (begin < end) ask_for(up_of<T>(addition, begin));
}

// How many panels' sums are kept at once: most often those of all that a thread has of a layer.
static inline int64_t added_panels(int64_t rows) {
    return std::max<int64_t>(1, ADDED_BYTES / (rows * 2 * (int64_t)sizeof(floats)));
}

// What all segments add to some panels: [last - first][rows][2] vectors.
struct AddedPanels {
    uint64_t number = 0;  // of the call
    int64_t first = 0, last = 0;
    int64_t each = 0;  // vectors of a panel
    std::vector<floats> sums;

    const floats* of(int64_t panel) const { return sums.data() + (panel - first) * each; }
};

// Not inlined: it is called once for many panels.
template <class T>
[[gnu::noinline]] static void add_segments(const Added& added, AddedPanels& panels) {
    const Segments& segments = *added.segments;
    // Minus zero is what may be added to any sum, zero of either sign too, and leave its bits as they are.
    panels.sums.assign((panels.last - panels.first) * segments.rows * 2, broadcast(-0.0f));
    const AddedSums sums{panels.sums.data(), panels.first, panels.last, segments.rows};
    added.wait();
    const int64_t all = added.starts[segments.count];
    for (int64_t s = 0; s < segments.count; s++) {
        const int64_t* members = segments.members + segments.starts[s];
        const int64_t count = segments.starts[s + 1] - segments.starts[s];
        for (int64_t i = added.starts[s]; i < added.starts[s + 1]; i++) {
            if (i + 1 < all)
                ask_for_up<T>(*added.all[i + 1], panels.first, panels.last);
            else
                ask_for(added.weights + panels.first * added.panel_bytes);
            add_to_segment<T>(*added.all[i], members, count, added.inputs + added.at[i], sums);
        }
    }
}

// What all segments add to a panel of a tile and those behind it, of which there is one at least; this thread's until its next
// call. With a run's first tile they are found for all of the run: `up` is read in one stream, at the memory's bandwidth,
// which pieces between panels are not. Whoever takes another thread's tile finds those of that tile alone.
template <class T>
static inline const AddedPanels& added_to_panels(const Added& added, int64_t panel, int64_t last) {
    static thread_local AddedPanels kept;
    if (kept.number != added.number || panel < kept.first || panel >= kept.last) {
        const Added::Run run = added.run_of(panel);
        if (panel == run.first || (kept.number == added.number && panel == kept.last)) last = run.last;
        kept.number = added.number;
        kept.first = panel;
        kept.last = std::min(last, panel + added_panels(added.segments->rows));
        kept.each = added.segments->rows * 2;
        add_segments<T>(added, kept);
    }
    return kept;
}

}  // namespace tessera
