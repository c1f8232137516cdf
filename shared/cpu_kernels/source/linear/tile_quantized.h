// Sums of codes' products (`codes.h`) by Intel's tiles (`tiles.h`), over the same panels as vectors have. Whole numbers
// are exact: the bits are those of vectors, so that rows are multiplied by whichever is faster.
//
// Digits are a tile's rows of signed bytes, those of h and of l in turn where there are two. Codes of eight bits are
// unsigned bytes, two tiles for each step of 64 inputs as they lie; what zeros take off is made up for in the sums.
// Narrower ones become signed bytes, less their zeros, once for all rows that pass. Two tiles of rows and two of codes make four of sums, which are taken out after each group of
// inputs; meanwhile tiles multiply the next one.
#pragma once

#include <algorithm>

#include "codes.h"
#include "tile_linear.h"

namespace tessera {

#if !TESSERA_TILES

static inline bool tiles_take_codes(const Linear&, int64_t) { return false; }
static inline InputGroups tile_groups(const Linear& layer) { return input_groups(layer); }
static inline int64_t code_passes(const LinearCall&, const DigitRows&) { return 1; }
template <class T>
static inline void multiply_codes_by_tiles(const CodeCall&, int64_t, int64_t, int64_t, Running*) {}

#else

constexpr int64_t CODE_TILES_FROM = 8, NARROW_TILES_FROM = 16;  // rows: of codes as they lie, and of narrower ones
constexpr int64_t TILE_INPUTS = TILE_STRIDE;  // of a step
constexpr int64_t LEAST_TILE_INPUTS = TILE_INPUTS / 2;  // of the steps of small groups
constexpr int64_t WORD_BYTES = PANEL * 4;  // of a panel's codes for four inputs

// Whether groups are as large as steps of tiles, or there is one alone.
static inline bool suits_tiles(const Linear& layer) {
    return input_groups(layer).count == 1 || layer.quantized->group % LEAST_TILE_INPUTS == 0;
}

static inline bool tiles_take_codes(const Linear& layer, int64_t rows) {
    return rows >= (layer.quantized->format == BYTES ? CODE_TILES_FROM : NARROW_TILES_FROM) && suits_tiles(layer);
}

// The inputs of a row in groups of whole steps.
static inline InputGroups tile_groups(const Linear& layer) {
    const InputGroups groups = input_groups(layer);
    const bool small = groups.count > 1 && groups.group < TILE_INPUTS;
    return {layer.inputs, groups.group, small ? LEAST_TILE_INPUTS : TILE_INPUTS};
}

// Rows of a group, two tiles full of them.
static inline int64_t code_group_rows(int digits) { return 2 * TILE_SIDE / digits; }

// In how many parts rows pass over all panels, so that the digits of each stay in a core's second cache.
static inline int64_t code_passes(const LinearCall& call, const DigitRows& rows) {
    const int64_t most = code_group_rows(call.layer->quantized->digits), groups = (call.rows + most - 1) / most;
    const int64_t bytes = call.rows * rows.words_each * 4;
    if (call.added || call.layer->result == LARGEST) return 1;  // they go by all rows
    return std::clamp<int64_t>((bytes + STRETCH_BYTES - 1) / STRETCH_BYTES, 1, groups);
}

// A panel's codes as bytes; those of fewer than eight bits less their zeros, with which they fit signed ones.
template <int FORMAT>
static void codes_to_bytes(const Quantized& q, const InputGroups& groups, int64_t panel, const int32_t* w, int32_t* to) {
    typedef CodeUnit<FORMAT> Unit;
    constexpr int32_t EACH_BYTE = 0x01010101;
    const Unit unit(q);
    ints zeros[2];
    for (auto& some : zeros) some = broadcast_int((FORMAT == BYTES ? 0 : q.zero & 255) * EACH_BYTE);
    for (int64_t g = 0; g < groups.count; g++) {
        if (FORMAT != BYTES && q.zeros)
            for (int side = 0; side < 2; side++)
                zeros[side] = read_zeros(q.zeros + (panel * groups.count + g) * PANEL + side * LANES) * EACH_BYTE;
        for (int64_t u = groups.units(g); u > 0; u--, w += Unit::STORED * PANEL) {
            for (int word = 0; word < Unit::STORED * PANEL; word += 16) __builtin_prefetch(w + AHEAD_WORDS + word);
#pragma GCC unroll 8
            for (int word = 0; word < Unit::WORDS; word++, to += PANEL)
                for (int side = 0; side < 2; side++) {
                    const auto bytes = (__m512i)unit.bytes(w + side * LANES, word);
                    store(to + side * LANES, (ints)_mm512_sub_epi8(bytes, (__m512i)zeros[side]));
                }
        }
    }
}

static inline void panel_to_bytes(const Quantized& q, const InputGroups& groups, int64_t panel, const int32_t* w,
                                  int32_t* to) {
    switch (q.format) {
        case BYTES: return codes_to_bytes<BYTES>(q, groups, panel, w, to);
        case NIBBLES: return codes_to_bytes<NIBBLES>(q, groups, panel, w, to);
        case TABLE: return codes_to_bytes<TABLE>(q, groups, panel, w, to);
        case FIVES: return codes_to_bytes<FIVES>(q, groups, panel, w, to);
        default: return codes_to_bytes<SIXES>(q, groups, panel, w, to);
    }
}

// Weights that follow, of which each step asks for some lines.
struct CodesAhead {
    const char* from = nullptr;
    int64_t lines = 0;
};

template <int SUMS, int ROWS, int COLUMNS, bool SIGNED>
static inline void multiply_codes_of_tile() {
    if (SIGNED)
        multiply_signed_tiles<SUMS, ROWS, COLUMNS>();
    else
        multiply_byte_tiles<SUMS, ROWS, COLUMNS>();
}

// The sums [upper and lower rows, PANEL] of one group of inputs. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 codes.
template <bool BOTH, bool SIGNED>
static inline void multiply_code_steps(const char* upper, const char* lower, int64_t stride, int64_t step_bytes,
                                       const char* codes, int64_t steps, CodesAhead& ahead, int32_t* sums,
                                       int32_t* lower_sums) {
    alignas(64) static thread_local char unread[TILE_SIDE * TILE_STRIDE];
    char* const nowhere = unread;
    zero_tile<0>();
    zero_tile<1>();
    if (BOTH) zero_tile<2>();
    if (BOTH) zero_tile<3>();
    for (int64_t step = 0; step < steps; step++) {
        if (step % STORE_EVERY == STORE_EVERY - 1) store_tile<6>(nowhere, TILE_STRIDE);
        for (int64_t line = 0; line < ahead.lines; line++, ahead.from += LINE) __builtin_prefetch(ahead.from, 0, 2);
        load_tile<6>(codes, WORD_BYTES);
        load_tile<4>(upper, stride);
        multiply_codes_of_tile<0, 4, 6, SIGNED>();
        load_tile<7>(codes + TILE_STRIDE, WORD_BYTES);
        multiply_codes_of_tile<1, 4, 7, SIGNED>();
        if (BOTH) {
            load_tile<5>(lower, stride);
            multiply_codes_of_tile<2, 5, 6, SIGNED>();
            multiply_codes_of_tile<3, 5, 7, SIGNED>();
        }
        upper += step_bytes;
        lower += step_bytes;
        codes += step_bytes / 4 * WORD_BYTES;
    }
    store_tile<0>(sums, WORD_BYTES);
    store_tile<1>(sums + LANES, WORD_BYTES);
    if (BOTH) store_tile<2>(lower_sums, WORD_BYTES);
    if (BOTH) store_tile<3>(lower_sums + LANES, WORD_BYTES);
}

// Rows [begin, end) of a call.
template <class T, int DIGITS>
class CodeTiles {
public:
    CodeTiles(const CodeCall& call, int64_t begin, int64_t end, Running* best)
        : call_(call), layer_(*call.linear.layer), q_(*layer_.quantized), codes_(input_groups(layer_)),
          inputs_(tile_groups(layer_)), rows_(begin, end - begin, code_group_rows(DIGITS)), best_(best) {
        const int64_t group_words = codes_.units(0) * byte_words(q_.format);
        all_words_ = codes_.all_units() * byte_words(q_.format);
        step_words_ = inputs_.unit / 4;
        // A step that goes beyond its group meets zeros of rows, whatever codes those are; none goes beyond memory.
        as_they_lie_ = q_.format == BYTES && all_words_ % step_words_ == 0 &&
                       (codes_.count == 1 || group_words % step_words_ == 0);
        group_bytes_ = group_words * WORD_BYTES;
        stride_ = call.rows.words_each / DIGITS * 4;
        steps_ = inputs_.units(0);
        last_steps_ = inputs_.units(inputs_.count - 1);
        TileShapes shapes;
        for (int tile : {0, 1, 4}) shapes.set(tile, rows_.upper * DIGITS);
        if (rows_.lower)
            for (int tile : {2, 3, 5}) shapes.set(tile, rows_.lower * DIGITS);
        for (int tile : {4, 5})
            if (shapes.rows[tile]) shapes.set(tile, shapes.rows[tile], (int)inputs_.unit);
        for (int tile : {6, 7}) shapes.set(tile, (int)step_words_);
        shape_tiles(shapes);
    }
    ~CodeTiles() { release_tiles(); }
    CodeTiles(const CodeTiles&) = delete;

