// y = x w^T + b of weights that are codes, in whole numbers.
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

#include "bytes.h"
#include "digits.h"
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

// Rows whose sums stay in registers: with two digits four vectors of each.
template <int FORMAT, int DIGITS>
constexpr int CODE_ROWS = TILE_ROWS < 12 ? 4 - DIGITS : (FORMAT == BYTES ? 10 : 8) - 2 * DIGITS;

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

// Adds the products of COUNT units with R rows, to CHAINS sums in turn.
template <int FORMAT, int DIGITS, int R, int COUNT, int CHAINS>
static inline void add_units(const CodeUnit<FORMAT>& unit, const int32_t* w, const int32_t* x, int64_t stride,
                             ints (&sums)[CHAINS][R][DIGITS][2]) {
    typedef CodeDots<FORMAT, DIGITS> Dots;
    typedef CodeUnit<FORMAT> Unit;
    for (int word = 0; word < COUNT * Unit::STORED * PANEL; word += 16) __builtin_prefetch(w + AHEAD_WORDS + word);
#pragma GCC unroll 8
    for (int word = 0; word < COUNT * Unit::WORDS; word++) {
        const int32_t* from = w + word / Unit::WORDS * Unit::STORED * PANEL;
        const auto a = Dots::prepare(unit.bytes(from, word % Unit::WORDS));
        const auto b = Dots::prepare(unit.bytes(from + LANES, word % Unit::WORDS));
        auto& acc = sums[word % CHAINS];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; d++) {
                const int32_t digits = x[r * stride + word * DIGITS + d];
                acc[r][d][0] = Dots::dot(acc[r][d][0], a, digits);
                acc[r][d][1] = Dots::dot(acc[r][d][1], b, digits);
            }
    }
}

// The whole numbers of one digit or two, rounded once.
template <int DIGITS>
static inline floats sum_of_digits(ints high, ints low) {
    if (DIGITS == 1) return __builtin_convertvector(high, floats);
    return fused(__builtin_convertvector(high, floats), broadcast(128.0f), __builtin_convertvector(low, floats));
}

// The sums [R][2] of rows [row, row + R) and one panel, whose codes `w` are.
template <int FORMAT, int DIGITS, int R>
static inline void multiply_codes(const CodeCall& call, int64_t panel, const int32_t* w, int64_t row, floats* y) {
    typedef CodeDots<FORMAT, DIGITS> Dots;
    typedef CodeUnit<FORMAT> Unit;
    // Of few rows, sums of every other word: each instruction waits for the last one of its sum.
    constexpr int CHAINS = R == 1 ? 2 : 1, COUNT = Unit::WORDS < CHAINS ? CHAINS : 1;
    const Quantized& q = *call.linear.layer->quantized;
    const InputGroups& groups = *call.groups;
    const DigitRows& rows = call.rows;
    const Unit unit(q);
    const bool in_words = groups.group <= MOST_IN_WORDS;
    const int32_t* x = rows.words + row * rows.words_each;
    const int64_t stride = rows.words_each, count = groups.count;
    const int64_t units = groups.units(0), last_units = groups.units(count - 1);
    const int64_t first_run = panel * (((count - 1) >> q.run_shift) + 1);
    for (int i = 0; i < 2 * R; i++) y[i] = floats{};
    for (int64_t g = 0; g < count; g++) {
        const int64_t first = (panel * count + g) * PANEL, run = (first_run + (g >> q.run_shift)) * PANEL;
        const int64_t place = g * rows.count + row;
        const int32_t* starts = rows.sums + place * DIGITS;
        ints sums[CHAINS][R][DIGITS][2] = {};
        auto& acc = sums[0];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; d++) acc[r][d][0] = acc[r][d][1] = broadcast_int(starts[r * DIGITS + d]);
        if (q.zeros)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                const ints zeros = Dots::TAKEN_OFF - read_zeros(q.zeros + first + side * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int d = 0; d < DIGITS; d++) acc[r][d][side] *= zeros;
            }
        int64_t left = g + 1 < count ? units : last_units;
        for (; left >= COUNT; left -= COUNT) {
            add_units<FORMAT, DIGITS, R, COUNT>(unit, w, x, stride, sums);
            w += COUNT * Unit::STORED * PANEL;
            x += COUNT * Unit::WORDS * DIGITS;
        }
        if (COUNT > 1 && left) {
            add_units<FORMAT, DIGITS, R, 1>(unit, w, x, stride, sums);
            w += Unit::STORED * PANEL;
            x += Unit::WORDS * DIGITS;
        }
        if (CHAINS > 1)
            for (int i = 0; i < DIGITS * 2; i++) acc[0][i / 2][i % 2] += sums[CHAINS - 1][0][i / 2][i % 2];
        const float *steps = rows.steps + place, *shifts = rows.shifts + place;
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const int8_t* factors = q.factors ? q.factors + first + side * LANES : nullptr;
            const floats scales = read_scales(q, q.scales, run + side * LANES, factors);
            floats whole[R];
            if (DIGITS == 1 || !in_words)
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) whole[r] = sum_of_digits<DIGITS>(acc[r][0][side], acc[r][DIGITS - 1][side]);
            else
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    whole[r] = __builtin_convertvector((acc[r][0][side] << 7) + acc[r][DIGITS - 1][side], floats);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
                y[2 * r + side] = fused(whole[r], scales * broadcast(steps[r]), y[2 * r + side]);
            if (!q.minima) continue;
            factors = q.minimum_factors ? q.minimum_factors + first + side * LANES : nullptr;
            const floats minima = read_scales(q, q.minima, run + side * LANES, factors);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
                y[2 * r + side] = fused(minima, broadcast(shifts[r]), y[2 * r + side]);
        }
    }
}

