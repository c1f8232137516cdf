// down(x) of low-rank adapters (`segments.h`), for the rows of each of them.
//
// Ranks are so few that a weight's rows are read as they are: a sum has a number for each lane, which are added up at
// last. It is in float32 whatever the element type.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_call.h"
#include "segments.h"

namespace tessera {

constexpr int64_t RANKS_EACH = 4;   // of an addition, in one tile
constexpr int64_t INPUT_ROWS = LANES == 16 ? 4 : 2;  // rows whose sums stay in registers, with those ranks
constexpr int64_t INPUTS_AHEAD = 512;  // how far ahead of the sums `down` is asked for
constexpr int64_t SOON_VECTORS = 16;  // of the next product, those of its first tiles
constexpr int64_t ROWS_EACH = 64;   // in one tile

// RANKS ranks of R rows.
template <class T, int R, int RANKS>
static inline void take_ranks(const typename T::Element* const* x, const typename T::Element* down, int64_t inputs,
                              float* const* out) {
    LaneSums sums[R][RANKS];
    const int64_t whole = inputs / LANES;
    for (int64_t i = 0; i < whole; i++) {
        floats columns[RANKS];
#pragma GCC unroll 4
        for (int k = 0; k < RANKS; k++) {
            columns[k] = T::read(down + k * inputs + i * LANES);
            __builtin_prefetch(down + k * inputs + i * LANES + INPUTS_AHEAD);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const floats v = T::read(x[r] + i * LANES);
#pragma GCC unroll 4
            for (int k = 0; k < RANKS; k++) sums[r][k].add_product(i, columns[k], v);
        }
    }
    if (const int rest = (int)(inputs % LANES)) {
        const int64_t i = whole * LANES;
        for (int k = 0; k < RANKS; k++) {
            const floats column = read_some<T>(down + k * inputs + i, rest);
            for (int r = 0; r < R; r++) sums[r][k].add_product(whole, column, read_some<T>(x[r] + i, rest));
        }
    }
    for (int r = 0; r < R; r++)
        for (int k = 0; k < RANKS; k++) out[r][k] = sums[r][k].total();
}

template <class T, int R>
static inline void take_inputs(const typename T::Element* const* x, const typename T::Element* down, int64_t inputs,
                               int64_t ranks, float* const* out) {
    if (ranks == RANKS_EACH) return take_ranks<T, R, RANKS_EACH>(x, down, inputs, out);
    for (int64_t k = 0; k < ranks; k++) {
        float* to[R];
        for (int r = 0; r < R; r++) to[r] = out[r] + k;
        take_ranks<T, R, 1>(x, down + k * inputs, inputs, to);
    }
}

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

template <class T>
static void take_input_tile(const InputCall& call, int number) {
    const InputTile& tile = call.tiles[number];
    typedef typename T::Element Element;
    const Addition& addition = *tile.addition;
    const auto* down = (const Element*)addition.down + tile.rank * addition.inputs;
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

// What is to be done for all additions to a layer whose rows are x. All of it is the calling thread's memory until its
// next call.
template <class T>
static InputCall plan_inputs(const Additions& additions, const typename T::Element* x, int64_t x_stride, Added& added) {
    static thread_local std::vector<InputTile> tiles;
    static thread_local std::vector<const Addition*> all;
    static thread_local std::vector<int64_t> starts, at;
    static thread_local std::vector<float> inputs;
    static thread_local std::atomic<int> done;
    static thread_local std::vector<Soon> soon;
    tiles.clear();
    soon.clear();
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
        if (additions.product == Adapter::DOWN) continue;
        const auto& next = additions.adapters[s]->products[additions.product + 1];
        for (int64_t i = 0; i < next.count; i++) {
            const Addition& addition = next.all[i];
            constexpr int64_t SIZE = sizeof(typename T::Element);
            soon.push_back({(const char*)addition.down, addition.rank * addition.inputs * SIZE});
            soon.push_back({(const char*)addition.up, std::min<int64_t>(addition.last - addition.first, SOON_VECTORS) *
                                                          addition.rank * LANES * SIZE});
        }
    }
    inputs.resize(std::max<int64_t>(inputs.size(), numbers));
    done.store(0);
    added = {&segments, all.data(), starts.data(), inputs.data(), at.data(), (int)tiles.size(), &done,
             soon.data(), (int64_t)soon.size(), 0, 0};
    return {x, x_stride, inputs.data(), tiles.data()};
}

}  // namespace tessera
