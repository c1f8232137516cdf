// Sums of products of bytes in 32 bits. Whole numbers are exact: every instruction set, and every order, gives the same.
#pragma once

#include "vectors.h"

namespace tessera {

constexpr int ZERO_BYTE = 128;  // what a zero of signed bytes is stored as

// Adds to each lane the four products of its bytes and those of `word`, which are signed and at most MOST (64 or 127)
// in size. The bytes are unsigned, at most LARGEST (15 or 255), and count less `TAKEN_OFF`: where instructions take
// them as signed ones it is ZERO_BYTE, and `start` makes up for it.
//
//   prepare(bytes)          what is done once for all rows
//   dot(acc, bytes, word)   of prepared bytes

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

template <int LARGEST, int MOST>
struct ByteDots {
    typedef ints Bytes;
    static constexpr int TAKEN_OFF = 0;
    static inline Bytes prepare(ints bytes) { return bytes; }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
#if defined(__AVX512VNNI__)
        return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, (__m512i)broadcast_int(word));
#else
        return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)bytes, (__m256i)broadcast_int(word));
#endif
    }
};

#elif defined(__AVX512BW__) || defined(__AVX2__)

// Sums of pairs stay within 16 bits: else they would be cut off there.
template <int LARGEST, int MOST>
constexpr bool PAIRS_FIT = 2 * LARGEST * MOST <= INT16_MAX;

static inline ints add_pairs(ints acc, ints bytes, ints words) {
#if defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)bytes, (__m512i)words);
    return acc + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, (__m256i)words);
    return acc + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

template <int LARGEST, int MOST, bool FIT = PAIRS_FIT<LARGEST, MOST>>
struct ByteDots {
    typedef ints Bytes;
    static constexpr int TAKEN_OFF = 0;
    static inline Bytes prepare(ints bytes) { return bytes; }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        return add_pairs(acc, bytes, broadcast_int(word));
    }
};

// Where they do not fit, signed bytes go by their size, and their sign to the other factor.
template <int LARGEST, int MOST>
struct ByteDots<LARGEST, MOST, false> {
    static constexpr int TAKEN_OFF = ZERO_BYTE;
#if defined(__AVX512BW__)
    struct Bytes {
        ints sizes;
        __mmask64 negative;
    };
    static inline Bytes prepare(ints bytes) {
        const __m512i signs = (__m512i)(bytes ^ broadcast_int((int32_t)0x80808080));
        return {(ints)_mm512_abs_epi8(signs), _mm512_movepi8_mask(signs)};
    }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        const __m512i words = (__m512i)broadcast_int(word);
        const __m512i turned = _mm512_mask_sub_epi8(words, bytes.negative, _mm512_setzero_si512(), words);
        return add_pairs(acc, bytes.sizes, (ints)turned);
    }
#else
    struct Bytes {
        ints sizes, signs;
    };
    static inline Bytes prepare(ints bytes) {
        const ints signs = bytes ^ broadcast_int((int32_t)0x80808080);
        return {(ints)_mm256_abs_epi8((__m256i)signs), signs};
    }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        return add_pairs(acc, bytes.sizes,
                         (ints)_mm256_sign_epi8((__m256i)broadcast_int(word), (__m256i)bytes.signs));
    }
#endif
};

#else

template <int LARGEST, int MOST>
struct ByteDots {
    typedef ints Bytes;
    static constexpr int TAKEN_OFF = ZERO_BYTE;
    static inline Bytes prepare(ints bytes) { return bytes ^ broadcast_int((int32_t)0x80808080); }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        const auto q = (int8x16_t)bytes;
        const auto x = (int8x16_t)broadcast_int(word);
        const int16x8_t low = vmull_s8(vget_low_s8(q), vget_low_s8(x));
        return acc + (ints)vpaddlq_s16(vpaddq_s16(low, vmull_high_s8(q, x)));
    }
};

