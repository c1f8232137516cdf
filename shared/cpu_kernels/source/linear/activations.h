// Activations of a vector of sums, in float32.
#pragma once

#include "../arithmetic/exponential.h"

namespace tessera {

static inline floats sigmoid(floats x) { return reciprocal(exp(-x) + 1.0f); }

// x Phi(x) (Hendrycks and Gimpel, 2016). The error function to 1.5e-7: Abramowitz and Stegun, 7.1.26.
static inline floats gelu(floats x) {
    const floats distance = max(x, -x) * 0.70710678118654752f;
    const floats z = distance > 1e4f ? broadcast(1e4f) : distance;  // what a reciprocal is taken of is finite
    const floats t = reciprocal(fused(z, broadcast(0.3275911f), broadcast(1.0f)));
    floats p = fused(t, broadcast(1.061405429f), broadcast(-1.453152027f));
    p = fused(p, t, broadcast(1.421413741f));
    p = fused(p, t, broadcast(-0.284496736f));
    p = fused(p, t, broadcast(0.254829592f));
    const floats rest = p * t * exp(-z * z);  // 1 - erf(|x| / sqrt(2))
    return x * 0.5f * (x < 0.0f ? rest : 2.0f - rest);
}

// The same with a hyperbolic tangent in place of the error function.
static inline floats gelu_tanh(floats x) {
    return x * sigmoid(x * 1.5957691216057308f * fused(x * x, broadcast(0.044715f), broadcast(1.0f)));
}

// The same with a logistic function.
static inline floats quick_gelu(floats x) { return x * sigmoid(x * 1.702f); }

}  // namespace tessera