    // added: [rows of the call][2], what adapters add, or null. next: whether the panel's neighbour comes next.
    void multiply(int64_t panel, const floats* added, bool next) {
        alignas(64) int32_t sums[2][GROUP_ROWS * PANEL];
        const int64_t words = panel_words(codes_, q_.format), all_steps = inputs_.all_units() * rows_.count;
        const int32_t* w = layer_.panels + panel * words;
        const char* codes = as_they_lie_ ? (const char*)w : to_bytes(panel, w);
        CodesAhead ahead;
        if (rows_.count == 1 && as_they_lie_)
            ahead = {codes + AHEAD_BYTES, step_words_ * WORD_BYTES / LINE};
        else if (next)
            ahead = {(const char*)(w + words), (words * 4 / LINE + all_steps - 1) / all_steps};
        int turn = 0;
        int64_t waiting_row = -1, waiting = 0;
        for (int64_t group = 0; group < rows_.count; group++) {
            const int64_t row = rows_.row(group);
            const char* x = (const char*)call_.rows.words + row * DIGITS * stride_;
            for (int64_t g = 0; g < inputs_.count; g++, turn ^= 1) {
                const int64_t steps = g + 1 < inputs_.count ? steps_ : last_steps_;
                const char* from = codes + g * group_bytes_;
                if (rows_.lower)
                    sum<true>(x, from, steps, ahead, sums[turn]);
                else
                    sum<false>(x, from, steps, ahead, sums[turn]);
                x += steps * inputs_.unit;
                if (waiting_row >= 0) take_out(panel, waiting, waiting_row, sums[turn ^ 1], added);
                waiting_row = row, waiting = g;
            }
        }
        take_out(panel, waiting, waiting_row, sums[turn ^ 1], added);
    }

private:
    const char* to_bytes(int64_t panel, const int32_t* w) const {
        static thread_local Lines<int32_t> lines;
        int32_t* to = lines.fit((all_words_ + step_words_) * PANEL);
        panel_to_bytes(q_, codes_, panel, w, to);
        std::fill_n(to + all_words_ * PANEL, step_words_ * PANEL, 0);
        return (const char*)to;
    }

