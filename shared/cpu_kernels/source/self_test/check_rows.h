// Norms, rotation and the cache.
#pragma once

#include "check.h"

namespace self_test {

template <class T>
void check_norms() {
    Check add_layer("add_layer_norm", TYPE<T>), add_rms("add_rms_norm", TYPE<T>),
        rms("rms_norm", TYPE<T>);
    for (int64_t size : {1, 2, LANES - 1, LANES, 5 * LANES + 3, 900})
        for (int64_t rows : {1, 3, 150}) {
            const Matrix x = drawn<T>(rows, size), before = drawn<T>(rows, size);
            const Matrix sums = rounded<T>(sum(before, x));
            const Matrix weight = drawn<T>(1, size), bias = drawn<T>(1, size);
            const auto in = elements<T>(x), w = elements<T>(weight), b = elements<T>(bias);
            Elements<T> out(rows * size), alone(size);
            tessera_rms_norm(TYPE<T>, in.data(), w.data(), EPS, rows, size, out.data());
            rms.near<T>(out, norm(x, weight[0], nullptr, EPS));
            tessera_rms_norm(TYPE<T>, in.data() + (rows - 1) * size, w.data(), EPS, 1, size,
                             alone.data());
            rms.same(alone, out, (rows - 1) * size, "a row alone");

            auto residual = elements<T>(before);
            tessera_add_rms_norm(TYPE<T>, in.data(), residual.data(), w.data(), EPS, rows, size,
                                 out.data());
            add_rms.same(residual, elements<T>(sums), 0, "sums");
            add_rms.near<T>(out, norm(sums, weight[0], nullptr, EPS));

            residual = elements<T>(before);
            tessera_add_layer_norm(TYPE<T>, in.data(), residual.data(), w.data(), b.data(), EPS,
                                   rows, size, out.data());
            add_layer.same(residual, elements<T>(sums), 0, "sums");
            add_layer.near<T>(out, norm(sums, weight[0], bias[0], EPS));
            tessera_add_layer_norm(TYPE<T>, nullptr, residual.data() + (rows - 1) * size, w.data(),
                                   b.data(), EPS, 1, size, alone.data());
            add_layer.same(alone, out, (rows - 1) * size, "a row alone");
        }
}

// A cache for one sequence, its blocks in disorder, full of numbers that nobody should see.
template <class T>
struct Paged {
    int64_t block;  // tokens
    std::vector<int32_t> table;
    Elements<T> memory;
    tessera::Cache cache;

    Paged(int64_t tokens, int64_t pages, int64_t heads, int64_t real) : block(pages * PAGE) {
        const int64_t blocks = (tokens + block - 1) / block;
        const int64_t size = (real + LANES - 1) / LANES * LANES;
        for (int64_t i = 0; i < blocks; i++) table.push_back((int32_t)(blocks - i));
        memory.resize((blocks + 1) * heads * pages * 2 * PAGE * size);
        cache = {memory.data(), pages, heads, size, real};
        const Matrix noise = drawn<T>(blocks * block, heads * real);
        write(noise, noise, 0);
    }
    Paged(const Paged&) = delete;

    std::vector<int64_t> slots(int64_t first, int64_t count) const {
        std::vector<int64_t> to;
        for (int64_t t = first; t < first + count; t++)
            to.push_back(table[t / block] * block + t % block);
        return to;
    }

    // keys, values: [tokens, heads * real], of the tokens from `first` on.
    void write(const Matrix& keys, const Matrix& values, int64_t first) {
        tessera_kv_write(TYPE<T>, elements<T>(keys).data(), elements<T>(values).data(),
                         slots(first, keys.rows).data(), keys.rows, &cache);
    }

