// Powers of two and of e, and reciprocals, of a vector.
#pragma once

#include "vectors.h"

namespace tessera {

constexpr float LOG2_E = 1.44269504f, LOG2_E_REST = 1.92596299e-8f;  // together log2(e) to 48 bits

// Adding it leaves the nearest integer in the last bits of the sum, and there plus 127, as exponents of float32 have it.
static inline floats rounding() { return broadcast(12582912.0f + 127); }  // 1.5 * 2^23

// 2^rest for a rest within a half of zero, at most 1.9 units in the last place off, and 1 for 0: of such polynomials the
// one whose largest relative error is least.
static inline floats power_of_rest(floats rest) {
    floats p = fused(rest, broadcast(1.326555503e-3f), broadcast(9.671390057e-3f));
    p = fused(p, rest, broadcast(5.550744012e-2f));
    p = fused(p, rest, broadcast(2.402224243e-1f));
    p = fused(p, rest, broadcast(6.931469440e-1f));
    return fused(p, rest, broadcast(1.0f));
}

// The same, at most a part of 2^-13 off.
static inline floats power_of_rest_in_short(floats rest) {
    floats p = fused(rest, broadcast(5.500892967e-2f), broadcast(2.422109720e-1f));
    p = fused(p, rest, broadcast(6.932829288e-1f));
    return fused(p, rest, broadcast(1.0f));
}

// 2^n of the sum of n and `rounding`.
static inline floats power_of_integer(floats shifted) { return (floats)((ints)shifted << 23); }

// 2^t for t below 127; zero below -126, or there and below what is denormal. Not-a-number stays one. of_rest: what
// gives a power of a rest.
template <class Rest>
static inline floats power_of_two_by(Rest of_rest, floats t) {
#if defined(__AVX512F__) && !defined(TESSERA_PORTABLE)
    const floats rest = (floats)_mm512_reduce_ps((__m512)t, 0);  // to nearest: the same bits with fewer instructions
    return (floats)_mm512_scalef_ps((__m512)of_rest(rest), (__m512)(t - rest));
#else
    const floats shifted = t + rounding();
    const floats power = of_rest(t - (shifted - rounding())) * power_of_integer(shifted);
    return t < -126.0f ? floats{} : power;
#endif
}

static inline floats power_of_two(floats t) { return power_of_two_by([](floats x) { return power_of_rest(x); }, t); }
static inline floats power_of_two_in_short(floats t) {
    return power_of_two_by([](floats x) { return power_of_rest_in_short(x); }, t);
}

// e^x; of less than -87 and more than 87 that of these. Not-a-number stays one.
static inline floats exp(floats x) {
    const floats least = broadcast(-87.0f), most = broadcast(87.0f);
    x = x < least ? least : x;
    x = x > most ? most : x;
    const floats shifted = fused(x, broadcast(LOG2_E), rounding());
    const floats n = shifted - rounding();
    const floats rest = fused(x, broadcast(LOG2_E_REST), fused(x, broadcast(LOG2_E), -n));
    return power_of_rest(rest) * power_of_integer(shifted);
}

// 1 / x for x of 1 to 2^126.
static inline floats reciprocal(floats x) {
#if defined(__AVX512F__) && !defined(TESSERA_PORTABLE)
    // From 14 bits, which differ between processors, by a Newton step: a fifth of a division's time.
    const floats near = (floats)_mm512_rcp14_ps((__m512)x);
    return fused(near, fused(-x, near, broadcast(1.0f)), near);
#else
    return 1.0f / x;
#endif
}

}  // namespace tessera
