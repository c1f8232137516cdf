// Sums of products of bfloat16 in the order of Intel's tiles (`tiles.h`), for any number of rows.
//
// A sum takes its inputs in steps of 32, in their order. Within a step the products of its 16 even inputs are added up
// in one chain of fused products, from zero, and those of its 16 odd ones in another; then `sum += even + odd`. All
// is rounded to nearest, and what is denormal is zero, as operand and as result. This is the pseudocode of TDPBF16PS,
// and the same bits come of vectors: rows may be multiplied by whichever is faster.
//
// Inputs that are no whole step are filled up with zeros: in weights when they are packed, in rows when they are read.
#pragma once

#include "vectors.h"

#if TESSERA_TILES || defined(TESSERA_PORTABLE)
#define TESSERA_PAIRS 1
#else
#define TESSERA_PAIRS 0
#endif

namespace tessera {

constexpr int64_t STEP = 32;  // inputs

// Whether sums of this element type are taken in steps, and how many inputs a packed weight has for `inputs`.
template <class T>
constexpr bool IN_STEPS = TESSERA_PAIRS && T::PER_UNIT == 2;

template <class T>
constexpr int64_t whole_steps(int64_t inputs) {
    return IN_STEPS<T> ? (inputs + STEP - 1) / STEP * STEP : inputs;
}

// How the vectors of this translation read units of a weight of T, and rows that they are multiplied with.
template <class T>
struct VectorsOf {
    typedef T Type;
};
#if TESSERA_PAIRS && defined(__AVX512BF16__)
template <>
struct VectorsOf<BFloat16> {
    typedef WidenedBFloat16 Type;
};
#endif

// How far ahead of the sums weights are asked for, in words, and for which cache: for the second one of processors with
// tiles, where that was a tenth faster (benchmarks/README.md).
#if TESSERA_TILES
constexpr int STEP_AHEAD = 1024, STEP_LOCALITY = 2;
#else
constexpr int STEP_AHEAD = 512, STEP_LOCALITY = 3;
#endif

// Rows whose even and odd sums stay in registers, two vectors of each, beside what they are multiplied with.
constexpr int STEP_ROWS = TILE_ROWS / 2;

// Adds the products of `units` of a panel (whole steps) with R rows of words. P is how units lie: pairs of bfloat16,
// or float32 where they were widened.
template <class P, int R>
static inline void add_steps(const int32_t* w, const int32_t* x, int64_t stride, int64_t units,
                             floats* left, floats* right) {
    static_assert(P::PARTS == 2 || P::PER_UNIT == 1, "words are inputs");
    constexpr int64_t UNITS = P::PER_UNIT == 1 ? STEP : STEP / 2, PAIRS = STEP / 2;
    constexpr int WIDTH = 2 * LANES;
    for (int64_t done = 0; done < units; done += UNITS) {
        floats sums[2][R][2] = {};  // even, odd
#pragma GCC unroll 2
        for (int64_t pair = 0; pair < PAIRS; pair++, x += 2) {
            for (int word = 0; word < WIDTH; word += 16)
                __builtin_prefetch(w + STEP_AHEAD + word, 0, STEP_LOCALITY);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const int32_t* unit = P::PER_UNIT == 1 ? w + odd * WIDTH : w;
                const ints a = P::column(load<ints>(unit), odd);
                const ints b = P::column(load<ints>(unit + LANES), odd);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const int32_t word = x[r * stride + odd];
                    sums[odd][r][0] = P::dot(sums[odd][r][0], a, word);
                    sums[odd][r][1] = P::dot(sums[odd][r][1], b, word);
                }
            }
            w += P::PER_UNIT == 1 ? 2 * WIDTH : WIDTH;
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            left[r] = left[r] + (sums[0][r][0] + sums[1][r][0]);
            right[r] = right[r] + (sums[0][r][1] + sums[1][r][1]);
        }
    }
}

// While one lives, denormal operands and results of this thread are zero if they are for sums of T.
template <class T>
class DenormalsAreZero {
public:
    DenormalsAreZero() {
        if constexpr (IN_STEPS<T>) {
            before_ = read();
            write(before_ | ZERO);
        }
    }
    ~DenormalsAreZero() {
        if constexpr (IN_STEPS<T>) write(before_);
    }
    DenormalsAreZero(const DenormalsAreZero&) = delete;

private:
#if defined(__x86_64__)
    typedef uint32_t Register;
    static constexpr Register ZERO = 0x8040;  // MXCSR: results, operands
    static Register read() { return _mm_getcsr(); }
    // With a barrier: arithmetic on what is loaded afterwards stays behind it, what is stored before stays before.
    static void write(Register value) { asm volatile("ldmxcsr %0" ::"m"(value) : "memory"); }
#elif defined(__aarch64__)
    typedef uint64_t Register;
    static constexpr Register ZERO = 1 << 24;  // FPCR.FZ: both
    static Register read() {
        Register value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void write(Register value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#endif
    Register before_ = 0;
};

}  // namespace tessera