template <int FORMAT, int DIGITS, int R>
static inline void multiply_some_codes(const CodeCall& call, int64_t panel, const int32_t* w, int64_t row, int rows,
                                       floats* y) {
    if constexpr (R > 0) {
        if (rows == R) return multiply_codes<FORMAT, DIGITS, R>(call, panel, w, row, y);
        multiply_some_codes<FORMAT, DIGITS, R - 1>(call, panel, w, row, rows, y);
    }
}

struct CodeKernel {
    void (*multiply)(const CodeCall& call, int64_t panel, const int32_t* w, int64_t row, int rows, floats* y);
    int most_rows, taken_off;
};

template <int FORMAT, int DIGITS>
static CodeKernel code_kernel() {
    constexpr int MOST = CODE_ROWS<FORMAT, DIGITS>;
    return {multiply_some_codes<FORMAT, DIGITS, MOST>, MOST, CodeDots<FORMAT, DIGITS>::TAKEN_OFF};
}

static inline CodeKernel find_code_kernel(const Quantized& q) {
    switch (2 * q.format + q.digits) {
        case 2 * BYTES + 1: return code_kernel<BYTES, 1>();
        case 2 * BYTES + 2: return code_kernel<BYTES, 2>();
        case 2 * NIBBLES + 1: return code_kernel<NIBBLES, 1>();
        case 2 * NIBBLES + 2: return code_kernel<NIBBLES, 2>();
        case 2 * TABLE + 1: return code_kernel<TABLE, 1>();
        case 2 * TABLE + 2: return code_kernel<TABLE, 2>();
        case 2 * FIVES + 1: return code_kernel<FIVES, 1>();
        case 2 * FIVES + 2: return code_kernel<FIVES, 2>();
        case 2 * SIXES + 1: return code_kernel<SIXES, 1>();
        default: return code_kernel<SIXES, 2>();
    }
}

template <class T>
static void code_tile(void* context, int tile) {
    const auto& call = *(const CodeCall*)context;
    const LinearCall& linear = call.linear;
    if (takes_inputs<T>(linear, tile)) return;
    const CodeKernel kernel = find_code_kernel(*linear.layer->quantized);
    const int64_t words = panel_words(*call.groups, linear.layer->quantized->format);
    const int64_t first = tile * linear.panels_each;
    const int64_t last = std::min(linear.panels, first + linear.panels_each);
    const int64_t groups = (linear.rows + kernel.most_rows - 1) / kernel.most_rows;
    Running* best = begin_largest(linear);
    floats y[2 * TILE_ROWS];
    for_panels<T>(linear, first, last, [&](int64_t panel, const floats* added) {
        const int32_t* w = linear.layer->panels + panel * words;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = linear.rows * group / groups, end = linear.rows * (group + 1) / groups;
            kernel.multiply(call, panel, w, row, (int)(end - row), y);
            for (int64_t r = row; r < end; r++) {
                floats left = y[2 * (r - row)], right = y[2 * (r - row) + 1];
                if (added) {
                    left = left + added[2 * r];
                    right = right + added[2 * r + 1];
                }
                finish<T>(linear, panel, r, left, right, best);
            }
        }
    });
    end_largest(linear, tile, best);
}