#endif

// The same of signed bytes, prepared, and a word of unsigned ones of any size.
//
//   prepare(bytes)          what is done once for all rows
//   dot(acc, bytes, word)   of prepared bytes

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

struct UnsignedDots {
    typedef ints Bytes;
    static inline Bytes prepare(ints bytes) { return bytes; }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
#if defined(__AVX512VNNI__)
        return (ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)broadcast_int(word), (__m512i)bytes);
#else
        return (ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)broadcast_int(word), (__m256i)bytes);
#endif
    }
};

#elif defined(__AVX512BW__) || defined(__AVX2__)

// In 16 bits, of which products of two bytes take all: sums of two pairs are made in 32.
struct UnsignedDots {
    struct Bytes {
        ints even, odd;
    };
#if defined(__AVX512BW__)
    static inline Bytes prepare(ints bytes) {
        const __m512i v = (__m512i)bytes;
        return {(ints)_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), (ints)_mm512_srai_epi16(v, 8)};
    }
    static inline ints pairs(ints a, ints b) { return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
    static inline Bytes prepare(ints bytes) {
        const __m256i v = (__m256i)bytes;
        return {(ints)_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), (ints)_mm256_srai_epi16(v, 8)};
    }
    static inline ints pairs(ints a, ints b) { return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        const uint32_t halves = (uint32_t)word;
        const ints even = broadcast_int((int32_t)(halves & 0x00ff00ff));
        const ints odd = broadcast_int((int32_t)(halves >> 8 & 0x00ff00ff));
        return acc + pairs(bytes.even, even) + pairs(bytes.odd, odd);
    }
};

#else

struct UnsignedDots {
    typedef ints Bytes;
    static inline Bytes prepare(ints bytes) { return bytes; }
    static inline ints dot(ints acc, Bytes bytes, int32_t word) {
        const auto x = (uint8x16_t)broadcast_int(word);
        const auto v = (int8x16_t)bytes;
        const auto low = (int16x8_t)vmovl_u8(vget_low_u8(x));  // the same in both halves
        const int16x8_t left = vmovl_s8(vget_low_s8(v)), right = vmovl_high_s8(v);
        const int32x4_t a = vmull_s16(vget_low_s16(left), vget_low_s16(low)), b = vmull_high_s16(left, low);
        const int32x4_t c = vmull_s16(vget_low_s16(right), vget_low_s16(low)), d = vmull_high_s16(right, low);
        return acc + (ints)vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
    }
};

#endif

// Adds to each lane the products of its two signed halves and those of `word`.
static inline ints add_pair(ints acc, ints pairs, int32_t word) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)pairs, (__m512i)broadcast_int(word));
#elif defined(__AVX512BW__)
    return acc + (ints)_mm512_madd_epi16((__m512i)pairs, (__m512i)broadcast_int(word));
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)pairs, (__m256i)broadcast_int(word));
#elif defined(__AVX2__)
    return acc + (ints)_mm256_madd_epi16((__m256i)pairs, (__m256i)broadcast_int(word));
#else
    const auto v = (int16x8_t)pairs, x = (int16x8_t)broadcast_int(word);
    return acc + (ints)vpaddq_s32(vmull_s16(vget_low_s16(v), vget_low_s16(x)), vmull_high_s16(v, x));
#endif
}

// LANES signed bytes.
static inline ints load_signed_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    uint64_t bytes = 0;
    std::memcpy(&bytes, from, 4);
    return (ints)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes))));
#endif
}

// The lowest byte of each lane.
static inline void store_bytes(void* to, ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    const __m256i low = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(255));
    const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(pairs, pairs));
#else
    const uint16x4_t pairs = vmovn_u32((uint32x4_t)v);
    const uint8x8_t found = vmovn_u16(vcombine_u16(pairs, pairs));
    std::memcpy(to, &found, 4);
#endif
}

}  // namespace tessera
