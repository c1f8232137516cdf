// Attention over a paged cache, and a whole decoder layer.
#pragma once

#include "check_linear.h"
#include "check_rows.h"

namespace self_test {

// Tokens of a sequence that one task computes; `all`: how many keys each of them sees, 0 where each
// sees those up to its own.
struct Task {
    int64_t position, tokens, all;
};

// A call for queries [tokens, q heads * size] of one task.
template <class T>
tessera::Attention attention_call(const plain::Attention& how, const Paged<T>& paged, const Elements<T>& q,
                                  Elements<T>& out, const int32_t* task) {
    tessera::Attention call{};
    call.q = q.data();
    call.out = out.data();
    call.q_stride = call.out_stride = how.q_heads * how.size;
    call.table = paged.table.data();
    call.tasks = task;
    call.num_tasks = 1;
    call.q_heads = how.q_heads;
    call.scale = (float)how.scale;
    call.softcap = (float)how.softcap;
    call.window = how.window;
    call.sinks = how.sinks;
    return call;
}

template <class T>
Elements<T> attended(const plain::Attention& how, const Paged<T>& paged, const Elements<T>& q,
                     const Task& task) {
    const int32_t numbers[] = {0, 0, (int32_t)task.tokens, (int32_t)task.position,
                               (int32_t)task.all};
    Elements<T> out(q.size());
    const auto call = attention_call<T>(how, paged, q, out, numbers);
    tessera_attention(TYPE<T>, &call, &paged.cache);
    return out;
}

inline Matrix attended(const plain::Attention& how, const Matrix& q, const Matrix& keys,
                       const Matrix& values, const Task& task) {
    Matrix out(q.rows, q.columns);
    for (int64_t t = 0; t < q.rows; t++)
        attend(how, q[t], keys, values, task.position + t, task.all, out[t]);
    return out;
}

template <class T>
void check_attention_of(Check& check, const plain::Attention& how, int64_t pages) {
    const int64_t length = 2 * tessera::STRIP + 2 * PAGE + 3, width = how.heads * how.size;
    Paged<T> paged(length, pages, how.heads, how.size);
    const Matrix keys = drawn<T>(length, width), values = drawn<T>(length, width);
    paged.write(keys, values, 0);
    const Task tasks[] = {{0, 1, 0}, {0, PAGE + 1, 0}, {PAGE - 1, 1, 0}, {PAGE, 5, 0},
                          {tessera::STRIP - 2, 19, 0}, {length - 1, 1, 0}, {length - 7, 7, 0},
                          {0, 3, length}, {0, PAGE, PAGE + 1}};
    for (const Task& task : tasks) {
        if (task.all && how.window) continue;
        const Matrix q = drawn<T>(task.tokens, how.q_heads * how.size);
        const auto in = elements<T>(q), out = attended<T>(how, paged, in, task);
        check.near<T>(out, attended(how, q, keys, values, task));
        for (int64_t t = 0; t < task.tokens; t++) {
            const auto from = in.begin() + t * q.columns;
            const Elements<T> one(from, from + q.columns);
            const auto alone = attended<T>(how, paged, one, {task.position + t, 1, task.all});
            check.same(alone, out, t * q.columns, "a token alone");
        }
    }
}

template <class T>
void check_attention() {
    Check check("attention", TYPE<T>);
    const float sinks[] = {0.5f, -3, 2, 0, 4, 1, 0.25f};
    for (int64_t size : {7, 40, 64, 72, 128})
        for (int64_t pages : {1, 2, 3}) {
            plain::Attention how{6, 2, size, 1 / std::sqrt((double)size)};
            check_attention_of<T>(check, how, pages);
            how.window = PAGE + 3;
            check_attention_of<T>(check, how, pages);
            how.softcap = 1.5;
            how.sinks = sinks;
            check_attention_of<T>(check, how, pages);
        }
    check_attention_of<T>(check, {7, 1, 16, 0.25}, 1);
    check_attention_of<T>(check, {3, 3, 16, 0.25}, 1);
}

// A small Llama's layer with weights, and the same for the plain loops.
template <class T>
struct SmallLayer {
    static constexpr int64_t HIDDEN = 38, GATED = 50;
    plain::Attention how{4, 2, 10, 0.3};
    int64_t queries = how.q_heads * how.size, width = how.heads * how.size;
    Matrix qkv = drawn_weight<T>(queries + 2 * width, HIDDEN);
    Matrix output = drawn_weight<T>(HIDDEN, queries), down = drawn_weight<T>(HIDDEN, GATED);
    Matrix gate_up = drawn_weight<T>(2 * GATED, HIDDEN), bias = drawn<Float32>(1, qkv.rows);
    Matrix norms = drawn<T>(2, HIDDEN), head_norms = drawn<T>(2, how.size);
    Elements<T> norm_elements = elements<T>(norms), head_elements = elements<T>(head_norms);
    Packed<T> packed[4] = {{qkv, bias[0], tessera::PLAIN},
                           {output, nullptr, tessera::PLAIN},
                           {gate_up, nullptr, tessera::SWIGLU},
                           {down, nullptr, tessera::PLAIN}};

