// y = x w^T + b of weights that are codes (`codes.h`), by vectors or by tiles (`tile_quantized.h`): the bits are the same.
#pragma once

#include "codes.h"
#include "tile_quantized.h"
#include "whole_products.h"

namespace tessera {

// Rows whose sums stay in registers: with two digits four vectors of each.
template <int FORMAT, int DIGITS>
constexpr int CODE_ROWS = TILE_ROWS < 12 ? 4 - DIGITS : (FORMAT == BYTES ? 10 : 8) - 2 * DIGITS;

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

// Places [first, last) of the panels for all rows.
template <class T>
static void multiply_codes_by_vectors(const CodeCall& call, int64_t first, int64_t last, Running* best) {
    const LinearCall& linear = call.linear;
    const Quantized& q = *linear.layer->quantized;
    const CodeKernel kernel = find_code_kernel(q);
    const bool whole = takes_whole(*call.groups, q, linear.rows);
    const WholeKernel whole_kernel = find_whole_kernel(q);
    const int64_t words = panel_words(*call.groups, q.format);
    const int64_t groups = (linear.rows + kernel.most_rows - 1) / kernel.most_rows;
    floats y[2 * TILE_ROWS];
    for_panels<T>(linear, first, last, [&](int64_t panel, const floats* added) {
        const int32_t* w = linear.layer->panels + panel * words;
        const auto finish_row = [&](int64_t r, floats left, floats right) {
            if (added) {
                left = left + added[2 * r];
                right = right + added[2 * r + 1];
            }
            finish<T>(linear, panel, r, left, right, best);
        };
        if (whole) return multiply_panel_whole(call, whole_kernel, panel, w, finish_row);
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = linear.rows * group / groups, end = linear.rows * (group + 1) / groups;
            kernel.multiply(call, panel, w, row, (int)(end - row), y);
            for (int64_t r = row; r < end; r++) finish_row(r, y[2 * (r - row)], y[2 * (r - row) + 1]);
        }
    });
}

template <class T>
static void code_tile(void* context, int tile) {
    const auto& call = *(const CodeCall*)context;
    const LinearCall& linear = call.linear;
    if (takes_inputs<T>(linear, tile)) return;
    const int64_t each = linear.panels_each, tiles = (linear.panels + each - 1) / each;
    const int64_t first = tile % tiles * each, last = std::min(linear.panels, first + each);
    Running* best = begin_largest(linear);
    if (linear.by_tiles)
        multiply_codes_by_tiles<T>(call, first, last, tile / tiles, best);
    else
        multiply_codes_by_vectors<T>(call, first, last, best);
    end_largest(linear, tile, best);
}

// additions: of adapters, or null.
template <class T>
static void multiply_coded(Pool& pool, const Linear& layer, const typename T::Element* x, int64_t x_stride, void* y,
                           int64_t y_stride, int64_t rows, const Additions* additions, bool by_tiles) {
    const Quantized& q = *layer.quantized;
    const InputGroups groups = input_groups(layer);
    CodeCall call{{&layer, nullptr, 0, y, y_stride, rows}, {}, &groups};
    Added added;
    InputCall inputs;
    if (additions) {
        inputs = plan_inputs<T>(pool, *additions, x, x_stride, added);
        call.linear.added = &added;
        call.linear.added_inputs = &inputs;
    }
    call.linear.by_tiles = by_tiles;
    // Of zeros that differ by output each row's sums as they are; else what one zero makes of them.
    const bool whole = !by_tiles && takes_whole(groups, q, rows);
    const int taken_off = by_tiles || whole ? 0 : find_code_kernel(q).taken_off;
    call.rows = to_digits<T>(pool, x, x_stride, rows, by_tiles ? tile_groups(layer) : groups, q.order, q.digits,
                             q.zeros ? 1 : taken_off - q.zero, by_tiles ? APART : whole ? WHOLE : IN_TURN);
    if (by_tiles) call.linear.passes = code_passes(call.linear, call.rows);
    run_panels(pool, call.linear, panel_words(groups, q.format) * 4, code_tile<T>, &call);
}

template <class T>
static void quantized_linear(Pool& pool, const Linear& layer, const typename T::Element* x, int64_t x_stride, void* y,
                             int64_t y_stride, int64_t rows, const Additions* additions = nullptr) {
    if (rows == 0) return;
    multiply_coded<T>(pool, layer, x, x_stride, y, y_stride, rows, additions, tiles_take_codes(layer, rows));
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
