// Rows as whole numbers, with which codes of weights are multiplied (`quantized_linear.h`).
//
// The inputs of each group of a row have one step t: x is taken for t p. With two digits p = 128 h + l, |p| <= 8192,
// and t is a power of two, so that what bfloat16 holds within a thirty-second part of the largest is exact; with one
// |p| <= 127, and t the largest over 127. Which of the two a layer takes is decided when it is packed: a row's bits
// depend on nothing else.
//
// A group with an input that is no number, or infinite, has a step that is no number: so are all outputs of that row
// then. One whose inputs are all below 2^-100 counts as zeros.
#pragma once

#include <atomic>
#include <cmath>
#include <vector>

#include "bytes.h"
#include "lines.h"
#include "../pool.h"
#include "vectors.h"

namespace tessera {

constexpr float LEAST_OF_GROUP = 0x1p-100f;
constexpr int STEP_EXPONENTS = 60;

// The inputs of a row in groups, each of them in whole units of a packed weight, filled up with zeros.
struct InputGroups {
    int64_t inputs, group, count;  // `group`: inputs of each but the last
    int64_t unit;                  // inputs

    InputGroups(int64_t inputs, int64_t group, int64_t unit)
        : inputs(inputs), group(group ? group : inputs), count((inputs + this->group - 1) / this->group), unit(unit) {}
    int64_t size(int64_t g) const { return g + 1 < count ? group : inputs - g * group; }
    int64_t units(int64_t g) const { return (size(g) + unit - 1) / unit; }
    int64_t all_units() const { return (count - 1) * units(0) + units(count - 1); }
};

// How whole numbers lie in words: four inputs' digits in each, of two digits h and l in turn, or apart, all of h before
// all of l; or whole, two inputs' p of 16 bits in each, of four inputs the even ones before the odd ones.
enum WordLayout { IN_TURN, APART, WHOLE };

struct DigitRows {
    const int32_t* words;  // [rows, words_each]
    const float* steps;    // [groups, rows]
    const float* shifts;   // [groups, rows]: t times the sum of p
    const int32_t* sums;   // [groups, rows, digits]: `times` that of h and of l; where they lie whole [groups, rows], of p
    int64_t words_each, count;  // of rows
    bool powers = false;  // whether all steps are 2^e with |e| <= STEP_EXPONENTS
};

template <class T>
struct DigitCall {
    const typename T::Element* x;
    int64_t x_stride, rows, rows_each;
    const InputGroups* groups;
    const int32_t* order;  // of the inputs, or null
    int digits, times;
    WordLayout layout;
    int32_t* words;
    float *steps, *shifts;
    int32_t* sums;
    int64_t words_each;
    std::atomic<bool>* rough;
};

// The largest of `count` elements by size; infinite or no number if one of them is.
template <class T>
static inline float largest_size(const typename T::Element* x, int64_t count) {
    ints most = {};  // floats without signs are in the order of their bits
    for (int64_t k = 0; k < count; k += LANES) {
        const floats v = read_some<T>(x + k, (int)std::min<int64_t>(LANES, count - k));
        const ints bits = (ints)v & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const int32_t found = largest(most);
    float size;
    std::memcpy(&size, &found, 4);
    return size;
}

// v times `per_step`, to nearest even: at most 2^22 in size.
static inline ints nearest_integers(floats v, floats per_step) {
    constexpr float MAGIC = 0x1.8p23f;  // adding it leaves the nearest integer in the last bits
    return (ints)fused(v, per_step, broadcast(MAGIC)) - 0x4b400000;
}

// Whole numbers p of `count` elements.
template <class T>
static inline void to_whole_numbers(const typename T::Element* x, int64_t count, float per_step, int32_t* p) {
    for (int64_t k = 0; k < count; k += LANES) {
        const floats v = read_some<T>(x + k, (int)std::min<int64_t>(LANES, count - k));
        store(p + k, nearest_integers(v, broadcast(per_step)));
    }
}

// 2^exponent, a normal number.
static inline float power_of_two(int exponent) {
    const int32_t bits = (exponent + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}

// Digits of LANES inputs at the beginning of `to`, or of the first `left` of them.
static inline void put_digits(int32_t* to, ints digits, int64_t left) {
    if (left >= LANES) return store_bytes(to, digits);
    int8_t some[LANES];
    store_bytes(some, digits);
    std::memcpy(to, some, left);
}

// The same of both digits, each word of h before that of l.
static inline void put_in_turn(int32_t* to, ints high, ints low, int64_t left) {
    int8_t highs[LANES], lows[LANES];
    store_bytes(highs, high);
    store_bytes(lows, low);
    for (int word = 0; word < std::min<int64_t>(LANES, left) / 4; word++, to += 2) {
        std::memcpy(to, highs + 4 * word, 4);
        std::memcpy(to + 1, lows + 4 * word, 4);
    }
}

// The lower halves of p of LANES inputs, of four the even ones before the odd ones.
static inline void put_whole(int32_t* to, ints p, int64_t left) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)p);
    const __m256i found = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(halves, 0xd8), 0xd8);
