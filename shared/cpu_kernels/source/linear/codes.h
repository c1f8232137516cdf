// Weights that are codes: what they mean, how they lie, and y = x w^T + b of them in whole numbers.
//
// Let S be the sum over a group of inputs of (code - zero) p, p as in `digits.h`. An output is, groups ascending,
//
//   y = fma(float(S), scale step, y);  with minima then  y = fma(minimum, shift, y)
//
// from zero, where shift is the step times the sum of p, and codes count as they are with minima. float(S) of two digits
// is fma(float(S_h), 128, float(S_l)): exact up to groups of 2,048. Sums of whole numbers are exact, so that neither the
// instruction set nor how rows are grouped changes a bit of y; what follows (`finish`) is as for all weights.
//
// Panels (`linear.h`) hold codes in units, of each column so many words of 32 bits: four codes of 8 bits; eight of 4, of
// which the first four inputs are the lower halves of the bytes; or 32 of 5 bits and 16 of 6, of which the first word has
// the upper one or two bits, in each of its bytes those of every fourth input, and the others the lower four bits as
// eight of 4 bits have them. A group begins with a unit. Scales, zeros and minima lie beside them, one of each for a
// group and a panel's columns; of two levels one for a run of groups, and for each group a factor (K-quants).
#pragma once

#include "../arithmetic/bytes.h"
#include "../arithmetic/digits.h"
#include "linear.h"

namespace tessera {

// Codes of 8 bits, of 4 bits, of 4 bits that number the entries of a table, of 5 and of 6 bits.
enum CodeFormat { BYTES = 0, NIBBLES = 1, TABLE = 2, FIVES = 3, SIXES = 4 };
enum ScaleType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Quantized {
    const void* scales;     // [panels, runs, PANEL] of a `ScaleType`; a run: 2^run_shift groups, the last one may have fewer
    const void* minima;     // the same, or null
    const int8_t* factors;  // [panels, groups, PANEL]: of the scales, or null
    const int8_t* minimum_factors;  // the same of the minima
    const uint8_t* zeros;   // the same in bytes, or null: `zero` is that of all
    const int32_t* order;   // which input each column belongs to, or null: they are as they are
    int64_t group;          // inputs of a scale, the last group may have fewer; 0: all of them
    int32_t format, scale_type, digits, zero, run_shift;
    uint8_t table[16];  // for TABLE: signed numbers, ZERO_BYTE more than they are
};

// Of a unit: words of 32 bits that are stored of each column, and words of four bytes that they become.
constexpr int stored_words(int format) { return format == FIVES ? 5 : format == SIXES ? 3 : 1; }
constexpr int byte_words(int format) { return format == BYTES ? 1 : format == FIVES ? 8 : format == SIXES ? 4 : 2; }

static inline InputGroups input_groups(const Linear& layer) {
    return {layer.inputs, layer.quantized->group, 4 * byte_words(layer.quantized->format)};
}

// Words of a panel.
static inline int64_t panel_words(const InputGroups& groups, int format) {
    return groups.all_units() * stored_words(format) * PANEL;
}

struct CodeCall {
    LinearCall linear;
    DigitRows rows;
    const InputGroups* groups;
};

// How a unit's codes become bytes.
template <int FORMAT>
struct CodeUnit {
    static constexpr int STORED = stored_words(FORMAT), WORDS = byte_words(FORMAT);
    static constexpr int LARGEST = FORMAT == NIBBLES ? 15 : FORMAT == FIVES ? 31 : FORMAT == SIXES ? 63 : 255;

    explicit CodeUnit(const Quantized& q) {
        if (FORMAT != TABLE) return;
        for (int i = 0; i < LANES; i++) {
            int32_t word;
            std::memcpy(&word, q.table + i % 4 * 4, 4);
            table_[i] = word;
        }
    }

    // Of LANES columns of a unit.
    inline ints bytes(const int32_t* unit, int word) const {
        if (FORMAT == BYTES) return load<ints>(unit);
        const ints halves = load<ints>(unit + (STORED > 1 ? 1 + word / 2 : 0) * PANEL);
        const ints low = word % 2 ? shifted_right(halves, 4) : halves;
        if (FORMAT == NIBBLES) return low & broadcast_int(0x0f0f0f0f);
        if (FORMAT == TABLE) return look_up(low & broadcast_int(0x0f0f0f0f));
        const ints upper = load<ints>(unit);
        const int up = 4 - (FORMAT == FIVES ? 1 : 2) * word;
        const ints high = (up > 0 ? upper << up : shifted_right(upper, -up)) &
                          broadcast_int(FORMAT == FIVES ? 0x10101010 : 0x30303030);
#if defined(__AVX512F__)
        const auto mask = (__m512i)broadcast_int(0x0f0f0f0f);
        return (ints)_mm512_ternarylogic_epi32((__m512i)low, mask, (__m512i)high, 0xea);  // low & mask | high
#else
        return (low & broadcast_int(0x0f0f0f0f)) | high;
#endif
    }

private:
    typedef uint32_t uints __attribute__((vector_size(4 * LANES)));

    static inline ints shifted_right(ints words, int by) { return (ints)((uints)words >> by); }

    inline ints look_up(ints codes) const {
#if defined(__AVX512BW__)
        return (ints)_mm512_shuffle_epi8((__m512i)table_, (__m512i)codes);
#elif defined(__AVX2__)
        return (ints)_mm256_shuffle_epi8((__m256i)table_, (__m256i)codes);
#else
        return (ints)vqtbl1q_u8((uint8x16_t)table_, (uint8x16_t)codes);
#endif
    }

    ints table_ = {};
};

template <int FORMAT, int DIGITS>
using CodeDots = ByteDots<CodeUnit<FORMAT>::LARGEST, DIGITS == 1 ? 127 : 64>;

// Inputs of a group whose sum of both digits, 255 times 2^13 of each at the most, is one of 32 bits.
constexpr int64_t MOST_IN_WORDS = 1024;

// Of LANES columns: numbers of a `ScaleType` at `place`, times their factors where they have any.
static inline floats read_scales(const Quantized& q, const void* from, int64_t place, const int8_t* factors) {
    floats scales;
    if (q.scale_type == FLOAT32) {
        scales = load<floats>((const float*)from + place);
    } else {
        const auto v = load<halves>((const uint16_t*)from + place);
        scales = q.scale_type == BFLOAT16 ? from_bfloat16(v) : from_float16(v);
    }
    return factors ? scales * __builtin_convertvector(load_signed_bytes(factors), floats) : scales;
}

static inline ints read_zeros(const uint8_t* from) {
    ints zeros;
    for (int i = 0; i < LANES; i++) zeros[i] = from[i];
    return zeros;
}

// The whole numbers of one digit or two, rounded once.
template <int DIGITS>
static inline floats sum_of_digits(ints high, ints low) {
    if (DIGITS == 1) return __builtin_convertvector(high, floats);
    return fused(__builtin_convertvector(high, floats), broadcast(128.0f), __builtin_convertvector(low, floats));
}

}  // namespace tessera
