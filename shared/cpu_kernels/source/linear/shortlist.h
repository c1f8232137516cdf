// The largest output of a row without reading the whole weight: a sketch of one byte for each
// element bounds every output from above and from below, and only panels whose upper bound reaches
// the best lower one are multiplied. What comes out is what `linear` gives for LARGEST, bit for bit.
//
// Let w be a column's weights, s q its sketch (q whole numbers of -127 to 127), x a row, and t p the
// row in whole numbers (t a power of two, |p| at most 8192). The sum v = s t (p . q) is exact but for
// its last steps, and
//
//   x . w - v = x . (w - s q) + (x - t p) . s q,
//   |x . w - v| <= |x| |w - s q| + |x - t p| |s q|                     (Cauchy and Schwarz),
//
// with Euclidean norms. Three roundings come on top, each bounded by a multiple of |x| |w|:
//
// 1. `multiply` adds up K products, at most three roundings for each pair of them (in steps, `pairs.h`, fewer), so its
//    sum is off by at most n u / (1 - n u) times the sum of |x_k w_k| with n = 1.5 K + 1 (Higham, 2002, 3.1). u is
//    2^-23 at most, whatever the instruction's way to round: less than 2 K 2^-23 |x| |w| for K < 2^16.
// 2. 128 (h . q) + (l . q), where p = 128 h + l, takes three roundings, times s t two more; each term is
//    at most (|t p| + 128 t sqrt K) |s q|, and t is at most |x| / 4096: below K 2^-22 |x| |w| for K >= 8.
// 3. The bounds themselves: a few units in the last place of |v| and of the slack.
//
// All three fit in (2 K + 64) 2^-22 |x| |w|. What is so small that an instruction takes it for zero adds
// less than K (|x| + |w| + 3) 2^-125. Sums that could overflow, and rows that are not finite or
// next to nothing, take the whole pass. A column that is not finite has no bound: its panel is always
// multiplied.
#pragma once

#include <cmath>
#include <cstdlib>
#include <vector>

#include "../arithmetic/bytes.h"
#include "linear.h"
#include "../arithmetic/tiles.h"

