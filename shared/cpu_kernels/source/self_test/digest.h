// What kernels give, as one number for each element type: equal whatever compiler made them, and in portable arithmetic
// (`TESSERA_PORTABLE`) on every machine and for every set of instructions. The sizes are those of no vector, so that every
// kernel has something left over.
#pragma once

#include "check_attention.h"
#include "check_segments.h"

namespace self_test {

// FNV-1a (Fowler, Noll, Vo), 64 bits.
class Digest {
public:
    template <class E>
    void add(const std::vector<E>& values) {
        const auto* bytes = (const unsigned char*)values.data();
        for (size_t i = 0; i < values.size() * sizeof(E); i++) state_ = (state_ ^ bytes[i]) * 0x100000001b3;
    }
    uint64_t value() const { return state_; }

private:
    uint64_t state_ = 0xcbf29ce484222325;
};

template <class T>
void add_linear(Digest& digest) {
    typedef typename T::Element Element;
    for (int64_t inputs : {38, 200})
        for (int64_t rows : {1, 2, 7, 45, 350}) {
            const int64_t outputs = 101;
            const auto x = elements<T>(drawn<T>(rows, inputs));
            const Matrix w = drawn_weight<T>(2 * outputs, inputs), bias = drawn<Float32>(1, 2 * outputs);
            for (int kind : {tessera::PLAIN, tessera::SWIGLU, tessera::GELU, tessera::GELU_TANH, tessera::QUICK_GELU}) {
                Packed<T> packed(w, bias[0], kind);
                digest.add(applied<Element>(TYPE<T>, packed.layer, x, 0, rows));
                if (kind != tessera::PLAIN) continue;
                packed.layer.result = tessera::WIDE;
                digest.add(applied<float>(TYPE<T>, packed.layer, x, 0, rows));
                packed.layer.result = tessera::LARGEST;
                digest.add(applied<Largest>(TYPE<T>, packed.layer, x, 0, rows));
            }
        }
}

template <class T>
void add_adapters(Digest& digest) {
    const int64_t inputs = 70, outputs = 101;
    const Packed<T> packed(drawn_weight<T>(outputs, inputs), nullptr, tessera::PLAIN);
    const DrawnAddition<T> some(5, inputs, 0, outputs, 0), others(16, inputs, 30, 40, 0);
    const Adapter adapters[2] = {{{{some.packed.data(), 1}}}, {{{others.packed.data(), 1}}}};
    const Adapter* of_segments[] = {&adapters[0], &adapters[1]};
    const int64_t rows = 7;
    const DrawnSegments segments(rows, {{0, 1, 2, 3, 5, 6}, {2, 4, 5}});
    const auto x = elements<T>(drawn<T>(rows, inputs));
    Elements<T> y(rows * outputs);
    tessera_adapted_linear(TYPE<T>, &packed.layer, &segments.call, of_segments, x.data(), y.data(), rows, inputs, outputs);
    digest.add(y);
    const DrawnSegments one(1, {{0}, {0}});
    tessera_adapted_linear(TYPE<T>, &packed.layer, &one.call, of_segments, x.data(), y.data(), 1, inputs, outputs);
    digest.add(y);
}

template <class T>
void add_norms(Digest& digest) {
    for (int64_t size : {7, 40, 101, 896}) {
        const int64_t rows = 3;
        const auto x = elements<T>(drawn<T>(rows, size)), weight = elements<T>(drawn<T>(1, size));
        const auto bias = elements<T>(drawn<T>(1, size));
        auto residual = elements<T>(drawn<T>(rows, size)), out = x;
        tessera_rms_norm(TYPE<T>, x.data(), weight.data(), EPS, rows, size, out.data());
        digest.add(out);
        tessera_add_rms_norm(TYPE<T>, x.data(), residual.data(), weight.data(), EPS, rows, size, out.data());
        digest.add(out);
        tessera_add_layer_norm(TYPE<T>, x.data(), residual.data(), weight.data(), bias.data(), EPS, rows, size,
                               out.data());
        digest.add(out);
        digest.add(residual);
    }
}

template <class T>
void add_attention(Digest& digest) {
    const float sinks[] = {0.5f, -3, 2, 0, 4, 1};
    for (int64_t size : {40, 64, 72}) {
        const int64_t length = 300;
        plain::Attention how{6, 2, size, 1 / std::sqrt((double)size)};
        Paged<T> paged(length, 2, how.heads, size);
        const Matrix keys = drawn<T>(length, how.heads * size);
        paged.write(keys, drawn<T>(length, how.heads * size), 0);
        for (int variant = 0; variant < 3; variant++) {
            if (variant == 1) how.window = 19;
            if (variant == 2) how.softcap = 1.5, how.sinks = sinks;
            for (const Task& task : {Task{0, 1, 0}, Task{120, 21, 0}, Task{length - 2, 2, 0}, Task{0, 40, 200}}) {
                if (task.all && how.window) continue;
                const auto q = elements<T>(drawn<T>(task.tokens, how.q_heads * size));
                digest.add(attended<T>(how, paged, q, task));
            }
        }
    }
}

template <class T>
void add_layer(Digest& digest) {
    SmallLayer<T> layer;
    const int64_t first = 19, rows = 33, hidden = layer.HIDDEN, size = layer.how.size;
    const Matrix keys = drawn<T>(first, layer.width), values = drawn<T>(first, layer.width);
    const auto cos = elements<T>(drawn<T>(rows, size, 0.5)), sin = elements<T>(drawn<T>(rows, size, 0.5));
    auto normed = elements<T>(drawn<T>(rows, hidden)), residual = elements<T>(drawn<T>(rows, hidden));
    Paged<T> paged(first + rows, 2, layer.how.heads, size);
    paged.write(keys, values, 0);
    layer.run(paged, first, rows, normed.data(), residual.data(), cos.data(), sin.data());
    digest.add(normed);
    digest.add(residual);
}

template <class T>
uint64_t digest_of_all() {
    numbers().seed(7);
    Digest digest;
    add_linear<T>(digest);
    add_norms<T>(digest);
    add_attention<T>(digest);
    add_layer<T>(digest);
    add_adapters<T>(digest);
    return digest.value();
}

}  // namespace self_test
