// down(x) of low-rank adapters (`segments.h`), for the rows of each of them.
//
// A sum has a number for each lane, which are added up at last. It is in float32 whatever the element type. `down` is
// [rank, inputs] in groups of four ranks, the last one of those that are left: of each group a vector of inputs of every
// rank, then the next vector, the last one filled up with zeros. So a group is one stream. Numbers of bfloat16 are in units of
// two ranks, the last one filled up with zeros: a vector of units becomes two in float32 by an instruction each.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_call.h"
#include "segments.h"

namespace tessera {

constexpr int64_t RANKS_EACH = 4;   // of an addition, in a group and one tile
constexpr int64_t INPUT_ROWS = LANES == 16 ? 4 : 2;  // rows whose sums stay in registers, with those ranks
constexpr int64_t DOWN_AHEAD = 4096;  // how far ahead of the sums `down` is asked for, bytes
constexpr int64_t ROWS_EACH = 64;   // in one tile

// The ranks of UNITS units for R rows, of which `ranks` are written.
template <class T, int R, int UNITS>
static inline void take_units(const typename T::Element* const* x, const int32_t* down, int64_t inputs, int64_t ranks,
                              float* const* out) {
    constexpr int RANKS = UNITS * UNIT<T>;
    LaneSums sums[R][RANKS];
    const auto take = [&](int64_t i, const floats* v) __attribute__((always_inline)) {
        const int32_t* from = down + i * UNITS * LANES;
        for (int64_t word = 0; word < UNITS * LANES; word += 16) __builtin_prefetch(from + DOWN_AHEAD / 4 + word);
#pragma GCC unroll 4
        for (int u = 0; u < UNITS; u++) {
            const ints units = load<ints>(from + u * LANES);
#pragma GCC unroll 2
            for (int number = 0; number < UNIT<T>; number++) {
                const floats column = read_unit<T>(units, number);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[r][u * UNIT<T> + number].add_product(i, column, v[r]);
            }
        }
    };
    floats v[R];
    const int64_t whole = inputs / LANES;
    for (int64_t i = 0; i < whole; i++) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) v[r] = T::read(x[r] + i * LANES);
        take(i, v);
    }
    if (const int rest = (int)(inputs % LANES)) {
        for (int r = 0; r < R; r++) v[r] = read_some<T>(x[r] + whole * LANES, rest);
        take(whole, v);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int k = 0; k < RANKS; k++)
            if (k < ranks) out[r][k] = sums[r][k].total();
}

template <class T, int R>
static inline void take_inputs(const typename T::Element* const* x, const int32_t* down, int64_t inputs, int64_t ranks,
                               float* const* out) {
    const int64_t units = rank_units<T>(ranks);
    if (units == 1) return take_units<T, R, 1>(x, down, inputs, ranks, out);
    if (units == 2) return take_units<T, R, 2>(x, down, inputs, ranks, out);
    if constexpr (UNIT<T> == 1) {
        if (units == 3) return take_units<T, R, 3>(x, down, inputs, ranks, out);
        take_units<T, R, 4>(x, down, inputs, ranks, out);
    }
}

// `inputs` with the zeros that follow them.
static inline int64_t whole_vectors(int64_t inputs) { return (inputs + LANES - 1) / LANES * LANES; }

// Some ranks of one addition for some rows of its segment.
struct InputTile {
    const Addition* addition;
    int64_t at;  // of its inputs
    int64_t rank, ranks;
    const int64_t* members;
    int64_t first, rows;  // of the members
};

struct InputCall {
    const void* x;
    int64_t x_stride;
    float* inputs;
    const InputTile* tiles;
};

// The units of `down` from a rank on, which begins a group.
template <class T>
static inline const int32_t* down_of(const Addition& addition, int64_t rank) {
    return (const int32_t*)addition.down + rank_units<T>(rank) * whole_vectors(addition.inputs);
}

// Asks for what a thread reads after a tile: the next one's `down`, or, of the last in its run, what is added to its run
// of panels.
template <class T>
static inline void ask_after_inputs(const InputCall& call, const Added& added, int number) {
    for (int run = 0; run < added.threads; run++) {
        if (number + 1 != Pool::runs_end(added.tiles, added.threads, run + 1)) continue;
        const Added::Run panels = added.run(run);
        return ask_for_up<T>(*added.all[0], panels.first, panels.last);
    }
    ask_for(down_of<T>(*call.tiles[number + 1].addition, call.tiles[number + 1].rank));
}