namespace tessera {

constexpr int64_t MOST_INPUTS = 1 << 16;  // sums of bytes stay within 32 bits
constexpr int SHORTLIST_ROWS = 4;         // of one call; with more rows multiplying dominates
constexpr int SKETCH_TILES_FROM = 2;      // rows, where there are tiles
constexpr int SKETCH_TILE = TILE_ROWS / 3;  // rows of one register tile: four sums for each

// Constants of a panel's columns: v's factor, and what multiplies |x| and |x - t p| in the bound.
struct Columns {
    float scale[PANEL], apart[PANEL], norm[PANEL];
};

struct Shortlist {
    const int32_t* sketch;   // [panels, inputs / 4, PANEL columns], four bytes q + ZERO_BYTE in each
    const Columns* columns;  // [panels]
    int64_t inputs;          // whole units of four
    float largest_norm;      // of columns that are finite
    // Calls that skip the sketch, after one that left more than half of the panels: how many are
    // left, and how many the next such call costs.
    int32_t rest, pause;
};

typedef ByteDots<255, 64> SketchDots;

// Where sums begin for a row whose bytes add up to `sum`.
static inline ints start(int32_t sum) { return broadcast_int((SketchDots::TAKEN_OFF - ZERO_BYTE) * sum); }

// A row in whole numbers p = 128 h + l.
struct WholeRow {
    std::vector<int32_t> high, low;  // four bytes in each
    int32_t high_sum, low_sum;
    float step, norm, apart;  // t, at least |x|, at least |x - t p|
};

// False for rows to which the bounds do not apply.
template <class T>
static bool to_whole(const typename T::Element* x, int64_t inputs, int64_t padded, float most,
                     WholeRow& row) {
    float largest = 0;
    for (int64_t k = 0; k < inputs; k++) {
        const float v = std::fabs(T::widen(x[k]));
        if (!(v < 1e18f)) return false;
        largest = v > largest ? v : largest;
    }
    if (largest < 1e-9f) return false;
    int exponent;
    std::frexp(largest, &exponent);
    row.step = std::ldexp(1.0f, exponent - 13);
    row.high.assign(padded / 4, 0);
    row.low.assign(padded / 4, 0);
    auto* high = (int8_t*)row.high.data();
    auto* low = (int8_t*)row.low.data();
    const float per_step = 1.0f / row.step;
    double squares = 0, rest = 0;
    row.high_sum = row.low_sum = 0;
    for (int64_t k = 0; k < inputs; k++) {
        const float v = T::widen(x[k]);
        const int32_t p = (int32_t)std::lrintf(v * per_step);
        const int32_t h = (p + 64) >> 7;  // to nearest: |l| is at most 64, |h| too
        high[k] = (int8_t)h;
        low[k] = (int8_t)(p - 128 * h);
        row.high_sum += h;
        row.low_sum += p - 128 * h;
        const double off = (double)v - (double)p * row.step;
        squares += (double)v * v;
        rest += off * off;
    }
    const double above = 1 + std::ldexp(1.0, -20);
    row.norm = (float)(std::sqrt(squares) * above);
    row.apart = (float)(std::sqrt(rest) * above);
    return row.norm * most < 1e37f;
}

struct SketchCall {
    const Shortlist* list;
    const WholeRow* rows;
    int64_t count, outputs, panels, panels_each;
    float* upper;  // [panels, rows]: of the panel's columns
    float* lower;  // [tiles, rows]: the best of the tile's
};

// Writes a row's bounds of one panel. sums: of h and of l, left and right.
static inline void note_bounds(const SketchCall& call, int64_t panel, int64_t row, const ints (&sums)[2][2],
                               floats* best) {
    const Shortlist& list = *call.list;
    const Columns& columns = list.columns[panel];
    const float tiny = (float)list.inputs * std::ldexp(1.0f, -125);
    const WholeRow& x = call.rows[row];
    floats upper = broadcast(-INFINITY);
    for (int side = 0; side < 2; side++) {
        const floats scale = load<floats>(columns.scale + side * LANES);
        const floats apart = load<floats>(columns.apart + side * LANES);
        const floats norm = load<floats>(columns.norm + side * LANES);
        const floats v = (__builtin_convertvector(sums[0][side], floats) * 128.0f +
                          __builtin_convertvector(sums[1][side], floats)) *
                         (scale * x.step);
        const floats slack = apart * x.norm + norm * x.apart + (norm + (x.norm + 3.0f)) * tiny;
        upper = max(v + slack, upper);
        best[row] = max(v - slack, best[row]);
    }
    call.upper[panel * call.count + row] = largest(upper);
}

// Adds the products of units [first, last) of a panel with R rows.
template <int R>
static inline void add_bytes(const SketchCall& call, int64_t panel, int64_t row, int64_t first, int64_t last,
                             ints (&sums)[R][2][2]) {
    const int32_t* w = call.list->sketch + (panel * call.list->inputs / 4 + first) * PANEL;
    const int32_t *high[R], *low[R];
    for (int r = 0; r < R; r++) {
        high[r] = call.rows[row + r].high.data();
        low[r] = call.rows[row + r].low.data();
    }
    for (int64_t u = first; u < last; u++, w += PANEL) {
        const auto a = SketchDots::prepare(load<ints>(w)), b = SketchDots::prepare(load<ints>(w + LANES));
        for (int word = 0; word < PANEL; word += 16) __builtin_prefetch(w + AHEAD_WORDS + word);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            sums[r][0][0] = SketchDots::dot(sums[r][0][0], a, high[r][u]);
            sums[r][0][1] = SketchDots::dot(sums[r][0][1], b, high[r][u]);
            sums[r][1][0] = SketchDots::dot(sums[r][1][0], a, low[r][u]);
            sums[r][1][1] = SketchDots::dot(sums[r][1][1], b, low[r][u]);
        }
    }
}

// Rows [row, row + R) of one panel.
template <int R>
static inline void bound(const SketchCall& call, int64_t panel, int64_t row, floats* best) {
    ints sums[R][2][2];  // h and l; left and right
    for (int r = 0; r < R; r++)
        for (int side = 0; side < 2; side++) {
            sums[r][0][side] = start(call.rows[row + r].high_sum);
            sums[r][1][side] = start(call.rows[row + r].low_sum);
        }
    add_bytes<R>(call, panel, row, 0, call.list->inputs / 4, sums);
    for (int r = 0; r < R; r++) note_bounds(call, panel, row + r, sums[r], best);
}

#if TESSERA_TILES

// All rows of some panels by tiles: rows of h and of l are the rows of one tile, 64 inputs a step. Tiles 0 and 1 are
// sums, 2 is rows, 3 and 4 are columns. What is left of a row goes by vectors.
class SketchTiles {
public:
    explicit SketchTiles(const SketchCall& call) : call_(call), steps_(call.list->inputs / 4 / TILE_SIDE) {
        const int rows = 2 * (int)call.count;
        TileShapes shapes;
        for (int tile : {0, 1, 2}) shapes.set(tile, rows);
        for (int tile : {3, 4}) shapes.set(tile, TILE_SIDE);
        shape_tiles(shapes);
        digits_.resize(steps_ * rows * TILE_SIDE);
        for (int64_t step = 0; step < steps_; step++)
            for (int64_t r = 0; r < rows; r++) {
                const WholeRow& x = call.rows[r % call.count];
                std::copy_n((r < call.count ? x.high : x.low).data() + step * TILE_SIDE, TILE_SIDE,
                            digits_.data() + (step * rows + r) * TILE_SIDE);
            }
    }
    ~SketchTiles() { release_tiles(); }
    SketchTiles(const SketchTiles&) = delete;

