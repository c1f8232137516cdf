// Pages of a cache (`pages.h`) whose keys and values are bytes, in about half the room.
//
// Each key and each value of a head has a scale of its own, so that a token's bytes depend on that token alone. A page
// of sixteen tokens is
//
//   keys     [size / 4][PAGE][4]   bytes, ZERO_BYTE more than they count
//   values   [PAGE / 4][size][4]   signed bytes, four neighbouring tokens of an element side by side
//   scales   [2][PAGE]             float32, of keys and of values
//   kept     [kept_count][PAGE]    elements of the keys as they are, which count as zero among the bytes
//
// filled up to whole lines. What is no finite number makes its token's scale no number.
#pragma once

#include "../arithmetic/bytes.h"
#include "../arithmetic/digits.h"
#include "../arithmetic/lines.h"
#include "pages.h"

namespace tessera {

constexpr int64_t LINE_BYTES = 64;
constexpr int CODES_TO = 127;  // the largest code of a key, a value and a query

template <class T>
static inline int64_t coded_page_bytes(const Cache& cache) {
    const int64_t kept = cache.kept_count * PAGE * (int64_t)sizeof(typename T::Element);
    const int64_t all = 2 * PAGE * cache.size + 2 * PAGE * (int64_t)sizeof(float) + kept;
    return (all + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

struct CodedPage {
    uint8_t* keys;
    int64_t size;

    int8_t* values() const { return (int8_t*)keys + PAGE * size; }
    float* key_scales() const { return (float*)(keys + 2 * PAGE * size); }
    float* value_scales() const { return key_scales() + PAGE; }
    template <class T>
    typename T::Element* kept() const {
        return (typename T::Element*)(key_scales() + 2 * PAGE);
    }
    uint8_t& key(int64_t token, int64_t d) const { return keys[(d / 4 * PAGE + token) * 4 + d % 4]; }
    int8_t& value(int64_t token, int64_t d) const { return values()[(token / 4 * size + d) * 4 + token % 4]; }
};

template <class T>
static inline CodedPage coded_page_of(const Cache& cache, int64_t block, int64_t page, int64_t head) {
    const int64_t pages = (block * cache.heads + head) * cache.pages + page;
    return {(uint8_t*)cache.base + pages * coded_page_bytes<T>(cache), cache.size};
}

// The page that holds a slot (block * block size + place).
template <class T>
static inline CodedPage coded_page_at(const Cache& cache, int64_t slot, int64_t head) {
    const int64_t page = slot / PAGE;
    return coded_page_of<T>(cache, page / cache.pages, page % cache.pages, head);
}

// Codes of `count` elements, for which there is room in whole vectors; returns what they count. All zero where a
// result is no number or zero.
template <class T>
static inline float to_codes(const typename T::Element* x, int64_t count, int32_t* codes) {
    const float most = largest_size<T>(x, count);
    if (!std::isfinite(most) || most < LEAST_OF_GROUP) {
        std::fill_n(codes, count, 0);
        return std::isfinite(most) ? 0.0f : NAN;
    }
    to_whole_numbers<T>(x, count, (float)CODES_TO / most, codes);
    return most / (float)CODES_TO;
}

// A key without the elements that are kept beside its codes.
template <class T>
static inline const typename T::Element* without_kept(const Cache& cache, int64_t head,
                                                      const typename T::Element* key, typename T::Element* copy) {
    if (!cache.kept_count) return key;
    std::copy_n(key, cache.real, copy);
    const int32_t* kept = cache.kept + head * cache.kept_count;
    for (int64_t i = 0; i < cache.kept_count; i++)
        if (kept[i] >= 0) copy[kept[i]] = 0;
    return copy;
}

// Writes a token of one head: key and value [real].
template <class T>
static void write_codes(const Cache& cache, int64_t slot, int64_t head, const typename T::Element* key,
                        const typename T::Element* value) {
    typedef typename T::Element Element;
    static thread_local Lines<int32_t> code_lines;
    static thread_local Lines<Element> element_lines;
    int32_t* codes = code_lines.fit(cache.size + LANES);
    const CodedPage page = coded_page_at<T>(cache, slot, head);
    const int64_t token = slot % PAGE;
    std::fill_n(codes, cache.size, 0);
    page.key_scales()[token] =
        to_codes<T>(without_kept<T>(cache, head, key, element_lines.fit(cache.real)), cache.real, codes);
    for (int64_t d = 0; d < cache.real; d += 4) {
        uint8_t unit[4];
        for (int i = 0; i < 4; i++) unit[i] = (uint8_t)((d + i < cache.real ? codes[d + i] : 0) + ZERO_BYTE);
        std::memcpy(&page.key(token, d), unit, 4);
    }
    for (int64_t i = 0; i < cache.kept_count; i++) {
        const int32_t d = cache.kept[head * cache.kept_count + i];
        page.kept<T>()[i * PAGE + token] = d < 0 ? Element(0) : key[d];
    }
    page.value_scales()[token] = to_codes<T>(value, cache.real, codes);
    int8_t* to = &page.value(token, 0);
    for (int64_t d = 0; d < cache.real; d++) to[4 * d] = (int8_t)codes[d];
}

template <class T>
static inline void write_element(typename T::Element* to, float x) {
    write_some<T>(to, broadcast(x), 1);
}

// Reads a token of one head as numbers: key and value [real].
template <class T>
static void read_codes(const Cache& cache, int64_t slot, int64_t head, typename T::Element* key,
                       typename T::Element* value) {
    const CodedPage page = coded_page_at<T>(cache, slot, head);
    const int64_t token = slot % PAGE;
    const float key_scale = page.key_scales()[token], value_scale = page.value_scales()[token];
    for (int64_t d = 0; d < cache.real; d++) {
        write_element<T>(key + d, (float)((int)page.key(token, d) - ZERO_BYTE) * key_scale);
        write_element<T>(value + d, (float)page.value(token, d) * value_scale);
    }
    for (int64_t i = 0; i < cache.kept_count; i++) {
        const int32_t d = cache.kept[head * cache.kept_count + i];
        if (d >= 0) key[d] = page.kept<T>()[i * PAGE + token];
    }
}

}  // namespace tessera
