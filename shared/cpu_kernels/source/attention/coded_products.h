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
#include "coded_weights.h"

namespace tessera {

typedef ByteDots<255, CODES_TO> KeyDots;

// Queries of some rows.
struct CodedQueries {
    int64_t rows;
    int32_t* words;  // [size / 4, rows]: one address serves the rows of a pass
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

// Lines of the codes of each of the next strip's pages that memory is asked for: the first `scores` with scores, those
// up to `values` with the softmax, then one with every unit of a pass over values. Memory answers no faster than evenly
// spread; of what is asked for later than that, attention waits for a part.
struct Shares {
    int64_t scores, values;

    Shares(int64_t size, int64_t pass) {
        const int64_t passes = size / pass + size % pass / LANES;
        values = std::max<int64_t>(0, 2 * PAGE * size / LINE_BYTES - PAGE / 4 * passes);
        scores = std::min(values * 3 / 5, size / 4);  // one with every unit of a pass over keys
    }
};

template <class T>
class CodedProducts {
    static constexpr int SCORE_ROWS = TILE_ROWS, VALUE_ROWS = 6, VALUE_VECTORS = 2 * TILE_ROWS / VALUE_ROWS;
    static constexpr int STRIP_ROWS = 2 * TILE_ROWS / STRIP_VECTORS;  // whose scores of a strip stay in registers, or none
    static constexpr int64_t WIDTH = VALUE_VECTORS * LANES;

public:
    static constexpr int64_t MOST_ROWS = 3 * TILE_ROWS;  // of a group

    CodedProducts(const CodedStrip& strip, const Cache& cache)
        : strip_(strip), size_(cache.size), kept_(cache.kept_count),
          shares_(cache.size, WIDTH),
          behind_((coded_page_bytes<T>(cache) - 2 * PAGE * cache.size + LINE_BYTES - 1) / LINE_BYTES) {}

    // What `soften_to_codes` of `rows` asks memory for.
    Asking asking(int rows) const { return {strip_.next, shares_.scores, shares_.values, rows}; }

    // scores: [rows, STRIP], of the strip's keys. asks: whether memory is asked for a part of the next strip's pages meanwhile.
    void score(const CodedQueries& queries, int64_t first, int rows, float* scores, bool asks) const {
        const int vectors = strip_.count * PAGE_VECTORS;
        for_groups(rows, SCORE_ROWS, [&](int r, int some) {
            if (some <= STRIP_ROWS && vectors == STRIP_VECTORS)
                return score_strip_some<STRIP_ROWS>(some, queries, first + r, scores + r * STRIP, asks && r == 0);
            for (int i = 0; i < vectors; i += 2)
                score_some<SCORE_ROWS>(some, queries, first + r, i, std::min(i + 1, vectors - 1), scores + r * STRIP,
                                       asks && r == 0);
        });
    }