    void bound(int64_t panel, floats* best) const {
        const int64_t units = call_.list->inputs / 4, rows = 2 * call_.count;
        const int32_t* w = call_.list->sketch + panel * units * PANEL;
        const int32_t* digits = digits_.data();
        alignas(64) int32_t sums[2 * SHORTLIST_ROWS][PANEL];
        zero_tile<0>();
        zero_tile<1>();
        for (int64_t step = 0; step < steps_; step++, w += TILE_SIDE * PANEL, digits += rows * TILE_SIDE) {
            for (int64_t word = 0; word < TILE_SIDE * PANEL; word += 16)
                __builtin_prefetch(w + AHEAD_WORDS + word, 0, 2);
            load_tile<2>(digits, TILE_STRIDE);
            load_tile<3>(w, 2 * TILE_STRIDE);
            multiply_byte_tiles<0, 2, 3>();
            load_tile<4>(w + LANES, 2 * TILE_STRIDE);
            multiply_byte_tiles<1, 2, 4>();
        }
        store_tile<0>(sums, 2 * TILE_STRIDE);
        store_tile<1>(sums[0] + LANES, 2 * TILE_STRIDE);
        for (int64_t r = 0; r < call_.count; r++) {
            ints of[1][2][2];
            for (int side = 0; side < 2; side++) {
                of[0][0][side] = load<ints>(sums[r] + side * LANES) + start(call_.rows[r].high_sum);
                of[0][1][side] = load<ints>(sums[call_.count + r] + side * LANES) + start(call_.rows[r].low_sum);
            }
            add_bytes<1>(call_, panel, r, steps_ * TILE_SIDE, units, of);
            note_bounds(call_, panel, r, of[0], best);
        }
    }

private:
    const SketchCall& call_;
    int64_t steps_;
    std::vector<int32_t> digits_;  // [steps][h and l of each row, TILE_SIDE units]
};

#endif

template <int R>
static inline void bound_some(const SketchCall& call, int64_t panel, int64_t row, int rows,
                              floats* best) {
    if constexpr (R > 0) {
        if (rows == R) return bound<R>(call, panel, row, best);
        bound_some<R - 1>(call, panel, row, rows, best);
    }
}

static void sketch_tile(void* context, int tile) {
    const auto& call = *(const SketchCall*)context;
    const int64_t first = tile * call.panels_each;
    const int64_t last = std::min(call.panels, first + call.panels_each);
    floats best[SHORTLIST_ROWS];
    for (auto& lower : best) lower = broadcast(-INFINITY);
#if TESSERA_TILES
    if (call.count >= SKETCH_TILES_FROM) {
        const SketchTiles tiles(call);
        for (int64_t panel = first; panel < last; panel++) tiles.bound(panel, best);
    } else
#endif
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < call.count; row += SKETCH_TILE) {
            const int rows = (int)std::min<int64_t>(SKETCH_TILE, call.count - row);
            bound_some<SKETCH_TILE>(call, panel, row, rows, best);
        }
    for (int64_t r = 0; r < call.count; r++)
        call.lower[tile * call.count + r] = largest(best[r]);
}

// The panels that may hold the largest output of any row.
static void choose_panels(Pool& pool, const SketchCall& call, std::vector<int32_t>& chosen) {
    const int64_t tiles = (call.panels + call.panels_each - 1) / call.panels_each;
    pool.run((int)tiles, sketch_tile, (void*)&call);
    float best[SHORTLIST_ROWS];
    for (int64_t r = 0; r < call.count; r++) {
        best[r] = -INFINITY;
        for (int64_t tile = 0; tile < tiles; tile++)
            best[r] = std::max(best[r], call.lower[tile * call.count + r]);
    }
    chosen.clear();
    for (int64_t panel = 0; panel < call.panels; panel++)
        for (int64_t r = 0; r < call.count; r++)
            if (!(call.upper[panel * call.count + r] < best[r])) {
                chosen.push_back((int32_t)panel);
                break;
            }
}

