// What is done to each row by itself: norms, rotation and writing the cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/coded_pages.h"
#include "attention/pages.h"
#include "arithmetic/vectors.h"

namespace tessera {

// out = x / rms(x) * weight; all of `size` elements.
template <class T>
static inline void rms_norm(const typename T::Element* x, const typename T::Element* weight,
                            float eps, int64_t size, typename T::Element* out) {
    LaneSums squares;
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES) {
        const floats v = T::read(x + d);
        squares.add_product(d / LANES, v, v);
    }
    if (d < size) {
        const floats v = read_some<T>(x + d, (int)(size - d));
        squares.add_product(d / LANES, v, v);
    }
    const float scale = 1.0f / std::sqrt(squares.total() / (float)size + eps);
    for (d = 0; d + LANES <= size; d += LANES)
        T::write(out + d, T::read(x + d) * scale * T::read(weight + d));
    if (d < size) {
        const int rest = (int)(size - d);
        write_some<T>(out + d, read_some<T>(x + d, rest) * scale * read_some<T>(weight + d, rest),
                      rest);
    }
}

// out = (x - mean) / deviation * weight + bias (Ba et al., 2016); all of `size` elements.
template <class T>
static inline void layer_norm(const typename T::Element* x, const typename T::Element* weight,
                              const typename T::Element* bias, float eps, int64_t size,
                              typename T::Element* out) {
    LaneSums sums, squares;
    for (int64_t d = 0; d < size; d += LANES)
        sums.add(d / LANES, read_some<T>(x + d, (int)std::min<int64_t>(LANES, size - d)));
    const float mean = sums.total() / (float)size;
    for (int64_t d = 0; d < size; d += LANES) {
        const int count = (int)std::min<int64_t>(LANES, size - d);
        const floats apart = read_some<T>(x + d, count) - mean;
        const floats real = LANE < count ? apart : floats{};
        squares.add_product(d / LANES, real, real);
    }
    const float scale = 1.0f / std::sqrt(squares.total() / (float)size + eps);
    for (int64_t d = 0; d < size; d += LANES) {
        const int count = (int)std::min<int64_t>(LANES, size - d);
        const floats v = (read_some<T>(x + d, count) - mean) * scale;
        const floats scaled = fused(v, read_some<T>(weight + d, count), read_some<T>(bias + d, count));
        write_some<T>(out + d, scaled, count);
    }
}

// residual += x, rounded to the element type.
template <class T>
static inline void add(const typename T::Element* x, typename T::Element* residual, int64_t size) {
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES)
        T::write(residual + d, T::read(residual + d) + T::read(x + d));
    if (d < size) {
        const int rest = (int)(size - d);
        write_some<T>(residual + d, read_some<T>(residual + d, rest) + read_some<T>(x + d, rest),
                      rest);
    }
}

// Rotates pairs (i, i + size / 2) in place. `sin`'s first half carries the minus sign. `Table`: the
// type of `cos` and `sin`.
template <class T, class Table>
static inline void rotate(typename T::Element* x, const typename Table::Element* cos,
                          const typename Table::Element* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = (int)std::min<int64_t>(LANES, half - i);
        const floats low = read_some<T>(x + i, count), high = read_some<T>(x + half + i, count);
        const floats a = fused(low, read_some<Table>(cos + i, count),
                               high * read_some<Table>(sin + i, count));
        const floats b = fused(high, read_some<Table>(cos + half + i, count),
                               low * read_some<Table>(sin + half + i, count));
        write_some<T>(x + i, a, count);
        write_some<T>(x + half + i, b, count);
    }
}

struct RopeWrite {
    void* qkv;  // [tokens, (q heads + 2 kv heads) * size]: queries are rotated in place
    const void *cos, *sin;  // [tokens, size], or null: nothing is rotated
    const int64_t* slots;   // [tokens]: block * block size + place
    const void *q_norm, *k_norm;  // [size] or null
    int64_t tokens, q_heads;
    float eps;
    int32_t wide;  // cos and sin are float32, not of the element type
};

template <class T>
static void write_key(const Cache& cache, int64_t slot, int64_t head,
                      const typename T::Element* key) {
    auto* page = page_at<T>(cache, slot, head);
    // Whole units at a time; an odd head's last half by itself.
    const int64_t units = cache.real / T::PER_UNIT;
    for (int64_t u = 0; u < units; u++)
        std::memcpy(page + (u * PAGE + slot % PAGE) * T::PER_UNIT, key + u * T::PER_UNIT, 4);
    for (int64_t d = units * T::PER_UNIT; d < cache.real; d++)
        page[key_place<T>(slot % PAGE, d)] = key[d];
}

template <class T>
static void write_value(const Cache& cache, int64_t slot, int64_t head,
                        const typename T::Element* value) {
    auto* to = page_at<T>(cache, slot, head) + value_place<T>(slot % PAGE, 0, cache.size);
    for (int64_t d = 0; d < cache.real; d++) to[d * T::PER_UNIT] = value[d];
}

// A token of one head, as the cache has them.
template <class T>
static void write_token(const Cache& cache, int64_t slot, int64_t head, const typename T::Element* key,
                        const typename T::Element* value) {
    if (cache.coded) return write_codes<T>(cache, slot, head, key, value);
    write_key<T>(cache, slot, head, key);
    write_value<T>(cache, slot, head, value);
}

template <class T, class Table>
static void rope_write_token(const RopeWrite& call, const Cache& cache, int64_t t) {
    typedef typename T::Element Element;
    const int64_t size = cache.real, heads = call.q_heads + 2 * cache.heads;
    Element* row = (Element*)call.qkv + t * heads * size;
    const auto* cos = (const typename Table::Element*)call.cos + t * size;
    const auto* sin = (const typename Table::Element*)call.sin + t * size;
    for (int64_t h = 0; h < call.q_heads + cache.heads; h++) {
        Element* x = row + h * size;
        const void* norm = h < call.q_heads ? call.q_norm : call.k_norm;
        if (norm) rms_norm<T>(x, (const Element*)norm, call.eps, size, x);
        if (call.cos) rotate<T, Table>(x, cos, sin, size);
    }
    const Element* keys = row + call.q_heads * size;
    for (int64_t h = 0; h < cache.heads; h++)
        write_token<T>(cache, call.slots[t], h, keys + h * size, keys + (cache.heads + h) * size);
}

}  // namespace tessera
