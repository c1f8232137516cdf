// Attention over a cache of codes: against whole numbers added up one by one, bit for bit.
#pragma once

#include "../attention/coded_attention.h"
#include "check_attention.h"

namespace self_test {

// A cache of codes for one sequence, its blocks in disorder, all of its bytes anything.
template <class T>
struct CodedPaged {
    int64_t block;  // tokens
    std::vector<int32_t> table, kept;
    std::vector<uint64_t> memory;
    tessera::Cache cache;

    CodedPaged(int64_t tokens, int64_t pages, int64_t heads, int64_t real, std::vector<int32_t> kept_elements)
        : block(pages * PAGE), kept(std::move(kept_elements)) {
        const int64_t blocks = (tokens + block - 1) / block, size = (real + LANES - 1) / LANES * LANES;
        for (int64_t i = 0; i < blocks; i++) table.push_back((int32_t)(blocks - i));
        cache = {nullptr, pages, heads, size, real, kept.data(), (int64_t)kept.size() / heads, 1};
        memory.resize((blocks + 1) * heads * pages * tessera::coded_page_bytes<T>(cache) / 8);
        for (auto& word : memory) word = (uint64_t)numbers()() << 32 | numbers()();
        cache.base = memory.data();
    }
    CodedPaged(const CodedPaged&) = delete;

    int64_t slot(int64_t token) const { return table[token / block] * block + token % block; }
    tessera::CodedPage page(int64_t token, int64_t head) const {
        return tessera::coded_page_at<T>(cache, slot(token), head);
    }
    bool keeps(int64_t head, int64_t d) const {
        const auto* from = cache.kept + head * cache.kept_count;
        return std::find(from, from + cache.kept_count, (int32_t)d) != from + cache.kept_count;
    }

