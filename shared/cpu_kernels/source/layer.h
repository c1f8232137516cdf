// A decoder layer of a Llama in one call: the kernels one after the other, on memory that all layers
// of a step share.
#pragma once

#include "attention/attention.h"
#include "linear/linear.h"
#include "rows.h"
#include "linear/segments.h"

namespace tessera {

struct Layer {
    Linear qkv, output, gate_up, down;
    const void *post_norm, *after_norm;  // after attention, and after the layer
    const void *q_norm, *k_norm;         // or null
    int64_t window;
    float eps;
};

struct LayerStep {
    RopeWrite rope;       // but for the layer's norms; its rows are what `qkv` gives
    Attention attention;  // but for the layer's window
    void *normed, *residual;  // [rows, hidden]: in and out
    void* gated;              // [rows, outputs of gate_up]
    int64_t rows;
};

}  // namespace tessera
