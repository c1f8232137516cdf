// Attention's two products by vectors: scores of queries and keys, sums of weighted values.
//
// In bfloat16 they are taken in the order of tiles where linear layers are (`pairs.h`): a score in steps of 32 of a
// head's elements, the last one of what is left, a sum of values in steps of two pages.
#pragma once

#include <algorithm>

#include "attention_call.h"
#include "../arithmetic/pairs.h"

namespace tessera {

template <class T>
class AttentionByVectors {
    typedef typename VectorsOf<T>::Type V;
    static constexpr bool STEPS = IN_STEPS<T>;
    static constexpr int CHAINS = STEPS ? V::PARTS : 1;
    // Rows of one pass over keys, whose sums stay in registers, two vectors of each; and of one over values.
    static constexpr int SCORE_ROWS = STEPS ? STEP_ROWS : TILE_ROWS;
    static constexpr int VALUE_ROWS = 6, VALUE_VECTORS = 2 * SCORE_ROWS / VALUE_ROWS;

public:
    static constexpr int KEYS = STEPS ? STEP : PAGE;  // weights are of a whole number of them
    typedef int32_t Word;  // of queries and weights: what multiplies units (`vectors.h`)
    static constexpr int64_t MOST_ROWS = 3 * TILE_ROWS;  // of a group

    // Groups of like size: a last one of one row would cost as much as one of many.
    static int64_t group_rows(int64_t rows, int64_t groups) { return (rows + groups - 1) / groups; }
    static constexpr int64_t words(int64_t elements) { return elements / V::PER_UNIT * V::PARTS; }

    AttentionByVectors(int64_t, int64_t size) : size_(size) {}

    static void put_query(const typename T::Element* query, int64_t size, Word* to) { to_words<V>(query, size, to); }

    // Weights [i, i + LANES) of a row, rounded to the element type where its instructions take them so.
    static void put_weights(Word* to, int64_t i, floats weights) {
        if constexpr (STEPS) weights = from_bfloat16(to_bfloat16(weights));
        V::put(to, i, weights);
    }

    static void stay_awake() {}

    // A strip's pages, from now on those of the products. next: those of the strip after it, where there is one, null
    // where there is none.
    void prepare(const void* const* pages, int count, const void* const* next) {
        pages_ = pages, count_ = count, next_ = next;
    }

    // scores: [rows, STRIP], of the strip's keys. asks: whether memory is asked for the strip's values meanwhile.
    void score(const Word* queries, int rows, float* scores, bool asks) const {
        const int vectors = count_ * PAGE_VECTORS;
        const auto keys = [&](int i) {
            return (const int32_t*)pages_[i / PAGE_VECTORS] + i % PAGE_VECTORS * LANES;
        };
        for_groups(rows, SCORE_ROWS, [&](int r, int some) {
            for (int i = 0; i < vectors; i += 2)
                score_some<SCORE_ROWS>(some, queries + r * words(size_), keys(i), keys(std::min(i + 1, vectors - 1)),
                                       scores + r * STRIP + i * LANES, asks && r == 0);
        });
    }

    // sums: [rows, size] += weights [rows, STRIP] times the strip's values. asks: for the next strip's keys.
    void mix(const Word* weights, int rows, float* sums, bool asks) const {
        const int32_t* values[STRIP_PAGES];
        for (int p = 0; p < count_; p++)
            values[p] = (const int32_t*)((const typename T::Element*)pages_[p] + PAGE * size_);
        for_groups(rows, VALUE_ROWS, [&](int r, int some) {
            constexpr int WIDTH = VALUE_VECTORS * LANES;
            const Word* w = weights + r * words(STRIP);
            const bool ask = asks && r == 0;
            int64_t d = 0;
            for (; d + WIDTH <= size_; d += WIDTH)
                mix_some<VALUE_ROWS, VALUE_VECTORS>(some, w, values, d, sums + r * size_ + d, ask);
            for (; d < size_; d += LANES) mix_some<VALUE_ROWS, 1>(some, w, values, d, sums + r * size_ + d, ask);
        });
    }

private:
    template <class Body>
    static void for_groups(int rows, int most, Body body) {
        const int groups = (rows + most - 1) / most;
        for (int group = 0; group < groups; group++) {
            const int r = rows * group / groups;
            body(r, rows * (group + 1) / groups - r);
        }
    }

