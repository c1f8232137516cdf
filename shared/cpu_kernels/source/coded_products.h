// The two products of attention over pages of codes (`coded_pages.h`), in whole numbers.
//
// A query has one step for all of its elements, the weights of a strip of keys one for all of them; a weight is taken
// times its value's scale. So a score is
//
//   float(sum of codes) (scale of the key, step of the query);  then of each kept element  fma(key, query, score)
//
// and a strip adds float(sum of codes) times the step of its weights. Sums of whole numbers are exact: neither the
// instruction set nor how rows are grouped changes a bit of them.
#pragma once

#include <algorithm>

#include "attention_call.h"
#include "coded_pages.h"

namespace tessera {

constexpr int WEIGHTS_TO = 255;  // the largest code of a weight

typedef ByteDots<255, CODES_TO> KeyDots;

// What `soften` writes.
struct PlainWeights {
    typedef float Word;
    static constexpr int64_t words(int64_t elements) { return elements; }
    static void put_weights(float* to, int64_t i, floats weights) { store(to + i, weights); }
    static void stay_awake() {}
};

// Queries of some rows.
struct CodedQueries {
    int32_t* words;  // [rows, size / 4]
    float* steps;    // [rows]
    int32_t* starts; // [rows]: what sums begin with
    float* kept;     // [rows, kept_count]
};

// A strip's pages, and those of the strip after it, null where there are none.
struct CodedStrip {
    CodedPage pages[STRIP_PAGES], next[STRIP_PAGES];
    int count = 0;
    alignas(64) float key_scales[STRIP], value_scales[STRIP];

    void take_scales() {
        for (int p = 0; p < count; p++) {
            std::copy_n(pages[p].key_scales(), PAGE, key_scales + p * PAGE);
            std::copy_n(pages[p].value_scales(), PAGE, value_scales + p * PAGE);
        }
    }
};

template <class T>
class CodedProducts {
    static constexpr int SCORE_ROWS = TILE_ROWS, VALUE_ROWS = 6, VALUE_VECTORS = 2 * TILE_ROWS / VALUE_ROWS;

public:
    static constexpr int64_t MOST_ROWS = 3 * TILE_ROWS;  // of a group

    CodedProducts(const CodedStrip& strip, int64_t size, int64_t kept) : strip_(strip), size_(size), kept_(kept) {}

    // scores: [rows, STRIP], of the strip's keys. asks: whether memory is asked for the next strip's keys meanwhile.
    void score(const CodedQueries& queries, int64_t first, int rows, float* scores, bool asks) const {
        const int vectors = strip_.count * PAGE_VECTORS;
        for_groups(rows, SCORE_ROWS, [&](int r, int some) {
            for (int i = 0; i < vectors; i += 2)
                score_some<SCORE_ROWS>(some, queries, first + r, i, std::min(i + 1, vectors - 1), scores + r * STRIP,
                                       asks && r == 0);
        });
    }

    // Turns weights [rows, STRIP] into codes; steps: [rows], with room for whole vectors.
    void encode(int rows, float* weights, uint8_t* codes, float* steps) const {
        const int vectors = strip_.count * PAGE_VECTORS;
        for (int first = 0; first < rows; first += LANES) {
            const int count = std::min(LANES, rows - first);
            floats best[LANES];
            for (int i = 0; i < count; i++) best[i] = scaled(weights + (first + i) * STRIP, vectors);
            const floats most = largest_of_each(best, count);
            const floats step = most / (float)WEIGHTS_TO, none = {};
            const auto usable = (most >= LEAST_OF_GROUP) & (most < INFINITY);
            store(steps + first, usable ? step : (most < LEAST_OF_GROUP ? none : broadcast(NAN)));
            alignas(64) float per_step[LANES];
            store(per_step, usable ? (float)WEIGHTS_TO / most : none);
            for (int i = 0; i < count; i++)
                for (int v = 0; v < vectors; v++)
                    put_codes(codes + (first + i) * STRIP, v, weights + (first + i) * STRIP, per_step[i]);
        }
    }

    // sums: [rows, size], which become what `factors` leave of them and the strip's values times weights.
    void mix(const uint8_t* codes, const float* steps, const float* factors, int rows, float* sums, bool asks) const {
        for_groups(rows, VALUE_ROWS, [&](int r, int some) {
            constexpr int WIDTH = VALUE_VECTORS * LANES;
            const Weights weights{codes + r * STRIP, steps + r, factors + r};
            const bool ask = asks && r == 0;
            int64_t d = 0;
            for (; d + WIDTH <= size_; d += WIDTH)
                mix_some<VALUE_ROWS, VALUE_VECTORS>(some, weights, d, sums + r * size_ + d, ask);
            for (; d < size_; d += LANES) mix_some<VALUE_ROWS, 1>(some, weights, d, sums + r * size_ + d, ask);
        });
    }

private:
    struct Weights {
        const uint8_t* codes;
        const float *steps, *factors;
    };

    template <class Body>
    static void for_groups(int rows, int most, Body body) {
        const int groups = (rows + most - 1) / most;
        for (int group = 0; group < groups; group++) {
            const int r = rows * group / groups;
            body(r, rows * (group + 1) / groups - r);
        }
    }

