// Attention over a paged cache.
//
// Sixteen tokens of one head are a page, laid out as the products want it: keys as a panel of 16
// columns (for every unit of the head the keys side by side), then values as rows of units (two
// neighbouring keys make a unit in bfloat16). So both products are the same small kernel as a
// linear layer's. A block of the cache is one page or several, a page one vector of keys or several.
//
// Queries walk over the keys in tiles of fixed places with a running maximum (Milakov and
// Gimelshein, 2018; Dao et al., 2022): what a query adds up, and in which order, depends on its own
// position alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace tessera {

constexpr int PAGE = 16;  // keys: whole vectors of every instruction set
constexpr int TILE = 128;  // keys of one step of the running maximum
constexpr int TILE_PAGES = TILE / PAGE, TILE_VECTORS = TILE / LANES;
constexpr int PAGE_VECTORS = PAGE / LANES;
// Values of one pass: as many sums as a tile of a linear layer has.
constexpr int VALUE_ROWS = 6, VALUE_VECTORS = 2 * TILE_ROWS / VALUE_ROWS;

// One layer's cache: [blocks, kv heads, pages of a block, keys then values, PAGE * size] elements.
struct Cache {
    void* base;
    int64_t pages;  // of a block
    int64_t heads;
    int64_t size;  // of a head, in whole vectors: what is beyond `real` is zero
    int64_t real;
};

template <class T>
static inline typename T::Element* page_of(const Cache& cache, int64_t block, int64_t page,
                                           int64_t head) {
    const int64_t pages = (block * cache.heads + head) * cache.pages + page;
    return (typename T::Element*)cache.base + pages * 2 * PAGE * cache.size;
}

// The page that holds a slot (block * block size + place).
template <class T>
static inline typename T::Element* page_at(const Cache& cache, int64_t slot, int64_t head) {
    const int64_t page = slot / PAGE;
    return page_of<T>(cache, page / cache.pages, page % cache.pages, head);
}

// Where element `d` of key `token` lies in its page; value `token` after all keys.
template <class T>
static inline int64_t key_place(int64_t token, int64_t d) {
    constexpr int P = T::PER_UNIT;
    return (d / P * PAGE + token) * P + d % P;
}

template <class T>
static inline int64_t value_place(int64_t token, int64_t d, int64_t size) {
    constexpr int P = T::PER_UNIT;
    return PAGE * size + (token / P * size + d) * P + token % P;
}

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
    float scale, softcap;  // softcap 0: none
    int64_t window;        // 0: none
    const float* sinks;    // [q heads] or null
};

// What one thread needs for a task; kept from call to call. Queries and weights are words.
template <class T>
struct Workspace {
    std::vector<int32_t> queries, weights;
    std::vector<float> scores, mixed, highest, total;

    void fit(int64_t rows, int64_t size) {
        queries.resize(rows * words(size));
        weights.resize(rows * words(TILE));
        scores.resize(rows * TILE);
        mixed.resize(rows * size);
        highest.resize(rows);
        total.resize(rows);
    }

    static constexpr int64_t words(int64_t elements) { return elements / T::PER_UNIT * T::PARTS; }
};