// additions: of adapters, or null.
template <class T>
static void quantized_linear(Pool& pool, const Linear& layer, const typename T::Element* x, int64_t x_stride, void* y,
                             int64_t y_stride, int64_t rows, const Additions* additions = nullptr) {
    if (rows == 0) return;
    const Quantized& q = *layer.quantized;
    const InputGroups groups = input_groups(layer);
    CodeCall call{{&layer, nullptr, 0, y, y_stride, rows}, {}, &groups};
    Added added;
    InputCall inputs;
    if (additions) {
        inputs = plan_inputs<T>(*additions, x, x_stride, added);
        call.linear.added = &added;
        call.linear.added_inputs = &inputs;
    }
    // Of zeros that differ by output each row's sums as they are; else what one zero makes of them.
    const int times = q.zeros ? 1 : find_code_kernel(q).taken_off - q.zero;
    call.rows = to_digits<T>(pool, x, x_stride, rows, groups, q.order, q.digits, times);
    run_panels(pool, call.linear, panel_words(groups, q.format) * 4, code_tile<T>, &call);
}

struct CodePack {
    const uint8_t* codes;
    int64_t outputs;
    InputGroups groups;
    int bits, format, epilogue;
    int32_t* units;
};

static void pack_code_panel(void* context, int panel) {
    const auto& call = *(const CodePack*)context;
    const InputGroups& groups = call.groups;
    const bool nibbles = call.bits == 4;
    const int64_t row_bytes = nibbles ? groups.inputs / 2 : groups.inputs;
    const int stored = stored_words(call.format), upper_bits = call.bits - 4;
    for (int c = 0; c < PANEL; c++) {
        const int64_t row = row_of_column(call.outputs, call.epilogue, panel, c);
        int32_t* to = call.units + panel * panel_words(groups, call.format) + c;
        const uint8_t* from = call.codes + row * row_bytes;
        const auto code = [&](int64_t k) -> uint32_t { return nibbles ? from[k / 2] >> k % 2 * 4 & 15 : from[k]; };
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t first = g * groups.group, size = groups.size(g);
            for (int64_t k = 0; k < size; k += groups.unit) {
                uint32_t unit[5] = {};
                const int64_t count = row < 0 ? 0 : std::min(groups.unit, size - k);
                for (int64_t i = 0; i < count; i++) {
                    const uint32_t found = code(first + k + i);
                    const int64_t word = i / 4, byte = i % 4 * 8;
                    if (stored == 1) {
                        unit[0] |= found << (byte + word * 4);
                    } else {
                        unit[0] |= found >> 4 << (byte + word * upper_bits);
                        unit[1 + word / 2] |= (found & 15) << (byte + word % 2 * 4);
                    }
                }
                for (int s = 0; s < stored; s++, to += PANEL) std::memcpy(to, unit + s, 4);
            }
        }
    }
}

// Packs codes [outputs, inputs] of 8, 6 or 5 bits, one a byte, or of 4, two a byte, the even one in the lower half. For
// SWIGLU the rows are `outputs` gates followed by what they gate.
static inline void pack_codes(Pool& pool, const uint8_t* codes, int64_t outputs, int64_t inputs, int bits, int64_t group,
                              int epilogue, int32_t* units) {
    const int format = bits == 8 ? BYTES : bits == 6 ? SIXES : bits == 5 ? FIVES : NIBBLES;
    CodePack call{codes, outputs, {inputs, group, 4 * byte_words(format)}, bits, format, epilogue, units};
    const int64_t width = epilogue == SWIGLU ? LANES : PANEL;
    pool.run((int)((outputs + width - 1) / width), pack_code_panel, &call);
}

}  // namespace tessera
