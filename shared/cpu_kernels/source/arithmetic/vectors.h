// One native vector register at a time, and the two element types as "units" of four bytes.
//
// The compiler's vector extension takes exactly one register of the instruction set: a wider type
// would go through memory at every operation. Only what it has no operator for is spelt out with
// intrinsics. Every kernel adds up in an order that depends on neither the number of rows nor the
// place of a row: a row's bits depend on that row alone.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

// Whether there are tiles (`tiles.h`); in a self-test they may be emulated.
#if defined(__AMX_BF16__) || defined(TESSERA_EMULATED_TILES)
#define TESSERA_TILES 1
#else
#define TESSERA_TILES 0
#endif

namespace tessera {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// AVX2 has 16 registers, the others 32. Two vectors of each row of a tile, the two that they are
// multiplied with and a broadcast have to stay in them.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 12;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

template <class V>
static inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
static inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

#if defined(__AVX512F__)
static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const ints LANE = {0, 1, 2, 3};
#endif

static inline floats broadcast(float x) { return x - floats{}; }
static inline ints broadcast_int(int32_t x) { return x - ints{}; }

static inline floats max(floats a, floats b) { return a > b ? a : b; }

// a b + c in one rounding. Nothing else is: compilers are told not to contract (`compiling.py`), as each does so in some
// places and not in others, and a kernel for one row would give other bits than the same kernel for two.
static inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

static inline float sum(floats v) {
#if defined(__AVX512F__)
    // What the loops below do.
    const __m512 all = (__m512)v;
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#endif
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

static inline float largest(floats v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}

// The same of whole numbers.
static inline int32_t sum(ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

static inline int32_t largest(ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// Sums over the elements of a row, each in the lane that its place has: as many lanes as a vector, or sixteen whatever
// the vector, so that every instruction set adds up in the same order (`TESSERA_PORTABLE`).
class LaneSums {
public:
    // `vector` counts the row's vectors from its beginning.
    void add(int64_t vector, floats v) { at(vector) = at(vector) + v; }
    void add_product(int64_t vector, floats a, floats b) { at(vector) = fused(a, b, at(vector)); }

    float total() const {
        floats folded[COUNT];
        for (int i = 0; i < COUNT; i++) folded[i] = sums_[i];
        for (int half = COUNT / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) folded[i] = folded[i] + folded[i + half];
        return sum(folded[0]);
    }

private:
#if defined(TESSERA_PORTABLE)
    static constexpr int COUNT = 16 / LANES;
#else
    static constexpr int COUNT = 1;
#endif
    floats& at(int64_t vector) { return sums_[vector % COUNT]; }

    floats sums_[COUNT] = {};
};

// To bfloat16, to nearest even. Not-a-number stays one.
static inline halves to_bfloat16(floats v) {
#if defined(__AVX512BF16__) && !defined(TESSERA_PORTABLE)
    return (halves)_mm512_cvtneps_pbh((__m512)v);  // and what is denormal to zero
#else
    const ints bits = (ints)v;
    const ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const ints kept = v == v ? rounded : (bits | 0x400000);
#if defined(__ARM_NEON)
    return (halves)vshrn_n_u32((uint32x4_t)kept, 16);
#else
    return __builtin_convertvector((kept >> 16) & 0xffff, halves);
#endif
#endif
}

static inline ints widened(halves v) {
#if defined(__ARM_NEON)
    return (ints)vmovl_u16((uint16x4_t)v);
#elif defined(__AVX512F__)
    return (ints)_mm512_cvtepu16_epi32((__m256i)v);  // gcc does it by halves
#else
    return __builtin_convertvector(v, ints);
#endif
}

static inline floats from_bfloat16(halves v) { return (floats)(widened(v) << 16); }

// Exact for all that are finite, what is denormal included.
static inline floats from_float16(halves v) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps((__m256i)v);
#else
    const ints bits = widened(v);
    const floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((ints)size | (bits & 0x8000) << 16);
#endif
}

// A unit is four bytes of a weight or of the cache: one float32, or a pair of neighbours in
// bfloat16. What multiplies it comes as words of four bytes, each broadcast to all lanes: a unit as
// it is, or, where no instruction takes pairs, each bfloat16 widened to float32 by itself.
//
//   dot(acc, columns, word)  adds the products of one part of the units of LANES columns
//   column(units, part)      that part; there are PARTS words for each unit
//   put(words, i, v)         elements [i, i + LANES) of a row of words

struct Float32 {
    typedef float Element;
    static constexpr int PER_UNIT = 1, PARTS = 1;
    static constexpr bool WIDENS = false;

    static inline ints column(ints units, int) { return units; }
    static inline floats dot(floats acc, ints columns, int32_t word) {
        return fused((floats)columns, (floats)broadcast_int(word), acc);
    }
    static inline floats read(const Element* from) { return load<floats>(from); }
    static inline void write(Element* to, floats v) { store(to, v); }
    static inline float widen(Element x) { return x; }
    static inline void put(int32_t* words, int64_t i, floats v) { store(words + i, v); }
};

// Each bfloat16 of a pair by itself, widened to float32.
struct WidenedBFloat16 {
    typedef uint16_t Element;
    static constexpr int PER_UNIT = 2, PARTS = 2;
    static constexpr bool WIDENS = true;

    static inline ints column(ints units, int part) {
        return part ? units & broadcast_int((int32_t)0xffff0000) : units << 16;
    }
    static inline floats dot(floats acc, ints columns, int32_t word) {
        return Float32::dot(acc, columns, word);
    }
    static inline void put(int32_t* words, int64_t i, floats v) { store(words + i, v); }
    static inline floats read(const Element* from) { return from_bfloat16(load<halves>(from)); }
    static inline void write(Element* to, floats v) { store(to, to_bfloat16(v)); }
    static inline float widen(Element x) {
        const uint32_t bits = (uint32_t)x << 16;
        float v;
        std::memcpy(&v, &bits, 4);
        return v;
    }
};

#if defined(__AVX512BF16__)
struct BFloat16 : WidenedBFloat16 {
    static constexpr int PARTS = 1;
    static constexpr bool WIDENS = false;

    static inline ints column(ints units, int) { return units; }
    static inline floats dot(floats acc, ints columns, int32_t word) {
        const ints pairs = broadcast_int(word);
        return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)columns, (__m512bh)pairs);
    }
    static inline void put(int32_t* words, int64_t i, floats v) {
        write((Element*)words + i, v);
    }
};
#else
typedef WidenedBFloat16 BFloat16;
#endif

// How many numbers a unit has, whatever multiplies it, and one of them of LANES units, in float32.
template <class T>
constexpr int UNIT = sizeof(int32_t) / sizeof(typename T::Element);

template <class T>
static inline floats read_unit(ints units, int number) {
    if constexpr (UNIT<T> == 1) return (floats)units;
    return (floats)WidenedBFloat16::column(units, number);
}

// The first `count` lanes; the others read as zero and are not written.
template <class T>
static inline floats read_some(const typename T::Element* from, int count) {
    if (count >= LANES) return T::read(from);
    typename T::Element lanes[LANES] = {};
    std::memcpy(lanes, from, count * sizeof *lanes);
    return T::read(lanes);
}

template <class T>
static inline void write_some(typename T::Element* to, floats v, int count) {
    if (count >= LANES) return T::write(to, v);
    typename T::Element lanes[LANES];
    T::write(lanes, v);
    std::memcpy(to, lanes, count * sizeof *lanes);
}

// `count` elements, whole units, as words.
template <class T>
static inline void to_words(const typename T::Element* x, int64_t count, int32_t* words) {
    if (!T::WIDENS) {
        std::memcpy(words, x, count * sizeof *x);
        return;
    }
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) T::put(words, i, T::read(x + i));
    for (; i < count; i++) {
        const float v = T::widen(x[i]);
        std::memcpy(words + i, &v, 4);
    }
}

}  // namespace tessera