// scores[R][2 vectors] of two neighbouring vectors of keys (or one twice).
template <class T, int R>
static inline void score(const int32_t* queries, int64_t size, const int32_t* first,
                         const int32_t* second, float* scores) {
    const int64_t units = size / T::PER_UNIT, stride = units * T::PARTS;
    floats left[R] = {}, right[R] = {};
    for (int64_t u = 0; u < units; u++) {
#pragma GCC unroll 2
        for (int part = 0; part < T::PARTS; part++) {
            const ints a = T::column(load<ints>(first + u * PAGE), part);
            const ints b = T::column(load<ints>(second + u * PAGE), part);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int32_t word = queries[r * stride + u * T::PARTS + part];
                left[r] = T::dot(left[r], a, word);
                right[r] = T::dot(right[r], b, word);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        store(scores + r * TILE, left[r]);
        store(scores + r * TILE + LANES, right[r]);
    }
}

template <class T, int R>
static inline void score_some(int rows, const int32_t* queries, int64_t size, const int32_t* first,
                              const int32_t* second, float* scores) {
    if constexpr (R > 0) {
        if (rows == R) return score<T, R>(queries, size, first, second, scores);
        score_some<T, R - 1>(rows, queries, size, first, second, scores);
    }
}

// mixed[R][C vectors] += weights[R][keys] times values[keys][C vectors].
template <class T, int R, int C>
static inline void mix(const int32_t* weights, const int32_t* const* values, int pages,
                       int64_t size, int64_t column, float* mixed) {
    constexpr int64_t UNITS = PAGE / T::PER_UNIT, WORDS = UNITS * T::PARTS;
    floats acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = load<floats>(mixed + r * size + c * LANES);
    for (int page = 0; page < pages; page++) {
        const int32_t* v = values[page] + column;
        const int32_t* w = weights + page * WORDS;
        for (int64_t u = 0; u < UNITS; u++) {
#pragma GCC unroll 2
            for (int part = 0; part < T::PARTS; part++) {
                ints columns[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++)
                    columns[c] = T::column(load<ints>(v + u * size + c * LANES), part);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const int32_t word = w[r * TILE_PAGES * WORDS + u * T::PARTS + part];
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) acc[r][c] = T::dot(acc[r][c], columns[c], word);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(mixed + r * size + c * LANES, acc[r][c]);
}

template <class T, int R, int C>
static inline void mix_some(int rows, const int32_t* weights, const int32_t* const* values,
                            int pages, int64_t size, int64_t column, float* mixed) {
    if constexpr (R > 0) {
        if (rows == R) return mix<T, R, C>(weights, values, pages, size, column, mixed);
        mix_some<T, R - 1, C>(rows, weights, values, pages, size, column, mixed);
    }
}

// Turns a row's scores of one tile into weights; returns what older sums are to be scaled by.
template <class T>
static inline float soften(const float* scores, int seen_from, int seen_to, int vectors,
                           const Attention& call, float* highest, float* total,
                           int32_t* weights) {
    const floats never = broadcast(-INFINITY);
    floats kept[TILE_VECTORS], best = never;
    for (int i = 0; i < vectors; i++) {
        floats s = load<floats>(scores + i * LANES) * call.scale;
        if (call.softcap > 0) {
            const floats e = exp(-2.0f * max(s, -s) / call.softcap);
            const floats t = (1.0f - e) / (1.0f + e) * call.softcap;
            s = s < 0.0f ? -t : t;
        }
        const ints place = LANE + i * LANES;
        s = (place >= seen_from) & (place < seen_to) ? s : never;
        kept[i] = s;
        best = max(best, s);
    }
    const float before = *highest;
    const float now = std::max(before, largest(best));
    floats added = {};
    for (int i = 0; i < vectors; i++) {
        const floats e = exp(kept[i] - now);
        T::put(weights, i * LANES, e);
        added = added + e;
    }
    const float factor = exp(broadcast(before - now))[0];
    *total = *total * factor + sum(added);
    *highest = now;
    return factor;
}

template <class T>
static void attend(const Attention& call, const Cache& cache, const int32_t* task, int64_t head,
                   Workspace<T>& space) {
    typedef typename T::Element Element;
    const int64_t row = task[0], token = task[1], tokens = task[2], position = task[3];
    const int64_t all = task[4];
    const int64_t size = cache.size, real = cache.real;
    const int64_t share = call.q_heads / cache.heads, rows = tokens * share;
    space.fit(rows, size);
    const int64_t words = space.words(size), tile_words = space.words(TILE);
    std::vector<Element> padded(size);
    for (int64_t r = 0; r < rows; r++) {
        const Element* q = (const Element*)call.q + (token + r / share) * call.q_stride +
                           (head * share + r % share) * real;
        std::memcpy(padded.data(), q, real * sizeof(Element));
        to_words<T>(padded.data(), size, space.queries.data() + r * words);
        space.highest[r] = call.sinks ? call.sinks[head * share + r % share] : -1e30f;
        space.total[r] = call.sinks ? 1.0f : 0.0f;
    }
    std::fill(space.mixed.begin(), space.mixed.begin() + rows * size, 0.0f);
    const int32_t* table = call.table + row * call.table_stride;
    const int64_t keys = all ? all : position + tokens;
    const int64_t oldest = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
    for (int64_t tile = oldest / TILE * TILE; tile < keys; tile += TILE) {
        const int pages = (int)std::min<int64_t>(TILE_PAGES, (keys - tile + PAGE - 1) / PAGE);
        const int vectors = pages * PAGE_VECTORS;
        const int32_t *keys_of[TILE_VECTORS], *values[TILE_PAGES];
        for (int p = 0; p < pages; p++) {
            const int64_t number = tile / PAGE + p;
            const Element* page =
                page_of<T>(cache, table[number / cache.pages], number % cache.pages, head);
            for (int i = 0; i < PAGE_VECTORS; i++)
                keys_of[p * PAGE_VECTORS + i] = (const int32_t*)page + i * LANES;
            values[p] = (const int32_t*)(page + PAGE * size);
        }
        // Groups of like size: a last one of one row would cost as much as one of many.
        const int64_t score_groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
        for (int64_t group = 0; group < score_groups; group++) {
            const int64_t r = rows * group / score_groups;
            const int count = (int)(rows * (group + 1) / score_groups - r);
            for (int i = 0; i < vectors; i += 2)
                score_some<T, TILE_ROWS>(count, space.queries.data() + r * words, size, keys_of[i],
                                         keys_of[std::min(i + 1, vectors - 1)],
                                         space.scores.data() + r * TILE + i * LANES);
        }
        for (int64_t r = 0; r < rows; r++) {
            const int64_t place = position + r / share;
            const int64_t from = call.window ? place - call.window + 1 - tile : 0;
            const float factor = soften<T>(
                space.scores.data() + r * TILE, (int)std::max<int64_t>(0, from),
                (int)std::min<int64_t>(TILE, (all ? all : place + 1) - tile), vectors, call,
                &space.highest[r], &space.total[r], space.weights.data() + r * tile_words);
            if (factor != 1.0f)
                for (int64_t d = 0; d < size; d++) space.mixed[r * size + d] *= factor;
        }
        const int64_t value_groups = (rows + VALUE_ROWS - 1) / VALUE_ROWS;
        for (int64_t group = 0; group < value_groups; group++) {
            const int64_t r = rows * group / value_groups;
            const int count = (int)(rows * (group + 1) / value_groups - r);
            const int32_t* weights = space.weights.data() + r * tile_words;
            float* mixed = space.mixed.data() + r * size;
            constexpr int WIDTH = VALUE_VECTORS * LANES;
            int64_t d = 0;
            for (; d + WIDTH <= size; d += WIDTH)
                mix_some<T, VALUE_ROWS, VALUE_VECTORS>(count, weights, values, pages, size, d,
                                                       mixed + d);
            for (; d < size; d += LANES)
                mix_some<T, VALUE_ROWS, 1>(count, weights, values, pages, size, d, mixed + d);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        Element* to = (Element*)call.out + (token + r / share) * call.out_stride +
                      (head * share + r % share) * real;
        const float* from = space.mixed.data() + r * size;
        const float inverse = 1.0f / space.total[r];
        for (int64_t d = 0; d < real; d += LANES)
            write_some<T>(to + d, load<floats>(from + d) * inverse,
                          (int)std::min<int64_t>(LANES, real - d));
    }
}

template <class T>
struct AttentionRegion {
    const Attention* call;
    const Cache* cache;
};

template <class T>
static void attention_tile(void* context, int tile) {
    const auto& region = *(const AttentionRegion<T>*)context;
    static thread_local Workspace<T> space;
    // Tasks of one row stay next to each other, because they share its keys.
    const int64_t task = tile / region.cache->heads, head = tile % region.cache->heads;
    attend<T>(*region.call, *region.cache, region.call->tasks + 5 * task, head, space);
}

template <class T>
static void attention(Pool& pool, const Attention& call, const Cache& cache) {
    AttentionRegion<T> region{&call, &cache};
    const int tiles = (int)(call.num_tasks * cache.heads);
    int64_t keys = 0;
    for (int64_t i = 0; i < call.num_tasks; i++) {
        const int32_t* task = call.tasks + 5 * i;
        keys += (task[2] + 3) / 4 * (task[4] ? task[4] : task[3] + task[2]);
    }
    const int64_t bytes = keys * cache.heads * cache.size * 2 * sizeof(typename T::Element);
    if (bytes < (256 << 10)) {
        for (int tile = 0; tile < tiles; tile++) attention_tile<T>(&region, tile);
        return;
    }
    pool.run(tiles, attention_tile<T>, &region);
}

}  // namespace tessera