// `linear` for LARGEST, of at most SHORTLIST_ROWS rows.
template <class T>
static void largest_of(Pool& pool, const Linear& layer, Shortlist& list,
                       const typename T::Element* x, int64_t x_stride, Largest* y, int64_t rows) {
    static thread_local std::vector<float> upper, lower;
    static thread_local std::vector<int32_t> chosen;
    static thread_local WholeRow whole[SHORTLIST_ROWS];
    bool bounded = rows <= SHORTLIST_ROWS && list.rest == 0;
    if (list.rest > 0) list.rest--;
    for (int64_t r = 0; r < rows && bounded; r++)
        bounded = to_whole<T>(x + r * x_stride, layer.inputs, list.inputs, list.largest_norm,
                              whole[r]);
    if (!bounded) return linear<T>(pool, layer, x, x_stride, y, 1, rows);
    SketchCall call{&list, whole, rows, layer.outputs, 0, 0, nullptr, nullptr};
    call.panels = (layer.outputs + PANEL - 1) / PANEL;
    call.panels_each = (call.panels + 16 * pool.threads() - 1) / (16 * pool.threads());
    upper.resize(call.panels * rows);
    lower.resize(call.panels * rows);
    call.upper = upper.data();
    call.lower = lower.data();
    choose_panels(pool, call, chosen);
    if ((int64_t)chosen.size() * 2 > call.panels) {
        list.rest = list.pause = std::min(2 * list.pause + 1, 63);
    } else {
        list.pause = 0;
    }
    linear<T>(pool, layer, x, x_stride, y, 1, rows, &chosen);
}

template <class T>
struct SketchPack {
    const typename T::Element* weight;
    int64_t outputs, inputs, padded;
    uint8_t* sketch;
    Columns* columns;
    float* norms;  // [panels]: the largest that is finite
};

// One column's bytes, PANEL * 4 apart in each unit, and what is known of it.
template <class T>
static void sketch_column(const SketchPack<T>& call, int64_t panel, int c) {
    const int64_t column = panel * PANEL + c;
    Columns& known = call.columns[panel];
    uint8_t* to = call.sketch + (panel * call.padded / 4 * PANEL + c) * 4;
    known.scale[c] = known.norm[c] = 0;
    known.apart[c] = INFINITY;  // of padding, and of what is not finite: always multiplied
    for (int64_t k = 0; k < call.padded; k++) to[k / 4 * PANEL * 4 + k % 4] = ZERO_BYTE;
    if (column >= call.outputs) return;
    const auto* w = call.weight + column * call.inputs;
    float most = 0, total = 0;
    for (int64_t k = 0; k < call.inputs; k++) {
        const float v = std::fabs(T::widen(w[k]));
        most = v > most ? v : most;
        total += v;
    }
    if (!(total < 1e18f)) return;
    // Weights smaller than this are all taken for zero.
    const float scale = most < 1e-18f ? 0.0f : most / 127.0f;
    const float per_step = scale > 0 ? 1.0f / scale : 0.0f;
    double squares = 0, rest = 0, kept = 0;
    for (int64_t k = 0; k < call.inputs; k++) {
        const float v = T::widen(w[k]);
        const int32_t q = std::max(-127, std::min(127, (int32_t)std::lrintf(v * per_step)));
        to[k / 4 * PANEL * 4 + k % 4] = (uint8_t)(q + ZERO_BYTE);
        const double near = (double)scale * q;
        squares += (double)v * v;
        rest += (v - near) * (v - near);
        kept += near * near;
    }
    const double above = 1 + std::ldexp(1.0, -20);
    const double rounding = (2.0 * call.padded + 64) * std::ldexp(1.0, -22);
    const double norm = std::sqrt(squares);
    known.scale[c] = scale;
    known.apart[c] = (float)((std::sqrt(rest) + rounding * norm) * above);
    known.norm[c] = (float)(std::max(norm, std::sqrt(kept)) * above);
    call.norms[panel] = std::max(call.norms[panel], known.norm[c]);
}

template <class T>
static void sketch_panel(void* context, int panel) {
    const auto& call = *(const SketchPack<T>*)context;
    call.norms[panel] = 0;
    for (int c = 0; c < PANEL; c++) sketch_column<T>(call, panel, c);
}

// Fills `list.sketch` and `list.columns` from rows [outputs, inputs] of the element type.
template <class T>
static void make_sketch(Pool& pool, const typename T::Element* weight, int64_t outputs,
                        int64_t inputs, Shortlist& list) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    std::vector<float> norms(panels);
    SketchPack<T> call{weight, outputs, inputs, list.inputs, (uint8_t*)list.sketch,
                       (Columns*)list.columns, norms.data()};
    pool.run((int)panels, sketch_panel<T>, &call);
    list.largest_norm = *std::max_element(norms.begin(), norms.end());
    list.rest = list.pause = 0;
}

}  // namespace tessera