    // Keys of one vector, and kept elements of them.
    const int32_t* keys(int i) const {
        return (const int32_t*)strip_.pages[i / PAGE_VECTORS].keys + i % PAGE_VECTORS * LANES;
    }
    const typename T::Element* kept(int i) const {
        return strip_.pages[i / PAGE_VECTORS].template kept<T>() + i % PAGE_VECTORS * LANES;
    }

    // scores[R] of two vectors of keys (or one twice).
    template <int R>
    void score_rows(const CodedQueries& queries, int64_t row, int one, int other, float* scores, bool asks) const {
        const int64_t units = size_ / 4;
        const int32_t *left = keys(one), *right = keys(other), *words = queries.words + row * units;
        const uint8_t* next[] = {strip_.next[one / PAGE_VECTORS].keys, strip_.next[other / PAGE_VECTORS].keys};
        ints sums[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = broadcast_int(queries.starts[row + r]);
        for (int64_t u = 0; u < units; u++) {
            if (asks) {
                if (next[0]) __builtin_prefetch(next[0] + u * 4 * PAGE, 0, 2);
                if (next[1]) __builtin_prefetch(next[1] + u * 4 * PAGE, 0, 2);
            }
            const auto a = KeyDots::prepare(load<ints>(left + u * PAGE));
            const auto b = KeyDots::prepare(load<ints>(right + u * PAGE));
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int32_t word = words[r * units + u];
                sums[r][0] = KeyDots::dot(sums[r][0], a, word);
                sums[r][1] = KeyDots::dot(sums[r][1], b, word);
            }
        }
        const floats scales[] = {load<floats>(strip_.key_scales + one * LANES),
                                 load<floats>(strip_.key_scales + other * LANES)};
        for (int r = 0; r < R; r++)
            for (int side = 0; side < 2; side++) {
                const int i = side ? other : one;
                floats score = __builtin_convertvector(sums[r][side], floats) *
                               (scales[side] * broadcast(queries.steps[row + r]));
                for (int64_t k = 0; k < kept_; k++)
                    score = fused(T::read(kept(i) + k * PAGE), broadcast(queries.kept[(row + r) * kept_ + k]),
                                         score);
                store(scores + r * STRIP + i * LANES, score);
            }
    }

    template <int R>
    void score_some(int rows, const CodedQueries& queries, int64_t row, int one, int other, float* scores,
                    bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return score_rows<R>(queries, row, one, other, scores, asks);
            score_some<R - 1>(rows, queries, row, one, other, scores, asks);
        }
    }

    // Takes a row's weights times the values' scales, of keys that have a weight: the largest, lane by lane, and
    // infinity for what is no number.
    floats scaled(float* weights, int vectors) const {
        ints most = {};  // floats without signs are in the order of their bits
        for (int v = 0; v < vectors; v++) {
            const floats weight = load<floats>(weights + v * LANES);
            const floats w = weight > 0.0f ? weight * load<floats>(strip_.value_scales + v * LANES) : floats{};
            store(weights + v * LANES, w);
            const ints bits = (ints)w & 0x7fffffff;
            most = bits > most ? bits : most;
        }
        const ints infinite = broadcast_int(0x7f800000);
        return (floats)(most < infinite ? most : infinite);
    }

    static void put_codes(uint8_t* to, int v, const float* weights, float per_step) {
        constexpr float MAGIC = 0x1.8p23f;  // adding it leaves the nearest integer in the last bits
        const floats w = load<floats>(weights + v * LANES);
        store_bytes(to + v * LANES, (ints)fused(w, broadcast(per_step), broadcast(MAGIC)));
    }

    template <int R, int C>
    void mix_rows(const Weights& weights, int64_t column, float* sums, bool asks) const {
        constexpr int64_t UNITS = PAGE / 4;
        ints acc[R][C] = {};
        for (int page = 0; page < strip_.count; page++) {
            const int32_t* v = (const int32_t*)strip_.pages[page].values() + column;
            const uint8_t* ahead = asks ? strip_.next[page].keys : nullptr;
            if (ahead && column == 0)
                for (int64_t line = 0; line < 2 * PAGE * (int64_t)sizeof(float); line += LINE_BYTES)
                    __builtin_prefetch(ahead + 2 * PAGE * size_ + line, 0, 2);
            for (int64_t u = 0; u < UNITS; u++) {
                if (ahead)
                    for (int c = 0; c < C; c++)
                        __builtin_prefetch(ahead + PAGE * size_ + (u * size_ + column + c * LANES) * 4, 0, 2);
                UnsignedDots::Bytes columns[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) columns[c] = UnsignedDots::prepare(load<ints>(v + u * size_ + c * LANES));
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    int32_t word;
                    std::memcpy(&word, weights.codes + r * STRIP + page * PAGE + 4 * u, 4);
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) acc[r][c] = UnsignedDots::dot(acc[r][c], columns[c], word);
                }
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                float* sum = sums + r * size_ + c * LANES;
                const floats before = load<floats>(sum) * broadcast(weights.factors[r]);
                store(sum, fused(__builtin_convertvector(acc[r][c], floats), broadcast(weights.steps[r]), before));
            }
    }

    template <int R, int C>
    void mix_some(int rows, const Weights& weights, int64_t column, float* sums, bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return mix_rows<R, C>(weights, column, sums, asks);
            mix_some<R - 1, C>(rows, weights, column, sums, asks);
        }
    }

    const CodedStrip& strip_;
    const int64_t size_, kept_;
};

}  // namespace tessera