#elif defined(__AVX2__)
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)p), _mm256_extracti128_si256((__m256i)p, 1));
    const __m128i found = _mm_shufflehi_epi16(_mm_shufflelo_epi16(halves, 0xd8), 0xd8);
#else
    const uint64_t found = (uint64_t)vget_lane_u64((uint64x1_t)vtbl1_u8(
        (uint8x8_t)vmovn_s32((int32x4_t)p), (uint8x8_t)vcreate_u8(0x0706030205040100)), 0);
#endif
    if (left >= LANES)
        std::memcpy(to, &found, sizeof found);
    else
        std::memcpy(to, &found, left * 2);
}

// A group's t, and one over it; of a group that counts as zeros the latter is zero.
struct GroupStep {
    float step, per_step;
};

template <class T>
static inline GroupStep find_step(const typename T::Element* x, int64_t count, bool two) {
    const float most = largest_size<T>(x, count);
    if (!std::isfinite(most)) return {NAN, 0};
    if (most < LEAST_OF_GROUP) return {0, 0};
    if (!two) return {most / 127.0f, 127.0f / most};
    int32_t bits;
    std::memcpy(&bits, &most, 4);
    const int exponent = (bits >> 23) - 126;  // of a number from a half to one
    return {power_of_two(exponent - 13), power_of_two(13 - exponent)};
}

// One group: `words` of its units, its step, its sums; returns t times the sum of p. low: words from h to l, or 0 where
// they are in turn.
template <class T>
static inline float group_to_digits(const typename T::Element* x, int64_t count, int64_t padded, int digits, int64_t low,
                                    int32_t* words, float* step, int32_t* sums) {
    const bool two = digits == 2;
    for (int d = 0; d < digits; d++) sums[d] = 0;
    const GroupStep found = find_step<T>(x, count, two);
    *step = found.step;
    if (!found.per_step) {
        for (int d = 0; d < (low ? digits : 1); d++)
            std::fill_n(words + d * low, padded / 4 * (low ? 1 : digits), 0);
        return *step;
    }
    const floats per_step = broadcast(found.per_step);
    ints high = {}, lower = {};
    for (int64_t k = 0; k < padded; k += LANES) {
        const int here = (int)std::min<int64_t>(LANES, count - k);
        const ints p = here > 0 ? nearest_integers(read_some<T>(x + k, here), per_step) : ints{};
        const ints h = two ? (p + 64) >> 7 : p;  // to nearest: both digits are at most 64
        const ints l = p - 128 * h;
        high += h;
        lower += l;
        if (two && !low) {
            put_in_turn(words + k / 2, h, l, padded - k);
            continue;
        }
        put_digits(words + k / 4, h, padded - k);
        if (two) put_digits(words + low + k / 4, l, padded - k);
    }
    sums[0] = sum(high);
    if (!two) return *step * (float)sums[0];
    sums[1] = sum(lower);
    return *step * std::fma((float)sums[0], 128.0f, (float)sums[1]);
}