    // sums: [rows, size], which become what `factors` leave of them and the strip's values times weights.
    void mix(const CodedWeights& coded, const float* factors, int rows, float* sums, bool asks) const {
        for_groups(rows, VALUE_ROWS, [&](int r, int some) {
            const Weights weights{coded.codes + r * STRIP, coded.steps + r, factors + r};
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
    __attribute__((noinline)) void score_rows(const CodedQueries& queries, int64_t row, int one, int other,
                                              float* scores, bool asks) const {
        const int64_t units = size_ / 4, stride = queries.rows;
        const int32_t *left = keys(one), *right = keys(other), *words = queries.words + row;
        const uint8_t* next[] = {strip_.next[one / PAGE_VECTORS].keys, strip_.next[other / PAGE_VECTORS].keys};
        const int64_t asked = asks && next[0] && next[1] ? shares_.scores : 0;
        ints sums[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = broadcast_int(queries.starts[row + r]);
        if (asked)
            for (int64_t line = 0; line < behind_; line++) {
                __builtin_prefetch(next[0] + 2 * PAGE * size_ + line * LINE_BYTES, 0, 2);
                __builtin_prefetch(next[1] + 2 * PAGE * size_ + line * LINE_BYTES, 0, 2);
            }
        for (int64_t u = 0; u < units; u++) {
            if (u < asked) {
                __builtin_prefetch(next[0] + u * LINE_BYTES, 0, 2);
                __builtin_prefetch(next[1] + u * LINE_BYTES, 0, 2);
            }
            const auto a = KeyDots::prepare(load<ints>(left + u * PAGE));
            const auto b = KeyDots::prepare(load<ints>(right + u * PAGE));
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                sums[r][0] = KeyDots::dot(sums[r][0], a, words[r]);
                sums[r][1] = KeyDots::dot(sums[r][1], b, words[r]);
            }
            words += stride;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            put_scores(queries, row + r, one, sums[r][0], scores + r * STRIP);
            put_scores(queries, row + r, other, sums[r][1], scores + r * STRIP);
        }
    }

    // The same of a whole strip, its pages side by side: memory gives a fifth more to a processor that reads several at
    // once, and a row alone has more than two sums to go on with.
    template <int R>
    __attribute__((noinline)) void score_strip(const CodedQueries& queries, int64_t row, float* scores, bool asks) const {
        constexpr int V = STRIP_VECTORS;
        const int64_t units = size_ / 4, stride = queries.rows;
        const int64_t asked = asks && strip_.next[0].keys ? shares_.scores : 0;
        const int32_t *from[V], *words = queries.words + row;
        const uint8_t* next[STRIP_PAGES];  // for pages that are not there the last one again
        ints sums[R][V];
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) from[i] = keys(i);
        for (int p = 0; p < STRIP_PAGES; p++) next[p] = p == 0 || strip_.next[p].keys ? strip_.next[p].keys : next[p - 1];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) sums[r][i] = broadcast_int(queries.starts[row + r]);
        if (asked)
            for (int64_t line = 0; line < behind_; line++)
                for (const uint8_t* page : next) __builtin_prefetch(page + 2 * PAGE * size_ + line * LINE_BYTES, 0, 2);
        for (int64_t u = 0; u < units; u++) {
            if (u < asked)
#pragma GCC unroll 8
                for (int p = 0; p < STRIP_PAGES; p++) __builtin_prefetch(next[p] + u * LINE_BYTES, 0, 2);
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) {
                const auto bytes = KeyDots::prepare(load<ints>(from[i] + u * PAGE));
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) sums[r][i] = KeyDots::dot(sums[r][i], bytes, words[r]);
            }
            words += stride;
        }
#pragma GCC unroll 3
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) put_scores(queries, row + r, i, sums[r][i], scores + r * STRIP);
    }

    template <int R>
    void score_strip_some(int rows, const CodedQueries& queries, int64_t row, float* scores, bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return score_strip<R>(queries, row, scores, asks);
            score_strip_some<R - 1>(rows, queries, row, scores, asks);
        }
    }

    // Scores of one vector of keys from sums of codes.
    void put_scores(const CodedQueries& queries, int64_t row, int i, ints sums, float* scores) const {
        const floats scale = load<floats>(strip_.key_scales + i * LANES) * broadcast(queries.steps[row]);
        floats score = __builtin_convertvector(sums, floats) * scale;
        for (int64_t k = 0; k < kept_; k++)
            score = fused(T::read(kept(i) + k * PAGE), broadcast(queries.kept[row * kept_ + k]), score);
        store(scores + i * LANES, score);
    }

    template <int R>
    void score_some(int rows, const CodedQueries& queries, int64_t row, int one, int other, float* scores,
                    bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return score_rows<R>(queries, row, one, other, scores, asks);
            score_some<R - 1>(rows, queries, row, one, other, scores, asks);
        }
    }

    // Pages side by side, as in `score_strip`.
    template <int R, int C>
    __attribute__((noinline)) void mix_rows(const Weights& weights, int64_t column, float* sums, bool asks) const {
        constexpr int64_t UNITS = PAGE / 4;
        ints acc[R][C] = {};
        const int64_t line = shares_.values + (column / WIDTH + column % WIDTH / LANES) * UNITS;
        for (int64_t u = 0; u < UNITS; u++)
            for (int page = 0; page < strip_.count; page++) {
                const int32_t* v = (const int32_t*)strip_.pages[page].values() + column;
                const uint8_t* ahead = asks ? strip_.next[page].keys : nullptr;
                if (ahead) __builtin_prefetch(ahead + (line + u) * LINE_BYTES, 0, 2);
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
    const Shares shares_;
    const int64_t behind_;  // lines of a page behind its codes
};

}  // namespace tessera
