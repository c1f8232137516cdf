// Attention's two products by Intel's tiles (`tiles.h`).
//
// Keys of a page are a tile for every 32 elements of a head as they lie. Values of two pages are one for every 16
// elements once they lie together: they are copied, since a tile's rows are evenly spaced. So are the last 16 keys'
// elements of a head that has half a step left, filled up with zeros. 32 rows of queries and two pages, or their
// weights and 32 elements of values, make four tiles of sums.
//
// Beside another thread of the same core that uses tiles there are no spare registers behind their names (measured: a
// product then holds back the next load into a tile that it reads), so that each of four operands has a name of its own.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_call.h"
#include "../arithmetic/lines.h"
#include "../arithmetic/tiles.h"
#include "../arithmetic/pairs.h"

namespace tessera {

#if TESSERA_TILES

static_assert(STEP == 2 * PAGE && PAGE == TILE_SIDE && LANES == TILE_SIDE, "a page is as wide as a tile");

class AttentionByTiles {
public:
    typedef uint16_t Word;  // of queries and weights
    static constexpr int KEYS = STEP;
    static constexpr int64_t MOST_ROWS = 2 * TILE_SIDE;  // of a group

    // Two tiles have the same number of rows; what is beyond those that there are is memory of the group.
    static int64_t group_rows(int64_t rows, int64_t groups) {
        const int64_t each = (rows + groups - 1) / groups;
        return each > TILE_SIDE ? (each + 1) / 2 * 2 : each;
    }
    static constexpr int64_t words(int64_t elements) { return (elements + STEP - 1) / STEP * STEP; }

    // Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.
    AttentionByTiles(int64_t rows, int64_t size)
        : size_(size), both_(rows > TILE_SIDE), rows_(both_ ? rows / 2 : rows) {
        TileShapes shapes;
        for (int tile : {0, 1, 2, 3, 4, 5}) shapes.set(tile, (int)rows_);
        for (int tile : {6, 7}) shapes.set(tile, TILE_SIDE);
        shape_tiles(shapes);
        values_ = value_lines().fit(STRIP * size);
        if (size % STEP) {
            rests_ = rest_lines().fit(STRIP_PAGES * REST);
            std::fill_n(rests_, STRIP_PAGES * REST, (Word)0);
        }
    }
    ~AttentionByTiles() { release_tiles(); }
    AttentionByTiles(const AttentionByTiles&) = delete;

    static void put_query(const uint16_t* query, int64_t size, Word* to) {
        std::memcpy(to, query, size * sizeof *to);
        std::fill(to + size, to + words(size), (Word)0);
    }
    static void put_weights(Word* to, int64_t i, floats weights) { BFloat16::write(to + i, weights); }

    // What multiplies tiles sleeps after some thousand cycles without work, and takes a thousand to wake up (measured): a
    // product that nobody wants, now and then, is cheaper.
    static void stay_awake() { multiply_tiles<0, 4, 6>(); }

    void prepare(const void* const* pages, int count, const void* const* next) {
        pages_ = pages, count_ = count, next_ = next;
        const int64_t elements = PAGE * size_;
        for (int p = 0; p < count; p++) {
            stay_awake();
            std::memcpy(values_ + p * elements, (const Word*)pages[p] + elements, elements * sizeof(Word));
        }
        if (count % 2) std::fill_n(values_ + count * elements, elements, (Word)0);
        for (int p = 0; p < count && rests_; p++)
            std::memcpy(rests_ + p * REST, (const Word*)pages[p] + size_ / STEP * REST, REST);
    }

    // scores: [rows, STRIP], of the strip's keys and, where its pages are odd, of a page that is not there.
    // asks: whether memory is asked for the next strip's keys meanwhile.
    void score(const Word* queries, int, float* scores, bool asks) const {
        for (int p = 0; p < count_; p += 2) {
            if (asks) ask(p, 0);
            both_ ? score_pages<true>(queries, p, scores + p * PAGE) : score_pages<false>(queries, p, scores + p * PAGE);
        }
    }

