// A paged cache of keys and values.
//
// Sixteen tokens of one head are a page, laid out as the products want it: keys as a panel of 16
// columns (for every unit of the head the keys side by side), then values as rows of units (two
// neighbouring keys make a unit in bfloat16). So both products are the same small kernel as a
// linear layer's, and in bfloat16 tiles as they lie (`tiles.h`). A block of the cache is one page or
// several, a page one vector of keys or several. Pages of codes are those of `coded_pages.h`.
#pragma once

#include <cstdint>

#include "../arithmetic/vectors.h"

namespace tessera {

constexpr int PAGE = 16;  // keys: whole vectors of every instruction set
constexpr int PAGE_VECTORS = PAGE / LANES;

// One layer's cache: [blocks, kv heads, pages of a block, keys then values, PAGE * size] elements, or as many
// pages of codes.
struct Cache {
    void* base;
    int64_t pages;  // of a block
    int64_t heads;
    int64_t size;  // of a head, in whole vectors: what is beyond `real` is zero
    int64_t real;
    // Of a cache of codes: which elements of each head lie beside them as they are, [heads, kept_count] with -1 for
    // none.
    const int32_t* kept;
    int64_t kept_count;
    int64_t coded;  // whether it is one
};

template <class T>
static inline typename T::Element* page_of(const Cache& cache, int64_t block, int64_t page,
                                           int64_t head) {
    const int64_t pages = (block * cache.heads + head) * cache.pages + page;
    return (typename T::Element*)cache.base + pages * 2 * PAGE * cache.size;
}

// Where a sequence's page lies: the place of its block in the table, and the page of the block.
struct PagePlace {
    int64_t block, page;

    PagePlace(const Cache& cache, int64_t p) : block(p), page(0) {
        if (cache.pages == 1) return;  // most often: a division takes as long as some products
        block = p / cache.pages;
        page = p % cache.pages;
    }
};

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

}  // namespace tessera