// Whether a step is 2^e with |e| <= STEP_EXPONENTS, if it is a power of two.
static inline bool is_usual(float step) { return step >= 0x1p-60f && step <= 0x1p60f; }

// The same of p as they are: the sum of a group is below 2^24. A group of zeros has a step of one.
template <class T>
static inline float group_to_whole(const typename T::Element* x, int64_t count, int64_t padded, int32_t* words,
                                   float* step, int32_t* total) {
    const GroupStep found = find_step<T>(x, count, true);
    *step = found.step == 0 ? 1.0f : found.step;
    *total = 0;
    if (!found.per_step) {
        std::fill_n(words, padded / 2, 0);
        return found.step;
    }
    ints all = {};
    for (int64_t k = 0; k < padded; k += LANES) {
        const int here = (int)std::min<int64_t>(LANES, count - k);
        const ints p = here > 0 ? nearest_integers(read_some<T>(x + k, here), broadcast(found.per_step)) : ints{};
        all += p;
        put_whole(words + k / 2, p, padded - k);
    }
    *total = sum(all);
    return *step * (float)*total;
}

template <class T>
static void digit_tile(void* context, int tile) {
    const auto& call = *(const DigitCall<T>*)context;
    const InputGroups& groups = *call.groups;
    const int64_t low = call.layout == APART && call.digits == 2 ? call.words_each / 2 : 0;
    static thread_local std::vector<typename T::Element> ordered;
    if (call.order) ordered.resize(groups.inputs);
    const int64_t last = std::min(call.rows, (tile + 1) * call.rows_each);
    bool rough = false;
    for (int64_t r = tile * call.rows_each; r < last; r++) {
        const auto* x = call.x + r * call.x_stride;
        if (call.order) {
            for (int64_t k = 0; k < groups.inputs; k++) ordered[k] = x[call.order[k]];
            x = ordered.data();
        }
        int32_t* words = call.words + r * call.words_each;
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t place = g * call.rows + r, padded = groups.units(g) * groups.unit;
            const auto* from = x + g * groups.group;
            float* step = call.steps + place;
            if (call.layout == WHOLE) {
                int32_t* total = call.sums + place;
                call.shifts[place] = group_to_whole<T>(from, groups.size(g), padded, words, step, total);
                *total *= call.times;
                rough |= !is_usual(*step);
                words += padded / 2;
                continue;
            }
            int32_t* sums = call.sums + place * call.digits;
            call.shifts[place] =
                group_to_digits<T>(from, groups.size(g), padded, call.digits, low, words, step, sums);
            for (int d = 0; d < call.digits; d++) sums[d] *= call.times;
            words += padded / 4 * (low ? 1 : call.digits);
        }
    }
    if (rough) call.rough->store(true, std::memory_order_relaxed);
}

// The result is the calling thread's until its next call. layout: IN_TURN where there is one digit.
template <class T>
static DigitRows to_digits(Pool& pool, const typename T::Element* x, int64_t x_stride, int64_t rows,
                           const InputGroups& groups, const int32_t* order, int digits, int times, WordLayout layout) {
    constexpr int64_t TILE_BYTES = 64 << 10;  // of work for a thread
    static thread_local Lines<int32_t> words;
    static thread_local std::vector<float> steps, shifts;
    static thread_local std::vector<int32_t> sums;
    const int64_t each = groups.all_units() * groups.unit / 4 * digits;
    std::atomic<bool> rough{false};
    DigitCall<T> call{x, x_stride, rows, std::max<int64_t>(1, TILE_BYTES / 4 / groups.inputs), &groups, order, digits, times, layout,
                      words.fit(rows * each), nullptr, nullptr, nullptr, each, &rough};
    steps.resize(std::max<size_t>(steps.size(), rows * groups.count));
    shifts.resize(steps.size());
    sums.resize(steps.size() * 2);
    call.steps = steps.data();
    call.shifts = shifts.data();
    call.sums = sums.data();
    pool.run((int)((rows + call.rows_each - 1) / call.rows_each), digit_tile<T>, &call);
    return {call.words, call.steps, call.shifts, call.sums, each, rows, layout == WHOLE && !rough};
}

}  // namespace tessera