    // Applies the layer to tokens [first, first + rows) of the sequence. normed, residual: [rows,
    // HIDDEN], overwritten; cos, sin: of those tokens.
    void run(Paged<T>& paged, int64_t first, int64_t rows, typename T::Element* normed,
             typename T::Element* residual, const typename T::Element* cos,
             const typename T::Element* sin) {
        const auto slots = paged.slots(first, rows);
        const int32_t task[] = {0, 0, (int32_t)rows, (int32_t)first, 0};
        Elements<T> made(rows * qkv.rows), out(rows * queries), gated(rows * GATED);
        tessera::LayerStep step{};
        step.rope = {made.data(), cos,     sin, slots.data(), nullptr,
                     nullptr,     rows, how.q_heads, EPS, 0};
        step.attention.q = made.data();
        step.attention.out = out.data();
        step.attention.q_stride = qkv.rows;
        step.attention.out_stride = queries;
        step.attention.table = paged.table.data();
        step.attention.tasks = task;
        step.attention.num_tasks = 1;
        step.attention.q_heads = how.q_heads;
        step.attention.scale = (float)how.scale;
        step.normed = normed;
        step.residual = residual;
        step.gated = gated.data();
        step.rows = rows;
        const auto* norm = norm_elements.data();
        const auto* head_norm = head_elements.data();
        const tessera::Layer layer{packed[0].layer, packed[1].layer, packed[2].layer,
                                   packed[3].layer, norm, norm + HIDDEN,
                                   head_norm, head_norm + how.size, how.window, EPS};
        tessera_layer(TYPE<T>, &layer, &step, &paged.cache, nullptr, nullptr);
    }

    // What `run` makes of them, given what the cache holds: [tokens, width] each.
    void plainly(const Matrix& keys, const Matrix& values, int64_t first, Matrix& normed,
                 Matrix& residual, const Matrix& cos, const Matrix& sin) const {
        const Matrix made = rounded<T>(linear(normed, qkv, bias[0], tessera::PLAIN));
        const Matrix q = turned<T>(columns_of(made, 0, queries), head_norms[0], &cos, sin, how.size);
        const Matrix k =
            turned<T>(columns_of(made, queries, width), head_norms[1], &cos, sin, how.size);
        const Matrix all_keys = below(keys, k);
        const Matrix all_values = below(values, columns_of(made, queries + width, width));
        const Task task{first, normed.rows, 0};
        const Matrix out = rounded<T>(attended(how, q, all_keys, all_values, task));
        add_norm(linear(out, output, nullptr, tessera::PLAIN), norms[0], normed, residual);
        const Matrix gated = rounded<T>(linear(normed, gate_up, nullptr, tessera::SWIGLU));
        add_norm(linear(gated, down, nullptr, tessera::PLAIN), norms[1], normed, residual);
    }

    static void add_norm(const Matrix& x, const double* weight, Matrix& normed, Matrix& residual) {
        residual = rounded<T>(sum(residual, rounded<T>(x)));
        normed = rounded<T>(norm(residual, weight, nullptr, EPS));
    }

    static Matrix below(Matrix above, const Matrix& rows) {
        above.values.insert(above.values.end(), rows.values.begin(), rows.values.end());
        above.rows += rows.rows;
        return above;
    }
};

template <class T>
void check_layer() {
    Check check("layer", TYPE<T>);
    for (int64_t window : {(int64_t)0, (int64_t)PAGE}) {
        SmallLayer<T> layer;
        layer.how.window = window;
        const int64_t first = PAGE + 3, rows = MANY, hidden = layer.HIDDEN, size = layer.how.size;
        const Matrix keys = drawn<T>(first, layer.width), values = drawn<T>(first, layer.width);
        const Matrix cos = drawn<T>(rows, size, 0.5), sin = drawn<T>(rows, size, 0.5);
        const auto cosines = elements<T>(cos), sines = elements<T>(sin);
        Matrix normed = drawn<T>(rows, hidden), residual = drawn<T>(rows, hidden);
        auto out = elements<T>(normed), sums = elements<T>(residual), alone = out, summed = sums;
        Paged<T> paged(first + rows, 2, layer.how.heads, size);
        paged.write(keys, values, 0);
        layer.run(paged, first, rows, out.data(), sums.data(), cosines.data(), sines.data());
        for (int64_t t = 0; t < rows; t++)
            layer.run(paged, first + t, 1, &alone[t * hidden], &summed[t * hidden],
                      &cosines[t * size], &sines[t * size]);
        check.same(alone, out, 0, "tokens one after the other");
        check.same(summed, sums, 0, "their sums");
        layer.plainly(keys, values, first, normed, residual, cos, sin);
        // Whatever rounds the other way at first is carried through eight kernels.
        check.near<T>(out, normed, 6 * TOLERANCE<T>);
        check.near<T>(sums, residual, 6 * TOLERANCE<T>);
    }
}

}  // namespace self_test