    template <bool BOTH>
    void sum(const char* x, const char* codes, int64_t steps, CodesAhead& ahead, int32_t* sums) const {
        const int64_t upper = rows_.upper * DIGITS;
        const auto multiply = q_.format == BYTES ? multiply_code_steps<BOTH, false> : multiply_code_steps<BOTH, true>;
        multiply(x, x + upper * stride_, stride_, inputs_.unit, codes, steps, ahead, sums, sums + upper * PANEL);
    }

    // What the sums of group g, [a group's rows, digits, PANEL], add to its rows; after the last group these are done.
    void take_out(int64_t panel, int64_t g, int64_t row, const int32_t* sums, const floats* added) {
        if (g == 0) std::fill_n(y_, 2 * rows_.size, floats{});
        const bool in_words = DIGITS == 2 && codes_.group <= MOST_IN_WORDS, starts = q_.format == BYTES;
        for (int side = 0; side < 2; side++) {
            if (in_words)
                starts ? add<true, true>(panel, g, row, sums, side) : add<true, false>(panel, g, row, sums, side);
            else
                starts ? add<false, true>(panel, g, row, sums, side) : add<false, false>(panel, g, row, sums, side);
        }
        if (g + 1 < inputs_.count) return;
        for (int64_t r = 0; r < rows_.size; r++) {
            floats left = y_[2 * r], right = y_[2 * r + 1];
            if (added) {
                left = left + added[2 * (row + r)];
                right = right + added[2 * (row + r) + 1];
            }
            finish<T>(call_.linear, panel, row + r, left, right, best_);
        }
    }

