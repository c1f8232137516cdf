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
// Panels (`linear.h`) hold codes in units of 32 bits: four of 8 bits, or eight of 4, of which the first four inputs are
// the lower halves of the bytes. A group begins with a unit. Scales, zeros and minima lie beside them, one of each for
// a group and a panel's columns.
#pragma once

#include "bytes.h"
#include "digits.h"
#include "linear.h"

namespace tessera {

// Codes of 8 bits, of 4 bits, and of 4 bits that number the entries of a table.
enum CodeFormat { BYTES = 0, NIBBLES = 1, TABLE = 2 };
enum ScaleType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Quantized {
    const void* scales;    // [panels, groups, PANEL] of a `ScaleType`
    const void* minima;    // the same, or null
    const uint8_t* zeros;  // the same in bytes, or null: `zero` is that of all
    const int32_t* order;  // which input each column belongs to, or null: they are as they are
    int64_t group;         // inputs of a scale, the last group may have fewer; 0: all of them
    int32_t format, scale_type, digits, zero;
    uint8_t table[16];  // for TABLE: signed numbers, ZERO_BYTE more than they are
};

static inline InputGroups input_groups(const Linear& layer) {
    return {layer.inputs, layer.quantized->group, layer.quantized->format == BYTES ? 4 : 8};
}

struct CodeCall {
    LinearCall linear;
    DigitRows rows;
    const InputGroups* groups;
};

// How a unit's codes become bytes, and how many words of digits they meet.
template <int FORMAT>
struct CodeUnit {
    static constexpr int WORDS = FORMAT == BYTES ? 1 : 2;
    static constexpr int LARGEST = FORMAT == NIBBLES ? 15 : 255;

    explicit CodeUnit(const Quantized& q) {
        if (FORMAT != TABLE) return;
        for (int i = 0; i < LANES; i++) {
            int32_t word;
            std::memcpy(&word, q.table + i % 4 * 4, 4);
            table_[i] = word;
        }
    }

    inline ints bytes(ints unit, int word) const {
        if (FORMAT == BYTES) return unit;
        const ints codes = (word ? (ints)((uints)unit >> 4) : unit) & broadcast_int(0x0f0f0f0f);
        return FORMAT == TABLE ? look_up(codes) : codes;
    }

private:
    typedef uint32_t uints __attribute__((vector_size(4 * LANES)));

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

static inline floats read_scales(const Quantized& q, const void* from, int64_t place) {
    if (q.scale_type == FLOAT32) return load<floats>((const float*)from + place);
    const auto v = load<halves>((const uint16_t*)from + place);
    return q.scale_type == BFLOAT16 ? from_bfloat16(v) : from_float16(v);
}

static inline ints read_zeros(const uint8_t* from) {
    ints zeros;
    for (int i = 0; i < LANES; i++) zeros[i] = from[i];
    return zeros;
}

// Adds the products of one unit with R rows.
template <int FORMAT, int DIGITS, int R>
static inline void add_unit(const CodeUnit<FORMAT>& unit, const int32_t* w, const int32_t* x, int64_t stride,
                            ints (&acc)[R][DIGITS][2]) {
    typedef CodeDots<FORMAT, DIGITS> Dots;
    for (int word = 0; word < PANEL; word += 16) __builtin_prefetch(w + AHEAD_WORDS + word);
    const ints left = load<ints>(w), right = load<ints>(w + LANES);
#pragma GCC unroll 2
    for (int word = 0; word < unit.WORDS; word++) {
        const auto a = Dots::prepare(unit.bytes(left, word)), b = Dots::prepare(unit.bytes(right, word));
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

// The sums [R][2] of rows [row, row + R) and one panel.
template <int FORMAT, int DIGITS, int R>
static inline void multiply_codes(const CodeCall& call, int64_t panel, int64_t row, floats* y) {
    typedef CodeDots<FORMAT, DIGITS> Dots;
    // Of few rows, sums of every other unit: each instruction waits for the last one of its sum.
    constexpr int CHAINS = R == 1 ? 2 : 1, STEP_WORDS = CodeUnit<FORMAT>::WORDS * DIGITS;
    const Quantized& q = *call.linear.layer->quantized;
    const InputGroups& groups = *call.groups;
    const DigitRows& rows = call.rows;
    const CodeUnit<FORMAT> unit(q);
    const int32_t* w = call.linear.layer->panels + panel * groups.all_units() * PANEL;
    const int32_t* x = rows.words + row * rows.words_each;
    const int64_t stride = rows.words_each;
    for (int i = 0; i < 2 * R; i++) y[i] = floats{};
    for (int64_t g = 0; g < groups.count; g++) {
        const int64_t first = (panel * groups.count + g) * PANEL;
        ints sums[CHAINS][R][DIGITS][2] = {};
        auto& acc = sums[0];
        ints zeros[2];
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++)
            zeros[side] = Dots::TAKEN_OFF - (q.zeros ? read_zeros(q.zeros + first + side * LANES) : broadcast_int(q.zero));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; d++)
#pragma GCC unroll 2
                for (int side = 0; side < 2; side++)
                    acc[r][d][side] = zeros[side] * rows.sums[((row + r) * groups.count + g) * DIGITS + d];
        int64_t left = groups.units(g);
        for (; left >= CHAINS; left -= CHAINS, w += CHAINS * PANEL, x += CHAINS * STEP_WORDS)
#pragma GCC unroll 2
            for (int chain = 0; chain < CHAINS; chain++)
                add_unit<FORMAT, DIGITS, R>(unit, w + chain * PANEL, x + chain * STEP_WORDS, stride, sums[chain]);
        for (; left > 0; left--, w += PANEL, x += STEP_WORDS) add_unit<FORMAT, DIGITS, R>(unit, w, x, stride, acc);
        if (CHAINS > 1)
            for (int i = 0; i < DIGITS * 2; i++) acc[0][i / 2][i % 2] += sums[CHAINS - 1][0][i / 2][i % 2];
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const floats scales = read_scales(q, q.scales, first + side * LANES);
            const floats minima = q.minima ? read_scales(q, q.minima, first + side * LANES) : floats{};
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int64_t place = (row + r) * groups.count + g;
                floats sum = __builtin_convertvector(acc[r][0][side], floats);
                if (DIGITS == 2)
                    sum = fused_always(sum, broadcast(128.0f), __builtin_convertvector(acc[r][DIGITS - 1][side], floats));
                floats& to = y[2 * r + side];
                to = fused_always(sum, scales * broadcast(rows.steps[place]), to);
                if (q.minima) to = fused_always(minima, broadcast(rows.shifts[place]), to);
            }
        }
    }
}

