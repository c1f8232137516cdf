// Sums of products of codes (`codes.h`) and rows of two digits, taken together as numbers of 16 bits.
//
// Two digits of 7 bits take two instructions for four inputs, numbers of 16 bits one for two inputs: as many, but half as
// many sums, so that twice as many rows are multiplied by what a vector of codes is loaded and taken apart for, and nothing
// is left to do for two sums at a group's end. A group's sums fit 32 bits (`MOST_IN_WORDS`).
#pragma once

#include "codes.h"

namespace tessera {

// Rows whose sums stay in registers, two vectors of each, beside the outputs that they are added to; and of a call that
// has no more rows than that, whose outputs are partly in memory.
constexpr int WHOLE_ROWS = TILE_ROWS < 12 ? 4 : 6, WHOLE_ROWS_ALONE = TILE_ROWS < 12 ? 4 : 8;
constexpr int64_t WHOLE_BYTES_FROM = 7;
constexpr int64_t WHOLE_STEP = 32;  // inputs whose products follow each other without a branch

// Whether a call's rows are taken whole. One group alone has its end once; and of few rows codes that are bytes already
// are multiplied sooner as they lie.
static inline bool takes_whole(const InputGroups& groups, const Quantized& q, int64_t rows) {
    const bool as_they_lie = q.format == BYTES && rows < WHOLE_BYTES_FROM;
    return q.digits == 2 && groups.count > 1 && groups.group <= MOST_IN_WORDS && !as_they_lie;
}

// How a unit's codes become pairs of 16 bits.
template <int FORMAT>
struct PairUnit : CodeUnit<FORMAT> {
    typedef CodeUnit<FORMAT> Unit;
    static constexpr int WORDS = 2 * Unit::WORDS;

    using Unit::Unit;

    // Of LANES columns; words in the order of WHOLE rows.
    inline ints pairs(const int32_t* unit, int word) const {
        if (FORMAT != NIBBLES) {
            const ints bytes = Unit::bytes(unit, word / 2);
            return word % 2 ? shifted(bytes, 8) : bytes & broadcast_int(0x00ff00ff);
        }
        constexpr int BY[4] = {0, 8, 4, 12};
        const ints codes = shifted(load<ints>(unit), BY[word]);
        return word == 3 ? codes : codes & broadcast_int(0x000f000f);
    }

private:
    typedef uint16_t uhalves __attribute__((vector_size(4 * LANES)));

    static inline ints shifted(ints words, int by) { return by ? (ints)((uhalves)words >> by) : words; }
};

// Where some rows of words lie: compilers would hold an address for each word of each row, more than there are registers.
class RowWords {
public:
    RowWords(const int32_t* first, int64_t stride) {
        one_ = 4 * stride, two_ = 8 * stride;
        a_ = (const char*)first, b_ = a_ + 3 * one_, c_ = b_ + 3 * one_;
        hide();
    }
    inline int32_t word(int r, int i) const {
        const char* from = r < 3 ? a_ : r < 6 ? b_ : c_;
        int32_t word;
        std::memcpy(&word, from + (r % 3 == 0 ? 0 : r % 3 == 1 ? one_ : two_) + 4 * i, 4);
        return word;
    }
    inline void advance(int64_t words) { a_ += 4 * words, b_ += 4 * words, c_ += 4 * words; }

    // From compilers how addresses of one word hang together with those of another.
    inline void hide() { asm("" : "+r"(a_), "+r"(b_), "+r"(c_), "+r"(one_), "+r"(two_)); }

private:
    const char *a_, *b_, *c_;  // of every third row
    int64_t one_, two_;        // bytes to the next row, and to the one after it
};

// What codes are taken less, or outputs more, beside the zero of all: nothing, zeros, minima.
enum Offsets { NO_OFFSETS, ZEROS, MINIMA };

// Of a group and the LANES columns that begin at `side`: what sums are multiplied with, and minima or zeros.
struct GroupNumbers {
    floats scales, offsets;
};

// The numbers of a panel as a layer has them.
template <Offsets OFFSETS>
class StoredNumbers {
public:
    StoredNumbers(const CodeCall& call, int64_t panel)
        : q_(*call.linear.layer->quantized), first_(panel * call.groups->count),
          first_run_(panel * (((call.groups->count - 1) >> q_.run_shift) + 1)) {}