    // As in `multiply_codes`. STARTS: sums come without what zeros take off.
    template <bool IN_WORDS, bool STARTS>
    void add(int64_t panel, int64_t g, int64_t row, const int32_t* sums, int side) {
        const int64_t count = inputs_.count, runs = ((count - 1) >> q_.run_shift) + 1, by = side * LANES;
        const int64_t first = (panel * count + g) * PANEL + by, run = (panel * runs + (g >> q_.run_shift)) * PANEL + by;
        const int64_t place = g * call_.rows.count + row;
        const int32_t* starts = call_.rows.sums + place * DIGITS;
        const float *steps = call_.rows.steps + place, *shifts = call_.rows.shifts + place;
        const floats scales = read_scales(q_, q_.scales, run, q_.factors ? q_.factors + first : nullptr);
        const ints zeros = STARTS && q_.zeros ? -read_zeros(q_.zeros + first) : ints{};
        floats minima = {};
        if (q_.minima) minima = read_scales(q_, q_.minima, run, q_.minimum_factors ? q_.minimum_factors + first : nullptr);
        floats* y = y_ + side;
        sums += by;
        for (int64_t r = 0; r < rows_.size; r++, starts += DIGITS, sums += DIGITS * PANEL, y += 2) {
            ints whole[DIGITS];
            for (int d = 0; d < DIGITS; d++) {
                whole[d] = load<ints>(sums + d * PANEL);
                if (!STARTS) continue;
                const ints start = broadcast_int(starts[d]);
                whole[d] += q_.zeros ? start * zeros : start;
            }
            const floats sum = IN_WORDS ? __builtin_convertvector((whole[0] << 7) + whole[DIGITS - 1], floats)
                                        : sum_of_digits<DIGITS>(whole[0], whole[DIGITS - 1]);
            floats found = fused(sum, scales * broadcast(steps[r]), *y);
            if (q_.minima) found = fused(minima, broadcast(shifts[r]), found);
            *y = found;
        }
    }

    const CodeCall& call_;
    const Linear& layer_;
    const Quantized& q_;
    const InputGroups codes_, inputs_;  // units of codes, steps of rows
    const RowGroups rows_;
    Running* best_;
    int64_t all_words_, step_words_, group_bytes_;  // of a panel's codes as bytes
    int64_t stride_;  // bytes between rows of digits
    int64_t steps_, last_steps_;  // of a group of inputs, and of the last one
    bool as_they_lie_;
    floats y_[2 * GROUP_ROWS];
};

// Places [first, last) of the panels for the rows of one pass.
template <class T, int DIGITS>
static void pass_codes(const CodeCall& call, int64_t first, int64_t last, int64_t pass, Running* best) {
    const LinearCall& linear = call.linear;
    const int64_t most = code_group_rows(DIGITS), groups = (linear.rows + most - 1) / most, passes = linear.passes;
    const int64_t begin = linear.rows * (groups * pass / passes) / groups;
    const int64_t end = linear.rows * (groups * (pass + 1) / passes) / groups;
    CodeTiles<T, DIGITS> tiles(call, begin, end, best);
    for_panels<T>(linear, first, last, [&](int64_t panel, const floats* added) {
        tiles.multiply(panel, added, panel + 1 < last);
    });
}

template <class T>
static void multiply_codes_by_tiles(const CodeCall& call, int64_t first, int64_t last, int64_t pass, Running* best) {
    if (call.linear.layer->quantized->digits == 2)
        pass_codes<T, 2>(call, first, last, pass, best);
    else
        pass_codes<T, 1>(call, first, last, pass, best);
}

#endif

}  // namespace tessera
