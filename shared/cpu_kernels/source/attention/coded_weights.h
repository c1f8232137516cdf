// Weights of a softmax as codes of bytes: of a row's strip one step for all of them, each weight times its value's
// scale. Weights stay in registers from their exponential to their code.
#pragma once

#include "attention_call.h"
#include "coded_pages.h"

namespace tessera {

constexpr int WEIGHTS_TO = 255;  // the largest code of a weight

// What multiplies bytes is always awake (`soften`).
struct NeverSleeps {
    static void stay_awake() {}
};

// Lines [first, last) of pages that memory is asked for, in as many turns as there are rows; `pages` may be null.
class Asking {
public:
    Asking(const CodedPage* pages, int64_t first, int64_t last, int rows)
        : page_(pages), end_(pages + STRIP_PAGES), first_(first), last_(last), line_(first),
          each_((STRIP_PAGES * (last - first) + rows - 1) / rows) {}

    void turn() {
        for (int64_t i = 0; i < each_ && page_ < end_ && page_->keys; i++) {
            __builtin_prefetch(page_->keys + line_ * LINE_BYTES, 0, 2);
            if (++line_ == last_) line_ = first_, page_++;
        }
    }

private:
    const CodedPage *page_, *end_;
    int64_t first_, last_, line_, each_;
};

struct CodedWeights {
    uint8_t* codes;  // [rows, STRIP]
    float* steps;    // [rows]
};

// Codes of vectors [first, last) of a row's strip whose weights are relative to `highest`, and of [begin, end) of them
// not zero; adds weights to `totals`. Returns the step, no number where a weight times its scale is none.
static inline float weigh_to_codes(const float* scores, const float* value_scales, int begin, int end, int last,
                                   float scale, float highest, floats* totals, uint8_t* codes) {
    constexpr float MAGIC = 0x1.8p23f;  // adding it leaves the nearest integer in the last bits
    floats scaled[STRIP_VECTORS];
    ints most = {};  // floats without signs are in the order of their bits
#pragma GCC unroll 8
    for (int v = begin; v < end; v++) {
        const floats t = fused(load<floats>(scores + v * LANES), broadcast(scale), broadcast(-highest));
        const floats weight = power_of_two_in_short(t);
        totals[v % PAGE_VECTORS] = totals[v % PAGE_VECTORS] + weight;
        // What has no weight counts for nothing, whatever its scale is.
        scaled[v] = weight > 0.0f ? weight * load<floats>(value_scales + v * LANES) : floats{};
        const ints bits = (ints)scaled[v] & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const int32_t bits = largest(most);
    float greatest;
    std::memcpy(&greatest, &bits, 4);
    const bool finite = bits < 0x7f800000, usable = finite && greatest >= LEAST_OF_GROUP;
    const floats per_step = broadcast(usable ? (float)WEIGHTS_TO / greatest : 0.0f);
#pragma GCC unroll 8
    for (int v = begin; v < end; v++)
        store_bytes(codes + v * LANES, (ints)fused(scaled[v], per_step, broadcast(MAGIC)));
    if (begin > 0) std::fill_n(codes, begin * LANES, 0);
    if (end < last) std::fill_n(codes + end * LANES, (last - end) * LANES, 0);
    return usable ? greatest / (float)WEIGHTS_TO : finite ? 0.0f : NAN;
}

// Turns scores [rows, STRIP] of the `keys` first keys, whole pages, into codes of weights, with the values' scales.
// factors: what each row's older sums are to be scaled by, with room for whole vectors. Memory is asked for lines row by
// row: all at once they would wait for each other.
static inline void soften_to_codes(const Attention& call, int rows, const Seen* seen, int keys, float* scores,
                                   const float* value_scales, const Softmax& state, float* factors,
                                   const CodedWeights& weights, Asking asking) {
    const float scale = softmax_scale(call);
    for (int first = 0; first < rows; first += LANES) {
        const int count = std::min(LANES, rows - first);
        raise_highest<NeverSleeps>(call, first, count, seen, scores, state, factors);
        for (int r = first; r < first + count; r++) {
            asking.turn();
            const float *from = scores + r * STRIP, highest = state.highest[r];
            uint8_t* to = weights.codes + r * STRIP;
            floats totals[PAGE_VECTORS];
            for (int j = 0; j < PAGE_VECTORS; j++)
                totals[j] = load<floats>(state.totals + r * PAGE + j * LANES) * factors[r];
            const int begin = seen[r].from / LANES, end = (seen[r].to + LANES - 1) / LANES;
            weights.steps[r] =
                seen[r].whole()
                    ? weigh_to_codes(from, value_scales, 0, STRIP_VECTORS, STRIP_VECTORS, scale, highest, totals, to)
                    : weigh_to_codes(from, value_scales, begin, end, keys / LANES, scale, highest, totals, to);
            for (int j = 0; j < PAGE_VECTORS; j++) store(state.totals + r * PAGE + j * LANES, totals[j]);
        }
    }
}

}  // namespace tessera