template <int FORMAT, int DIGITS, int R>
static inline void multiply_some_codes(const CodeCall& call, int64_t panel, int64_t row, int rows, floats* y) {
    if constexpr (R > 0) {
        if (rows == R) return multiply_codes<FORMAT, DIGITS, R>(call, panel, row, y);
        multiply_some_codes<FORMAT, DIGITS, R - 1>(call, panel, row, rows, y);
    }
}

typedef void (*MultiplyCodes)(const CodeCall& call, int64_t panel, int64_t row, int rows, floats* y);

struct CodeKernel {
    MultiplyCodes multiply;
    int most_rows;
};

template <int FORMAT, int DIGITS>
static CodeKernel code_kernel() {
    constexpr int MOST = CODE_ROWS<FORMAT, DIGITS>;
    return {multiply_some_codes<FORMAT, DIGITS, MOST>, MOST};
}

static inline CodeKernel find_code_kernel(const Quantized& q) {
    const bool two = q.digits == 2;
    switch (q.format) {
        case BYTES: return two ? code_kernel<BYTES, 2>() : code_kernel<BYTES, 1>();
        case NIBBLES: return two ? code_kernel<NIBBLES, 2>() : code_kernel<NIBBLES, 1>();
        default: return two ? code_kernel<TABLE, 2>() : code_kernel<TABLE, 1>();
    }
}

template <class T>
static void code_tile(void* context, int tile) {
    const auto& call = *(const CodeCall*)context;
    const LinearCall& linear = call.linear;
    if (takes_inputs<T>(linear, tile)) return;
    const CodeKernel kernel = find_code_kernel(*linear.layer->quantized);
    const int64_t first = tile * linear.panels_each;
    const int64_t last = std::min(linear.panels, first + linear.panels_each);
    const int64_t groups = (linear.rows + kernel.most_rows - 1) / kernel.most_rows;
    Running* best = begin_largest(linear);
    floats y[2 * TILE_ROWS];
    for_panels<T>(linear, first, last, [&](int64_t panel, const floats* added) {
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = linear.rows * group / groups, end = linear.rows * (group + 1) / groups;
            kernel.multiply(call, panel, row, (int)(end - row), y);
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
    call.rows = to_digits<T>(pool, x, x_stride, rows, groups, q.order, q.digits);
    run_panels(pool, call.linear, groups.all_units() * PANEL * 4, code_tile<T>, &call);
}

struct CodePack {
    const uint8_t* codes;
    int64_t outputs;
    InputGroups groups;
    int bits, epilogue;
    uint8_t* units;
};

static void pack_code_panel(void* context, int panel) {
    const auto& call = *(const CodePack*)context;
    const InputGroups& groups = call.groups;
    const int64_t row_bytes = call.bits == 8 ? groups.inputs : groups.inputs / 2;
    uint8_t* const start = call.units + panel * groups.all_units() * PANEL * 4;
    for (int c = 0; c < PANEL; c++) {
        const int64_t row = row_of_column(call.outputs, call.epilogue, panel, c);
        uint8_t* to = start + 4 * c;
        const uint8_t* from = call.codes + row * row_bytes;
        const auto code = [&](int64_t k) { return call.bits == 8 ? from[k] : from[k / 2] >> k % 2 * 4 & 15; };
        for (int64_t g = 0; g < groups.count; g++) {
            const int64_t first = g * groups.group, size = groups.size(g);
            for (int64_t k = 0; k < size; k += groups.unit, to += 4 * PANEL) {
                uint8_t unit[4] = {};
                const int64_t count = row < 0 ? 0 : std::min(groups.unit, size - k);
                for (int64_t i = 0; i < count; i++) unit[i % 4] |= code(first + k + i) << i / 4 * 4;
                std::memcpy(to, unit, 4);
            }
        }
    }
}

// Packs codes [outputs, inputs] of 8 bits, or two a byte, the even one in the lower half. For SWIGLU the rows are
// `outputs` gates followed by what they gate.
static inline void pack_codes(Pool& pool, const uint8_t* codes, int64_t outputs, int64_t inputs, int bits, int64_t group,
                              int epilogue, uint8_t* units) {
    CodePack call{codes, outputs, {inputs, group, bits == 8 ? 4 : 8}, bits, epilogue, units};
    const int64_t width = epilogue == SWIGLU ? LANES : PANEL;
    pool.run((int)((outputs + width - 1) / width), pack_code_panel, &call);
}

}  // namespace tessera
