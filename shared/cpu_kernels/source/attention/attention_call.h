// A call of attention, and what becomes of scores: weights of a softmax with a running maximum.
//
// Queries walk over the keys in strips of fixed places (Milakov and Gimelshein, 2018; Dao et al., 2022): what a query
// adds up, and in which order, depends on its own position alone. Maxima and exponents are those of powers of two:
// log2(e) is part of the scale.
#pragma once

#include <algorithm>
#include <cmath>

#include "../arithmetic/exponential.h"
#include "pages.h"

namespace tessera {

constexpr int STRIP = 128;  // keys of one step of the running maximum
constexpr int STRIP_PAGES = STRIP / PAGE, STRIP_VECTORS = STRIP / LANES;

struct Attention {
    const void* q;       // [tokens, q heads, real size], rows q_stride elements apart
    void* out;           // [tokens, q heads, real size]
    int64_t q_stride, out_stride;
    const int32_t* table;  // [rows, table_stride]
    int64_t table_stride;
    // Five numbers each: row, first token in the batch, tokens, position of the first, and how many
    // keys all of them see: 0 where each sees those up to its own.
    const int32_t* tasks;
    int64_t num_tasks;
    int64_t q_heads;
    float scale, softcap;  // scale above zero; softcap 0: none
    int64_t window;        // 0: none
    const float* sinks;    // [q heads] or null
};

// Keys of a strip that a row sees: [from, to) of them.
struct Seen {
    int from = 0, to = 0;