    inline GroupNumbers of(int64_t g, int side) const {
        const int64_t place = (first_ + g) * PANEL + side * LANES;
        const int64_t run = (first_run_ + (g >> q_.run_shift)) * PANEL + side * LANES;
        GroupNumbers found = {read_scales(q_, q_.scales, run, q_.factors ? q_.factors + place : nullptr), {}};
        if (OFFSETS == MINIMA)
            found.offsets = read_scales(q_, q_.minima, run, q_.minimum_factors ? q_.minimum_factors + place : nullptr);
        if (OFFSETS == ZEROS) found.offsets = (floats)-read_zeros(q_.zeros + place);
        return found;
    }

private:
    const Quantized& q_;
    const int64_t first_, first_run_;
};

// The same, read once for many rows.
class ReadNumbers {
public:
    explicit ReadNumbers(const GroupNumbers* numbers) : numbers_(numbers) {}
    inline GroupNumbers of(int64_t g, int side) const { return numbers_[2 * g + side]; }

private:
    const GroupNumbers* numbers_;
};

// Scales times steps. Where processors multiply no faster than they make sums of products, and add whole numbers beside
// them, a step that is a power of two is added to the exponents of scales: the product is exact.
template <bool BY_EXPONENTS>
class ScaledBy {
public:
    explicit ScaledBy(floats scales) : scales_(scales) {}
    inline floats operator()(float step) const { return scales_ * broadcast(step); }

private:
    floats scales_;
};

#if defined(__AVX512F__)
template <>
class ScaledBy<true> {
public:
    explicit ScaledBy(floats scales)
        : nonzero_(_mm512_test_epi32_mask((__m512i)scales, (__m512i)scales)), exponents_((__m512i)((ints)scales - ONE)) {}
    inline floats operator()(float step) const {
        int32_t bits;
        std::memcpy(&bits, &step, 4);
        return (floats)_mm512_maskz_add_epi32(nonzero_, exponents_, _mm512_set1_epi32(bits));
    }

    // Whether scales are zero or so far from both ends of the range that no product leaves it.
    static inline bool suits(floats scales) {
        constexpr int32_t LEAST = ONE - (STEP_EXPONENTS << 23), MOST = ONE + (STEP_EXPONENTS << 23);
        const auto size = (__m512i)(((ints)scales & 0x7fffffff) - LEAST);
        const __mmask16 zero = _mm512_testn_epi32_mask((__m512i)scales, (__m512i)scales);
        return (_mm512_cmple_epu32_mask(size, _mm512_set1_epi32(MOST - LEAST)) | zero) == 0xffff;
    }

private:
    static constexpr int32_t ONE = 127 << 23;

    __mmask16 nonzero_;
    __m512i exponents_;
};
#endif

// Adds the products of COUNT units with R rows.
template <int FORMAT, int R, int COUNT>
__attribute__((always_inline)) static inline void add_pairs_of_units(const PairUnit<FORMAT>& unit, const int32_t*& w,
                                                                     RowWords& x, ints (&sums)[R][2]) {
    typedef PairUnit<FORMAT> Unit;
#pragma GCC unroll 16
    for (int word = 0; word < COUNT * Unit::WORDS; word++) {
        const int32_t* from = w + word / Unit::WORDS * Unit::STORED * PANEL;
        if (word % Unit::WORDS == 0)
            for (int line = 0; line < Unit::STORED * PANEL; line += 16) __builtin_prefetch(from + AHEAD_WORDS + line);
        x.hide();
        const ints a = unit.pairs(from, word % Unit::WORDS), b = unit.pairs(from + LANES, word % Unit::WORDS);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int32_t numbers = x.word(r, word);
            sums[r][0] = add_pair(sums[r][0], a, numbers);
            sums[r][1] = add_pair(sums[r][1], b, numbers);
        }
    }
    w += COUNT * Unit::STORED * PANEL;
    x.advance(COUNT * Unit::WORDS);
}

// The sums [R][2] of rows [row, row + R) and one panel, whose codes `w` are.
template <int FORMAT, Offsets OFFSETS, bool BY_EXPONENTS, int R, class Numbers>
static inline void multiply_whole(const CodeCall& call, const Numbers& numbers, const int32_t* w, int64_t row, floats* found) {
    typedef PairUnit<FORMAT> Unit;
    constexpr int COUNT = WHOLE_STEP / (2 * Unit::WORDS);
    const InputGroups& groups = *call.groups;
    const DigitRows& rows = call.rows;
    const Unit unit(*call.linear.layer->quantized);
    const int64_t count = groups.count, units = groups.units(0), last_units = groups.units(count - 1);
    const float *steps = rows.steps + row, *shifts = rows.shifts + row;
    const int32_t* starts = rows.sums + row;
    RowWords x(rows.words + row * rows.words_each, rows.words_each);
    floats y[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) y[r][0] = y[r][1] = floats{};
    for (int64_t g = 0; g < count; g++) {
        ints sums[R][2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = broadcast_int(starts[r]);
        if (OFFSETS == ZEROS)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                const auto zeros = (ints)numbers.of(g, side).offsets;
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][side] *= zeros;
            }
        int64_t left = g + 1 < count ? units : last_units;
        for (; left >= COUNT; left -= COUNT) add_pairs_of_units<FORMAT, R, COUNT>(unit, w, x, sums);
        if (COUNT > 1)
            for (; left > 0; left--) add_pairs_of_units<FORMAT, R, 1>(unit, w, x, sums);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const GroupNumbers here = numbers.of(g, side);
            const ScaledBy<BY_EXPONENTS> scaled(here.scales);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                y[r][side] = fused(__builtin_convertvector(sums[r][side], floats), scaled(steps[r]), y[r][side]);
                if (OFFSETS == MINIMA) y[r][side] = fused(here.offsets, broadcast(shifts[r]), y[r][side]);
            }
        }
        steps += rows.count, shifts += rows.count, starts += rows.count;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        found[2 * r] = y[r][0];
        found[2 * r + 1] = y[r][1];
    }
}