    void write(const Matrix& keys, const Matrix& values, int64_t first = 0) {
        for (int64_t t = 0; t < keys.rows; t++) {
            const int64_t to = slot(first + t);
            const Matrix k{columns(keys, t)}, v{columns(values, t)};
            tessera_kv_write(TYPE<T>, elements<T>(k).data(), elements<T>(v).data(), &to, 1, &cache);
        }
    }
    static Matrix columns(const Matrix& from, int64_t row) {
        Matrix to(1, from.columns);
        std::copy_n(from[row], from.columns, to[0]);
        return to;
    }
};

// The step of numbers, and what each of them is in steps; `most`: the largest code.
inline float codes_of(const std::vector<float>& x, int most, std::vector<int64_t>& codes) {
    float largest = 0;
    for (float v : x) largest = std::max(largest, std::fabs(v));
    codes.assign(x.size(), 0);
    if (largest < 0x1p-100f) return 0;
    for (size_t i = 0; i < x.size(); i++) codes[i] = (int64_t)std::nearbyint((double)x[i] * ((float)most / largest));
    return largest / (float)most;
}

// One head of one token's query [size], as the comment of `coded_products.h` says; out: [size].
template <class T>
void attend_codes(const tessera::Attention& call, const CodedPaged<T>& paged, const Matrix& keys, const Matrix& values,
                  const typename T::Element* query, int64_t head, int64_t position, int64_t all, float sink,
                  typename T::Element* out) {
    using namespace tessera;
    const int64_t real = paged.cache.real, kv = head / (call.q_heads / paged.cache.heads);
    std::vector<float> q(real), sums(real, 0.0f);
    std::vector<int64_t> q_codes, codes;
    for (int64_t d = 0; d < real; d++) q[d] = paged.keeps(kv, d) ? 0 : T::widen(query[d]);
    const float q_step = codes_of(q, 127, q_codes);
    float highest[LANES], totals[PAGE] = {}, factors[LANES];
    std::fill_n(highest, LANES, call.sinks ? sink * LOG2_E : -1e30f);
    if (call.sinks) totals[0] = 1;
    const int64_t last = all ? all : position + 1, oldest = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
    for (int64_t strip = oldest / STRIP * STRIP; strip < last; strip += STRIP) {
        const int64_t keys_of = std::min<int64_t>(STRIP, (last - strip + PAGE - 1) / PAGE * PAGE);
        alignas(64) float scores[STRIP] = {};
        std::vector<float> scales(STRIP, 0.0f), weights(STRIP, 0.0f);
        std::vector<std::vector<int64_t>> v_codes(STRIP, std::vector<int64_t>(real, 0));
        for (int64_t i = 0; i < keys_of && strip + i < keys.rows; i++) {
            std::vector<float> k(real), v(real);
            for (int64_t d = 0; d < real; d++) {
                k[d] = paged.keeps(kv, d) ? 0 : (float)keys[strip + i][kv * real + d];
                v[d] = (float)values[strip + i][kv * real + d];
            }
            const float step = codes_of(k, 127, codes);
            scales[i] = codes_of(v, 127, v_codes[i]);
            int64_t sum = 0;
            for (int64_t d = 0; d < real; d++) sum += codes[d] * q_codes[d];
            scores[i] = (float)sum * (step * q_step);
            for (int64_t j = 0; j < paged.cache.kept_count; j++) {
                const int32_t d = paged.cache.kept[kv * paged.cache.kept_count + j];
                if (d >= 0) scores[i] = std::fma((float)keys[strip + i][kv * real + d], T::widen(query[d]), scores[i]);
            }
        }
        const Seen seen(call, position, all, strip);
        raise_highest<NeverSleeps>(call, 0, 1, &seen, scores, {highest, totals}, factors);
        for (float& total : totals) total *= factors[0];
        for (int64_t i = seen.from; i < seen.to; i++) {
            const floats t = fused(broadcast(scores[i]), broadcast(softmax_scale(call)), broadcast(-highest[0]));
            const float weight = power_of_two_in_short(t)[0];
            totals[i % PAGE] += weight;
            weights[i] = weight > 0 ? weight * scales[i] : 0;
        }
        const float step = codes_of(weights, 255, codes);
        for (int64_t d = 0; d < real; d++) {
            int64_t sum = 0;
            for (int64_t i = 0; i < keys_of; i++) sum += codes[i] * v_codes[i][d];
            sums[d] = std::fma((float)sum, step, sums[d] * factors[0]);
        }
    }
    const float inverse = 1.0f / sum_of(totals);
    for (int64_t d = 0; d < real; d++) out[d] = element<T>((double)(sums[d] * inverse));
}

template <class T>
void check_coded_attention_of(Check& check, Check& near, const plain::Attention& how, int64_t pages,
                              const std::vector<int32_t>& kept, double bias) {
    const int64_t length = 2 * tessera::STRIP + 2 * PAGE + 3, width = how.heads * how.size;
    CodedPaged<T> paged(length, pages, how.heads, how.size, kept);
    Matrix keys = drawn<T>(length, width), values = drawn<T>(length, width);
    for (int64_t t = 0; t < length; t++)
        for (int64_t c = 0; c < width; c++)
            if (paged.keeps(c / how.size, c % how.size)) keys[t][c] += bias;
    keys = rounded<T>(keys);
    paged.write(keys, values);
    const Task tasks[] = {{0, 1, 0}, {0, PAGE + 1, 0}, {PAGE - 1, 1, 0}, {tessera::STRIP - 2, 19, 0}, {length - 1, 1, 0},
                          {length - 41, 41, 0}, {0, 3, length}, {0, PAGE, PAGE + 1}};
    for (const Task& task : tasks) {
        if (task.all && how.window) continue;
        const Matrix q = drawn<T>(task.tokens, how.q_heads * how.size);
        const auto in = elements<T>(q);
        Elements<T> out(in.size()), right(in.size()), alone(in.size());
        const auto run = [&](const Elements<T>& from, int64_t first, int64_t tokens, Elements<T>& to) {
            const int32_t numbers[] = {0, (int32_t)first, (int32_t)tokens, (int32_t)(task.position + first),
                                       (int32_t)task.all};
            tessera::Attention call{};
            call.q = from.data(), call.out = to.data(), call.q_stride = call.out_stride = q.columns;
            call.table = paged.table.data(), call.tasks = numbers, call.num_tasks = 1, call.q_heads = how.q_heads;
            call.scale = (float)how.scale, call.softcap = (float)how.softcap, call.window = how.window;
            call.sinks = how.sinks;
            tessera_attention(TYPE<T>, &call, &paged.cache);
            return call;
        };
        const auto call = run(in, 0, task.tokens, out);
        for (int64_t t = 0; t < task.tokens; t++) {
            run(in, t, 1, alone);
            if (t % 3 == 0 || t + 1 == task.tokens)
                for (int64_t h = 0; h < how.q_heads; h++) {
                    const int64_t place = t * q.columns + h * how.size;
                    attend_codes<T>(call, paged, keys, values, &in[place], h, task.position + t, task.all,
                                    how.sinks ? how.sinks[h] : 0, &right[place]);
                }
            else
                std::copy_n(&out[t * q.columns], q.columns, &right[t * q.columns]);
        }
        check.same(out, right, 0, "whole numbers one by one");
        check.same(alone, out, 0, "a token alone");
        // Of codes of 8 bits: a score is off by about a part of 127 of its length.
        near.near<T>(out, attended(how, q, keys, values, task), TOLERANCE<T> + 0.05);
    }
}

// Whatever lies beside what a row sees, in its page or in those after it, may be no number.
template <class T>
void check_unseen_codes(Check& check) {
    const int64_t size = 24, length = tessera::STRIP + PAGE + 5, seen = tessera::STRIP + 3;
    const plain::Attention how{4, 2, size, 0.2};
    CodedPaged<T> clean(length, 1, how.heads, size, {3, 15, 3, -1}), dirty(length, 1, how.heads, size, {3, 15, 3, -1});
    Matrix keys = drawn<T>(length, 2 * size), values = drawn<T>(length, 2 * size);
    clean.write(keys, values);
    for (int64_t t = seen; t < length; t++)
        for (int64_t d = t % size; d < 2 * size; d += size) keys[t][d] = NAN, values[t][d] = t % 2 ? NAN : INFINITY;
    dirty.write(keys, values);
    const auto q = elements<T>(drawn<T>(2, how.q_heads * size));
    const int32_t task[] = {0, 0, 2, (int32_t)seen - 1, 0};
    Elements<T> right(q.size()), found(q.size());
    for (auto* which : {&clean, &dirty}) {
        tessera::Attention call{};
        call.q = q.data(), call.out = which == &clean ? right.data() : found.data();
        call.q_stride = call.out_stride = how.q_heads * size, call.table = which->table.data();
        call.tasks = task, call.num_tasks = 1, call.q_heads = how.q_heads, call.scale = 0.2f;
        tessera_attention(TYPE<T>, &call, &which->cache);
    }
    std::vector<int> spoilt, all(how.q_heads * size, 1);
    for (size_t i = how.q_heads * size; i < found.size(); i++) spoilt.push_back(std::isnan(T::widen(found[i])));
    check.same(spoilt, all, 0, "a row that sees what is no number");
    right.resize(how.q_heads * size), found.resize(how.q_heads * size);
    check.same(found, right, 0, "a row that does not see what is no number");
}

template <class T>
void check_coded_cache() {
    Check check("kv codes", TYPE<T>);
    for (int64_t size : {7, LANES, 40}) {
        const int64_t length = PAGE + 3;
        CodedPaged<T> paged(length, 1, 1, size, {2, 5});
        const Matrix keys = drawn<T>(length, size), values = drawn<T>(length, size);
        paged.write(keys, values);
        for (int64_t t = 0; t < length; t++) {
            Elements<T> k(size), v(size), right_k(size), right_v(size);
            const int64_t slot = paged.slot(t);
            tessera_kv_read(TYPE<T>, k.data(), v.data(), &slot, 1, &paged.cache);
            std::vector<float> key(size), value(size);
            for (int64_t d = 0; d < size; d++) key[d] = paged.keeps(0, d) ? 0 : (float)keys[t][d], value[d] = (float)values[t][d];
            std::vector<int64_t> codes;
            float step = codes_of(key, 127, codes);
            for (int64_t d = 0; d < size; d++)
                right_k[d] = element<T>(paged.keeps(0, d) ? keys[t][d] : (double)((float)codes[d] * step));
            step = codes_of(value, 127, codes);
            for (int64_t d = 0; d < size; d++) right_v[d] = element<T>((double)((float)codes[d] * step));
            check.same(k, right_k, 0, "keys");
            check.same(v, right_v, 0, "values");
        }
    }
}

template <class T>
void check_coded_attention() {
    check_coded_cache<T>();
    Check check("attention, codes", TYPE<T>), near("codes, numbers", TYPE<T>);
    check_unseen_codes<T>(check);
    const float sinks[] = {0.5f, -3, 2, 0, 4, 1, 0.25f};
    for (int64_t size : {7, 40, 64, 128}) {
        plain::Attention how{6, 2, size, 1 / std::sqrt((double)size)};
        check_coded_attention_of<T>(check, near, how, 1, {}, 0);
        check_coded_attention_of<T>(check, near, how, 3, {1, 4, 0, -1}, 20);
        how.window = PAGE + 3;
        check_coded_attention_of<T>(check, near, how, 2, {}, 0);
        how.softcap = 1.5;
        how.sinks = sinks;
        check_coded_attention_of<T>(check, near, how, 1, {2, 6}, 40);
    }
    check_coded_attention_of<T>(check, near, {7, 1, 16, 0.25}, 1, {}, 0);
    check_coded_attention_of<T>(check, near, {3, 3, 16, 0.25}, 1, {}, 0);
}

}  // namespace self_test