    // scores[R][2 vectors] of two neighbouring vectors of keys (or one twice).
    template <int R>
    void score_rows(const Word* queries, const int32_t* first, const int32_t* second, float* scores,
                    bool asks) const {
        const int64_t units = size_ / V::PER_UNIT, stride = words(size_), each = STEPS ? STEP / V::PER_UNIT : units;
        floats left[R] = {}, right[R] = {};
        for (int64_t done = 0; done < units; done += each) {
            floats sums[CHAINS][R][2] = {};
            for (int64_t u = done, end = std::min(units, done + each); u < end; u++) {
                if (asks) {  // values lie as far behind keys
                    __builtin_prefetch(first + (units + u) * PAGE, 0, 2);
                    __builtin_prefetch(second + (units + u) * PAGE, 0, 2);
                }
#pragma GCC unroll 2
                for (int part = 0; part < V::PARTS; part++) {
                    const ints a = V::column(load<ints>(first + u * PAGE), part);
                    const ints b = V::column(load<ints>(second + u * PAGE), part);
                    auto& chain = sums[part % CHAINS];
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) {
                        const Word word = queries[r * stride + u * V::PARTS + part];
                        chain[r][0] = V::dot(chain[r][0], a, word);
                        chain[r][1] = V::dot(chain[r][1], b, word);
                    }
                }
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                left[r] = add<R>(left[r], sums, r, 0);
                right[r] = add<R>(right[r], sums, r, 1);
            }
        }
        for (int r = 0; r < R; r++) {
            store(scores + r * STRIP, left[r]);
            store(scores + r * STRIP + LANES, right[r]);
        }
    }

    template <int R>
    static inline floats add(floats sum, const floats (&sums)[CHAINS][R][2], int r, int i) {
        if constexpr (STEPS)
            return sum + (sums[0][r][i] + sums[CHAINS - 1][r][i]);
        else
            return sums[0][r][i];  // there is but one step
    }

    template <int R>
    void score_some(int rows, const Word* queries, const int32_t* first, const int32_t* second, float* scores,
                    bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return score_rows<R>(queries, first, second, scores, asks);
            score_some<R - 1>(rows, queries, first, second, scores, asks);
        }
    }

    // sums[R][C vectors] += weights[R][keys] times values[keys][C vectors] from `column` on.
    template <int R, int C>
    void mix_rows(const Word* weights, const int32_t* const* values, int64_t column, float* sums, bool asks) const {
        constexpr int64_t UNITS = PAGE / V::PER_UNIT, WORDS = UNITS * V::PARTS;
        floats acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = load<floats>(sums + r * size_ + c * LANES);
        constexpr int STEP_PAGES = STEPS ? STEP / PAGE : 1;
        for (int step = 0; step < count_; step += STEP_PAGES) {
            floats even[STEPS ? R : 1][C] = {}, odd[STEPS ? R : 1][C] = {};
            for (int page = step; page < std::min(step + STEP_PAGES, count_); page++) {
                const int32_t* v = values[page] + column;
                const Word* w = weights + page * WORDS;
                const int32_t* next = asks && next_ ? (const int32_t*)next_[page] : nullptr;
                for (int64_t u = 0; u < UNITS; u++) {
                    if (next)
                        for (int c = 0; c < C; c++) __builtin_prefetch(next + column + u * size_ + c * LANES, 0, 2);
#pragma GCC unroll 2
                    for (int part = 0; part < V::PARTS; part++) {
                        ints columns[C];
#pragma GCC unroll 4
                        for (int c = 0; c < C; c++)
                            columns[c] = V::column(load<ints>(v + u * size_ + c * LANES), part);
#pragma GCC unroll 6
                        for (int r = 0; r < R; r++) {
                            const Word word = w[r * STRIP_PAGES * WORDS + u * V::PARTS + part];
                            floats* chain = acc[r];
                            if constexpr (STEPS) chain = part ? odd[r] : even[r];
#pragma GCC unroll 4
                            for (int c = 0; c < C; c++) chain[c] = V::dot(chain[c], columns[c], word);
                        }
                    }
                }
            }
            if constexpr (STEPS) {
#pragma GCC unroll 6
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) acc[r][c] = acc[r][c] + (even[r][c] + odd[r][c]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(sums + r * size_ + c * LANES, acc[r][c]);
    }

    template <int R, int C>
    void mix_some(int rows, const Word* weights, const int32_t* const* values, int64_t column, float* sums,
                  bool asks) const {
        if constexpr (R > 0) {
            if (rows == R) return mix_rows<R, C>(weights, values, column, sums, asks);
            mix_some<R - 1, C>(rows, weights, values, column, sums, asks);
        }
    }

    int64_t size_;
    const void *const *pages_ = nullptr, *const *next_ = nullptr;
    int count_ = 0;
};

}  // namespace tessera