// How rows are multiplied: `few` by the numbers as they are stored, `many` by numbers read before.
struct WholeKernel {
    void (*few)(const CodeCall& call, int64_t panel, const int32_t* w, int64_t row, int rows, floats* y);
    void (*many)(const CodeCall& call, const GroupNumbers* numbers, const int32_t* w, int64_t row, int rows, floats* y);
    bool (*read)(const CodeCall& call, int64_t panel, GroupNumbers* numbers);
};

template <int FORMAT, Offsets OFFSETS, int R>
static inline void multiply_few(const CodeCall& call, int64_t panel, const int32_t* w, int64_t row, int rows, floats* y) {
    if constexpr (R > 0) {
        if (rows != R) return multiply_few<FORMAT, OFFSETS, R - 1>(call, panel, w, row, rows, y);
        multiply_whole<FORMAT, OFFSETS, false, R>(call, StoredNumbers<OFFSETS>(call, panel), w, row, y);
    }
}

#if defined(__AVX512F__)

// Groups of like size of more rows than WHOLE_ROWS_ALONE are no smaller than this.
constexpr int LEAST_OF_MANY = 4;

template <int FORMAT, Offsets OFFSETS, int R>
static inline void multiply_many(const CodeCall& call, const GroupNumbers* numbers, const int32_t* w, int64_t row, int rows,
                                 floats* y) {
    if constexpr (R >= LEAST_OF_MANY) {
        if (rows != R) return multiply_many<FORMAT, OFFSETS, R - 1>(call, numbers, w, row, rows, y);
        multiply_whole<FORMAT, OFFSETS, true, R>(call, ReadNumbers(numbers), w, row, y);
    }
}

// The numbers of a panel, [groups, 2]; whether scales can be multiplied by their exponents.
template <Offsets OFFSETS>
static bool read_panel(const CodeCall& call, int64_t panel, GroupNumbers* numbers) {
    const StoredNumbers<OFFSETS> stored(call, panel);
    bool suit = true;
    for (int64_t i = 0; i < 2 * call.groups->count; i++) {
        numbers[i] = stored.of(i / 2, i % 2);
        suit = ScaledBy<true>::suits(numbers[i].scales) && suit;
    }
    return suit;
}

template <int FORMAT, Offsets OFFSETS>
static WholeKernel whole_kernel() {
    return {multiply_few<FORMAT, OFFSETS, WHOLE_ROWS_ALONE>, multiply_many<FORMAT, OFFSETS, WHOLE_ROWS>,
            read_panel<OFFSETS>};
}

#else

template <int FORMAT, Offsets OFFSETS>
static WholeKernel whole_kernel() {
    return {multiply_few<FORMAT, OFFSETS, WHOLE_ROWS_ALONE>, nullptr, nullptr};
}

#endif

template <int FORMAT>
static WholeKernel whole_kernel(const Quantized& q) {
    if (q.minima) return whole_kernel<FORMAT, MINIMA>();
    if constexpr (FORMAT == BYTES || FORMAT == NIBBLES)  // no others have zeros
        if (q.zeros) return whole_kernel<FORMAT, ZEROS>();
    return whole_kernel<FORMAT, NO_OFFSETS>();
}

static inline WholeKernel find_whole_kernel(const Quantized& q) {
    switch (q.format) {
        case BYTES: return whole_kernel<BYTES>(q);
        case NIBBLES: return whole_kernel<NIBBLES>(q);
        case TABLE: return whole_kernel<TABLE>(q);
        case FIVES: return whole_kernel<FIVES>(q);
        default: return whole_kernel<SIXES>(q);
    }
}

// Calls finish(row, left, right) with the sums of all rows and one panel, whose codes `w` are.
template <class Finish>
static inline void multiply_panel_whole(const CodeCall& call, const WholeKernel& kernel, int64_t panel, const int32_t* w,
                                        const Finish& finish) {
    static thread_local Lines<float> lines;
    const int64_t all = call.linear.rows;
    const int most = all <= WHOLE_ROWS_ALONE ? WHOLE_ROWS_ALONE : WHOLE_ROWS;
    auto* numbers = (GroupNumbers*)lines.fit(kernel.many ? call.groups->count * 2 * PANEL : 0);
    const bool many = kernel.many && all > WHOLE_ROWS_ALONE && call.rows.powers && kernel.read(call, panel, numbers);
    const int64_t groups = (all + most - 1) / most;
    floats y[2 * WHOLE_ROWS_ALONE];
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = all * group / groups, end = all * (group + 1) / groups;
        if (many)
            kernel.many(call, numbers, w, row, (int)(end - row), y);
        else
            kernel.few(call, panel, w, row, (int)(end - row), y);
        for (int64_t r = row; r < end; r++) finish(r, y[2 * (r - row)], y[2 * (r - row) + 1]);
    }
}

}  // namespace tessera