    void read(int64_t first, int64_t count, Elements<T>& keys, Elements<T>& values) const {
        keys.resize(count * cache.heads * cache.real);
        values.resize(keys.size());
        tessera_kv_read(TYPE<T>, keys.data(), values.data(), slots(first, count).data(), count,
                        &cache);
    }
};

template <class T>
void check_cache() {
    Check check("kv_write, kv_read", TYPE<T>);
    Elements<T> keys, values;
    for (int64_t real : {1, 7, LANES, 40})
        for (int64_t pages : {1, 3}) {
            const int64_t tokens = 3 * PAGE + 2, width = 2 * real;
            Paged<T> paged(tokens, pages, 2, real);
            const Matrix k = drawn<T>(tokens, width), v = drawn<T>(tokens, width);
            paged.write(k, v, 0);
            const Matrix other_k = drawn<T>(2, width), other_v = drawn<T>(2, width);
            paged.write(other_k, other_v, PAGE - 1);
            paged.read(0, PAGE - 1, keys, values);
            check.same(keys, elements<T>(k), 0, "keys");
            check.same(values, elements<T>(v), 0, "values");
            paged.read(PAGE - 1, 2, keys, values);
            check.same(keys, elements<T>(other_k), 0, "keys overwritten");
            check.same(values, elements<T>(other_v), 0, "values overwritten");
            paged.read(PAGE + 1, tokens - PAGE - 1, keys, values);
            check.same(keys, elements<T>(k), (PAGE + 1) * width, "keys behind");
            check.same(values, elements<T>(v), (PAGE + 1) * width, "values behind");
        }
}

// Columns [first, first + count) of a matrix.
inline Matrix columns_of(const Matrix& from, int64_t first, int64_t count) {
    Matrix to(from.rows, count);
    for (int64_t r = 0; r < from.rows; r++) std::copy_n(from[r] + first, count, to[r]);
    return to;
}

// Rows of one head each.
inline Matrix heads_of(Matrix from, int64_t size) {
    from.rows = from.rows * from.columns / size;
    from.columns = size;
    return from;
}

// Queries or keys [tokens, heads * size] as `rope_write` makes them.
template <class T>
Matrix turned(const Matrix& x, const double* weight, const Matrix* cos, const Matrix& sin,
              int64_t size) {
    Matrix to = x;
    if (weight) to.values = rounded<T>(norm(heads_of(x, size), weight, nullptr, EPS)).values;
    return cos ? rounded<T>(rotated(to, *cos, sin)) : to;
}

// Table: the type of cosines and sines.
template <class T, class Table>
void check_rope_of(Check& check, int64_t size, bool rotates, bool norms) {
    const int64_t tokens = 2 * PAGE + 3, q_heads = 6, heads = 2, all = q_heads + 2 * heads;
    const int64_t width = heads * size;
    const Matrix qkv = drawn<T>(tokens, all * size), weights = drawn<T>(2, size);
    const Matrix cos = drawn<Table>(tokens, size, 0.5), sin = drawn<Table>(tokens, size, 0.5);
    const auto cosines = elements<Table>(cos), sines = elements<Table>(sin);
    const auto both_norms = elements<T>(weights);
    Paged<T> paged(tokens, 2, heads, size);
    const auto slots = paged.slots(0, tokens);
    auto rows = elements<T>(qkv);
    tessera::RopeWrite call{};
    call.qkv = rows.data();
    call.cos = rotates ? cosines.data() : nullptr;
    call.sin = rotates ? sines.data() : nullptr;
    call.slots = slots.data();
    call.q_norm = norms ? both_norms.data() : nullptr;
    call.k_norm = norms ? both_norms.data() + size : nullptr;
    call.tokens = tokens;
    call.q_heads = q_heads;
    call.eps = EPS;
    call.wide = Table::PER_UNIT != T::PER_UNIT;
    tessera_rope_write(TYPE<T>, &call, &paged.cache);

    const Matrix* angles = rotates ? &cos : nullptr;
    const Matrix found = matrix<T>(rows, all * size);
    const Matrix q = columns_of(qkv, 0, q_heads * size);
    const Matrix k = columns_of(qkv, q_heads * size, width);
    check.near<T>(elements<T>(columns_of(found, 0, q.columns)),
                  turned<T>(q, norms ? weights[0] : nullptr, angles, sin, size));
    Elements<T> keys, values;
    paged.read(0, tokens, keys, values);
    check.near<T>(keys, turned<T>(k, norms ? weights[1] : nullptr, angles, sin, size));
    check.same(keys, elements<T>(columns_of(found, q.columns, width)), 0, "keys in the cache");
    check.same(values, elements<T>(columns_of(qkv, q.columns + width, width)), 0, "values");

    auto again = elements<T>(qkv);
    call.tokens = 1;
    for (int64_t t = 0; t < tokens; t++) {
        call.qkv = again.data() + t * all * size;
        call.cos = rotates ? cosines.data() + t * size : nullptr;
        call.sin = rotates ? sines.data() + t * size : nullptr;
        call.slots = &slots[t];
        tessera_rope_write(TYPE<T>, &call, &paged.cache);
    }
    check.same(again, rows, 0, "tokens alone");
}

template <class T>
void check_rope() {
    Check check("rope_write", TYPE<T>);
    for (int64_t size : {2, 40, 2 * LANES, 64})
        for (bool norms : {false, true}) {
            check_rope_of<T, T>(check, size, true, norms);
            check_rope_of<T, Float32>(check, size, true, norms);
            check_rope_of<T, T>(check, size, false, norms);
        }
}

}  // namespace self_test
