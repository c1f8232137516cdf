// What is done to each row by itself: norms, rotation and writing the cache.
#pragma once

#include <cmath>

#include "attention.h"
#include "vectors.h"

namespace tessera {

// out = x / rms(x) * weight; all of `size` elements.
template <class T>
static inline void rms_norm(const typename T::Element* x, const typename T::Element* weight,
                            float eps, int64_t size, typename T::Element* out) {
    floats squares = {};
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES) {
        const floats v = T::read(x + d);
        squares = squares + v * v;
    }
    if (d < size) {
        const floats v = read_some<T>(x + d, (int)(size - d));
        squares = squares + v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
    for (d = 0; d + LANES <= size; d += LANES)
        T::write(out + d, T::read(x + d) * scale * T::read(weight + d));
    if (d < size) {
        const int rest = (int)(size - d);
        write_some<T>(out + d, read_some<T>(x + d, rest) * scale * read_some<T>(weight + d, rest),
                      rest);
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

// Rotates pairs (i, i + size / 2) in place. `sin`'s first half carries the minus sign.
template <class T>
static inline void rotate(typename T::Element* x, const typename T::Element* cos,
                          const typename T::Element* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int count = (int)std::min<int64_t>(LANES, half - i);
        const floats low = read_some<T>(x + i, count), high = read_some<T>(x + half + i, count);
        const floats a = low * read_some<T>(cos + i, count) + high * read_some<T>(sin + i, count);
        const floats b =
            high * read_some<T>(cos + half + i, count) + low * read_some<T>(sin + half + i, count);
        write_some<T>(x + i, a, count);
        write_some<T>(x + half + i, b, count);
    }
}

struct RopeWrite {
    void* qkv;  // [tokens, (q heads + 2 kv heads) * size]: queries are rotated in place
    const void *cos, *sin;  // [tokens, size]
    const int64_t* slots;   // [tokens]: block * block size + place
    const void *q_norm, *k_norm;  // [size] or null
    int64_t tokens, q_heads;
    float eps;
};

template <class T>
static void write_key(const Cache& cache, int64_t slot, int64_t head,
                      const typename T::Element* key) {
    auto* to = page_at<T>(cache, slot, head);
    for (int64_t d = 0; d < cache.real; d++) to[key_place<T>(slot % PAGE, d)] = key[d];
}

template <class T>
static void write_value(const Cache& cache, int64_t slot, int64_t head,
                        const typename T::Element* value) {
    auto* to = page_at<T>(cache, slot, head);
    for (int64_t d = 0; d < cache.real; d++)
        to[value_place<T>(slot % PAGE, d, cache.size)] = value[d];
}

template <class T>
static void rope_write_token(const RopeWrite& call, const Cache& cache, int64_t t) {
    typedef typename T::Element Element;
    const int64_t size = cache.real, heads = call.q_heads + 2 * cache.heads;
    Element* row = (Element*)call.qkv + t * heads * size;
    const Element* cos = (const Element*)call.cos + t * size;
    const Element* sin = (const Element*)call.sin + t * size;
    for (int64_t h = 0; h < call.q_heads + cache.heads; h++) {
        Element* x = row + h * size;
        const void* norm = h < call.q_heads ? call.q_norm : call.k_norm;
        if (norm) rms_norm<T>(x, (const Element*)norm, call.eps, size, x);
        rotate<T>(x, cos, sin, size);
    }
    const Element* keys = row + call.q_heads * size;
    for (int64_t h = 0; h < cache.heads; h++) {
        write_key<T>(cache, call.slots[t], h, keys + h * size);
        write_value<T>(cache, call.slots[t], h, keys + (cache.heads + h) * size);
    }
}

}  // namespace tessera