template <class T>
static void take_input_tile(const InputCall& call, int number) {
    const InputTile& tile = call.tiles[number];
    typedef typename T::Element Element;
    const Addition& addition = *tile.addition;
    const int32_t* down = down_of<T>(addition, tile.rank);
    for (int64_t row = 0; row < tile.rows; row += INPUT_ROWS) {
        const Element* x[INPUT_ROWS];
        float* out[INPUT_ROWS];
        const int64_t rows = std::min(INPUT_ROWS, tile.rows - row);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t member = tile.first + row + r;
            x[r] = (const Element*)call.x + tile.members[member] * call.x_stride;
            out[r] = call.inputs + tile.at + member * addition.rank + tile.rank;
        }
        switch (rows) {
            case 1: take_inputs<T, 1>(x, down, addition.inputs, tile.ranks, out); break;
            case 2: take_inputs<T, 2>(x, down, addition.inputs, tile.ranks, out); break;
            case 3: take_inputs<T, 3>(x, down, addition.inputs, tile.ranks, out); break;
            default: take_inputs<T, 4>(x, down, addition.inputs, tile.ranks, out);
        }
    }
}

static inline int64_t divided(int64_t count, int64_t each) { return (count + each - 1) / each; }

// What each of so many threads first reads of `down` of the layer's next product; this thread's until its next call.
template <class T>
static const void* const* beginnings(const Additions& additions, int threads) {
    static thread_local std::vector<const void*> found;
    if (additions.product == Adapter::DOWN) return nullptr;
    const Segments& segments = *additions.segments;
    const auto tiles_of = [&](int64_t s, const Addition& addition) {
        return divided(segments.starts[s + 1] - segments.starts[s], ROWS_EACH) * divided(addition.rank, RANKS_EACH);
    };
    const auto each = [&](const auto& body) {
        for (int64_t s = 0; s < segments.count; s++) {
            const auto& own = additions.adapters[s]->products[additions.product + 1];
            for (int64_t i = 0; i < own.count; i++) body(own.all[i], tiles_of(s, own.all[i]));
        }
    };
    int64_t all = 0, before = 0;
    each([&](const Addition&, int64_t tiles) { all += tiles; });
    if (!all) return nullptr;
    found.assign(threads, nullptr);
    each([&](const Addition& addition, int64_t tiles) {
        for (int run = 0; run < threads; run++) {
            const int64_t tile = Pool::runs_end((int)all, threads, run) - before;
            if (tile < 0 || tile >= tiles) continue;
            found[run] = down_of<T>(addition, tile % divided(addition.rank, RANKS_EACH) * RANKS_EACH);
        }
        before += tiles;
    });
    return found.data();
}

// What is to be done for all additions to a layer whose rows are x. All of it is the calling thread's memory until its
// next call.
template <class T>
static InputCall plan_inputs(const Pool& pool, const Additions& additions, const typename T::Element* x, int64_t x_stride, Added& added) {
    static thread_local std::vector<InputTile> tiles;
    static thread_local std::vector<const Addition*> all;
    static thread_local std::vector<int64_t> starts, at;
    static thread_local std::vector<float> inputs;
    static thread_local std::atomic<int> done;
    static std::atomic<uint64_t> calls{0};
    tiles.clear();
    all.clear();
    starts.assign(1, 0);
    at.clear();
    int64_t numbers = 0;
    const Segments& segments = *additions.segments;
    for (int64_t s = 0; s < segments.count; s++) {
        const int64_t rows = segments.starts[s + 1] - segments.starts[s];
        const auto& own = additions.adapters[s]->products[additions.product];
        for (int64_t i = 0; i < own.count; i++) {
            const Addition& addition = own.all[i];
            all.push_back(&addition);
            at.push_back(numbers);
            const int64_t* members = segments.members + segments.starts[s];
            for (int64_t first = 0; first < rows; first += ROWS_EACH)
                for (int64_t rank = 0; rank < addition.rank; rank += RANKS_EACH)
                    tiles.push_back({&addition, numbers, rank, std::min(RANKS_EACH, addition.rank - rank), members,
                                     first, std::min(ROWS_EACH, rows - first)});
            numbers += rows * addition.rank;
        }
        starts.push_back((int64_t)all.size());
    }
    inputs.resize(std::max<int64_t>(inputs.size(), numbers));
    done.store(0);
    added = {&segments, all.data(), starts.data(), inputs.data(), at.data(), (int)tiles.size(), &done,
             ++calls, 0, 0, pool.threads(), nullptr, 0, beginnings<T>(additions, pool.threads())};
    return {x, x_stride, inputs.data(), tiles.data()};
}

}  // namespace tessera