    Seen() = default;
    // Of a token at `position`; all, strip: how many keys all tokens of its task see, or 0, and the strip's first key.
    Seen(const Attention& call, int64_t position, int64_t all, int64_t strip) {
        const int64_t first = call.window ? position - call.window + 1 : 0, last = all ? all : position + 1;
        to = (int)std::clamp<int64_t>(last - strip, 0, STRIP);
        from = (int)std::clamp<int64_t>(first - strip, 0, to);
    }
    bool whole() const { return from == 0 && to == STRIP; }
};

// What is kept of a group's rows from strip to strip beside their sums, each row of its own.
struct Softmax {
    float* highest;  // score so far, times log2(e); with room for whole vectors
    float* totals;   // of weights, key by key of a page: [rows, PAGE]
};

// A sum that does not depend on how many lanes a vector has.
static inline float sum_of(const float* totals) {
    floats parts[PAGE_VECTORS];
    for (int i = 0; i < PAGE_VECTORS; i++) parts[i] = load<floats>(totals + i * LANES);
    for (int half = PAGE_VECTORS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i] + parts[i + half];
    return sum(parts[0]);
}

// The largest of each of `count` vectors, and in other lanes any number. of: LANES vectors, of which the others are
// overwritten.
static inline floats largest_of_each(floats* of, int count) {
#if defined(__AVX512F__)
    if (count > 2) {
        for (int i = count; i < 16; i++) of[i] = of[0];
        __m512 v[16];
        for (int i = 0; i < 16; i++) v[i] = (__m512)of[i];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            v[i] = _mm512_max_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
        // Of a quarter there are two numbers of two vectors each now, then one of each of four.
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512d a = (__m512d)v[2 * i], b = (__m512d)v[2 * i + 1];
            v[i] = _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            v[i] = _mm512_max_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
        return (floats)_mm512_max_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    }
#endif
    float all[LANES] = {};
    for (int i = 0; i < count; i++) all[i] = largest(of[i]);
    return load<floats>(all);
}

// s becomes softcap * tanh(s * scale / softcap).
static inline floats capped(floats s, const Attention& call) {
    s = s * call.scale;
    const floats e = exp(-2.0f * max(s, -s) / call.softcap);
    const floats t = (1.0f - e) / (1.0f + e) * call.softcap;
    return s < 0.0f ? -t : t;
}

// A row's largest score of a strip, lane by lane; what the row does not see, in vectors of which it sees some, becomes
// minus infinity.
static inline floats highest_of(const Attention& call, Seen seen, float* scores) {
    floats best = broadcast(-INFINITY);
    if (call.softcap > 0)
        for (int i = seen.from / LANES * LANES; i < seen.to; i += LANES)
            store(scores + i, capped(load<floats>(scores + i), call));
    if (seen.whole()) {
#pragma GCC unroll 8
        for (int i = 0; i < STRIP; i += LANES) best = max(best, load<floats>(scores + i));
        return best;
    }
    for (int i = seen.from / LANES * LANES; i < seen.to; i += LANES) {
        const ints key = LANE + i;
        const floats s = ((key >= seen.from) & (key < seen.to)) ? load<floats>(scores + i) : broadcast(-INFINITY);
        store(scores + i, s);
        best = max(best, s);
    }
    return best;
}

// Weights of a row's vectors [first, last) of a strip, relative to `highest`; adds them to `totals`.
template <class P>
static inline void weigh(const float* scores, int first, int last, float scale, float highest, floats* totals,
                         typename P::Word* weights) {
#pragma GCC unroll 8
    for (int v = first; v < last; v++) {
        const floats weight =
            power_of_two(fused(load<floats>(scores + v * LANES), broadcast(scale), broadcast(-highest)));
        P::put_weights(weights, v * LANES, weight);
        totals[v % PAGE_VECTORS] = totals[v % PAGE_VECTORS] + weight;
    }
}

constexpr int AWAKE_ROWS = 8;  // `stay_awake`, every some hundred cycles

static inline float softmax_scale(const Attention& call) { return call.softcap > 0 ? LOG2_E : call.scale * LOG2_E; }

// Raises the highest scores of rows [first, first + count), at most a vector of them, to those of their strip. factors:
// see `soften`.
template <class P>
static inline void raise_highest(const Attention& call, int first, int count, const Seen* seen, float* scores,
                                 const Softmax& state, float* factors) {
    floats best[LANES];
    for (int i = 0; i < count; i++) {
        if (i % AWAKE_ROWS == 0) P::stay_awake();
        best[i] = highest_of(call, seen[first + i], scores + (first + i) * STRIP);
    }
    const floats before = load<floats>(state.highest + first);
    const floats now = max(before, largest_of_each(best, count) * softmax_scale(call));
    store(state.highest + first, now);
    store(factors + first, power_of_two(before - now));
}

// Turns scores [rows, STRIP] into weights of the `keys` first keys, whole pages. factors: what each row's older sums
// are to be scaled by, with room for whole vectors.
template <class P>
static inline void soften(const Attention& call, int rows, const Seen* seen, int keys, float* scores,
                          const Softmax& state, float* factors, typename P::Word* weights) {
    const float scale = softmax_scale(call);
    for (int first = 0; first < rows; first += LANES) {
        const int count = std::min(LANES, rows - first);
        raise_highest<P>(call, first, count, seen, scores, state, factors);
        for (int r = first; r < first + count; r++) {
            if (r % AWAKE_ROWS == 0) P::stay_awake();
            const float* from = scores + r * STRIP;
            typename P::Word* to = weights + r * P::words(STRIP);
            floats totals[PAGE_VECTORS];
            for (int j = 0; j < PAGE_VECTORS; j++)
                totals[j] = load<floats>(state.totals + r * PAGE + j * LANES) * factors[r];
            if (seen[r].whole()) {
                weigh<P>(from, 0, STRIP_VECTORS, scale, state.highest[r], totals, to);
            } else {
                const int begin = seen[r].from / LANES, end = (seen[r].to + LANES - 1) / LANES;
                for (int v = 0; v < begin; v++) P::put_weights(to, v * LANES, floats{});
                for (int v = end; v < keys / LANES; v++) P::put_weights(to, v * LANES, floats{});
                weigh<P>(from, begin, end, scale, state.highest[r], totals, to);
            }
            for (int j = 0; j < PAGE_VECTORS; j++) store(state.totals + r * PAGE + j * LANES, totals[j]);
        }
    }
}

}  // namespace tessera