    // sums: [rows, size] += weights [rows, STRIP] times the strip's values. asks: for the next strip's.
    void mix(const Word* weights, int, float* sums, bool asks) const {
        for (int p = 0; p < count_ && asks; p += 2) ask(p, PAGE * size_);
        int64_t d = 0;
        for (; d + 2 * TILE_SIDE <= size_; d += 2 * TILE_SIDE)
            both_ ? mix_columns<true, true>(weights, d, sums) : mix_columns<false, true>(weights, d, sums);
        if (d < size_) both_ ? mix_columns<true, false>(weights, d, sums) : mix_columns<false, false>(weights, d, sums);
    }

private:
    // Half of a page and of its neighbour, of the next strip.
    void ask(int page, int64_t first) const {
        for (int p = page; p < page + 2 && next_; p++)
            for (int64_t i = 0; i < PAGE * size_ && next_[p]; i += TILE_STRIDE / (int64_t)sizeof(Word))
                __builtin_prefetch((const Word*)next_[p] + first + i, 0, 2);
    }

    static constexpr int64_t REST = PAGE * STEP;  // elements of a page's keys in a step, and bytes of half as many
    static constexpr int64_t ROW_SCORES = STRIP * sizeof(float), ROW_WEIGHTS = STRIP * sizeof(Word);  // bytes

    static Lines<Word>& value_lines() {
        static thread_local Lines<Word> lines;
        return lines;
    }
    static Lines<Word>& rest_lines() {
        static thread_local Lines<Word> lines;
        return lines;
    }

    // One step of two tiles of rows and two of columns.
    template <bool BOTH, bool TWO>
    static inline void multiply(const void* upper, const void* lower, int64_t stride, const void* left,
                                const void* right, int64_t column_stride) {
        load_tile<6>(left, column_stride);
        load_tile<4>(upper, stride);
        multiply_tiles<0, 4, 6>();
        if (TWO) {
            load_tile<7>(right, column_stride);
            multiply_tiles<1, 4, 7>();
        }
        if (!BOTH) return;
        load_tile<5>(lower, stride);
        multiply_tiles<2, 5, 6>();
        if (TWO) multiply_tiles<3, 5, 7>();
    }

    template <bool BOTH, bool TWO>
    static inline void store_sums(float* upper, float* lower, int64_t stride) {
        store_tile<0>(upper, stride);
        if (TWO) store_tile<1>(upper + TILE_SIDE, stride);
        if (BOTH) store_tile<2>(lower, stride);
        if (BOTH && TWO) store_tile<3>(lower + TILE_SIDE, stride);
    }

    template <bool BOTH>
    void score_pages(const Word* queries, int page, float* scores) const {
        const int64_t row = words(size_), stride = row * sizeof(Word);
        const int other = std::min(page + 1, count_ - 1);
        const Word *upper = queries, *lower = queries + rows_ * row;
        const Word *first = (const Word*)pages_[page], *second = (const Word*)pages_[other];
        zero_tile<0>();
        zero_tile<1>();
        if (BOTH) zero_tile<2>();
        if (BOTH) zero_tile<3>();
        for (int64_t d = 0; d + STEP <= size_; d += STEP)
            multiply<BOTH, true>(upper + d, lower + d, stride, first + d * PAGE, second + d * PAGE, TILE_STRIDE);
        if (rests_) {
            const int64_t d = row - STEP;
            multiply<BOTH, true>(upper + d, lower + d, stride, rests_ + page * REST, rests_ + other * REST, TILE_STRIDE);
        }
        store_sums<BOTH, true>(scores, scores + rows_ * STRIP, ROW_SCORES);
    }

    // 32 elements of the values from `column` on, or the last 16.
    template <bool BOTH, bool TWO>
    void mix_columns(const Word* weights, int64_t column, float* sums) const {
        const int64_t stride = size_ * sizeof(float);  // of two keys' values, too
        float *upper = sums + column, *lower = upper + rows_ * size_;
        load_tile<0>(upper, stride);
        if (TWO) load_tile<1>(upper + TILE_SIDE, stride);
        if (BOTH) load_tile<2>(lower, stride);
        if (BOTH && TWO) load_tile<3>(lower + TILE_SIDE, stride);
        const Word* values = values_ + 2 * column;
        for (int key = 0; key < count_ * PAGE; key += STEP, weights += STEP, values += STEP * size_)
            multiply<BOTH, TWO>(weights, weights + rows_ * STRIP, ROW_WEIGHTS, values, values + 2 * TILE_SIDE, stride);
        store_sums<BOTH, TWO>(upper, lower, stride);
    }

    int64_t size_;
    bool both_;
    int64_t rows_;  // of a tile
    Word *values_ = nullptr, *rests_ = nullptr;  // copies: of a strip's values; of keys' last half steps
    const void *const *pages_ = nullptr, *const *next_ = nullptr;
    int count_ = 0;
};

#endif

}  // namespace tessera
