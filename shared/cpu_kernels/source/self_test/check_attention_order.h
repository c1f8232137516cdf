// Attention's bits: products in steps, tiles and vectors alike, whatever tokens run together; and that what a query does
// not see cannot reach it.
#pragma once

#include "check_attention.h"

namespace self_test {

// The two products of a strip are, bit for bit, those of plain loops in steps.
template <class T, class P>
void check_products_of(Check& check, int64_t size, int count, int64_t rows) {
    const int64_t keys = count * PAGE, each = P::group_rows(rows, 1), steps = (keys + 31) / 32 * 32;
    const auto queries = drawn_bits<T>(rows * size), key_rows = drawn_bits<T>(keys * size);
    const auto weights = drawn_bits<T>(rows * keys), value_columns = drawn_bits<T>(size * keys);
    Elements<T> memory(count * 2 * PAGE * size);
    std::vector<const void*> pages;
    for (int64_t page = 0; page < count; page++) {
        auto* to = &memory[page * 2 * PAGE * size];
        pages.push_back(to);
        for (int64_t token = 0; token < PAGE; token++)
            for (int64_t d = 0; d < size; d++) {
                to[tessera::key_place<T>(token, d)] = key_rows[(page * PAGE + token) * size + d];
                to[tessera::value_place<T>(token, d, size)] = value_columns[d * keys + page * PAGE + token];
            }
    }
    const tessera::DenormalsAreZero<T> flushed;
    std::vector<typename P::Word> q(each * P::words(size)), w(each * P::words(tessera::STRIP));
    std::vector<float> scores(each * tessera::STRIP), sums(each * size);
    for (int64_t r = 0; r < rows; r++) {
        P::put_query(&queries[r * size], size, &q[r * P::words(size)]);
        for (int64_t key = 0; key < steps; key += LANES) {
            float some[LANES] = {};
            for (int64_t i = key; i < std::min(key + LANES, keys); i++) some[i - key] = T::widen(weights[r * keys + i]);
            P::put_weights(&w[r * P::words(tessera::STRIP)], key, tessera::load<tessera::floats>(some));
        }
    }
    P products(each, size);
    products.prepare(pages.data(), count, nullptr);
    products.score(q.data(), (int)rows, scores.data(), true);
    products.mix(w.data(), (int)rows, sums.data(), true);
    const auto right = sums_in_steps<T>(queries, key_rows, size);
    for (int64_t r = 0; r < rows; r++) {
        const auto from = scores.begin() + r * tessera::STRIP;
        check.same(std::vector<float>(from, from + keys), right, r * keys, "scores");
    }
    sums.resize(rows * size);
    check.same(sums, sums_in_steps<T>(weights, value_columns, keys), 0, "sums of values");
}

template <class T, class P>
void check_products(Check& check) {
    for (int64_t size : {16, 32, 48, 64, 80, 128, 256})
        for (int count : {1, 2, 3, 8})
            for (int64_t rows : {1, 2, 5, 6, 7, 16, 17, 24}) check_products_of<T, P>(check, size, count, rows);
}

// A task of many rows and each of its tokens by other tasks, and by the other products, are the same bits.
template <class T>
void check_tasks_of(Check& check, const plain::Attention& how, int64_t all) {
    const int64_t length = 2 * tessera::STRIP + 3 * PAGE + 5, width = how.heads * how.size, tokens = 37;
    const int64_t first = all ? 0 : length - tokens, columns = how.q_heads * how.size;
    Paged<T> paged(length, 1, how.heads, how.size);
    const Matrix keys = drawn<T>(length, width), values = drawn<T>(length, width);
    paged.write(keys, values, 0);
    const auto q = elements<T>(drawn<T>(tokens, columns));
    const auto whole = attended<T>(how, paged, q, {first, tokens, all});
    for (int64_t begin = 0, count = 1; begin < tokens; begin += count, count = count % 7 + 1) {
        count = std::min(count, tokens - begin);
        const Elements<T> part(q.begin() + begin * columns, q.begin() + (begin + count) * columns);
        check.same(attended<T>(how, paged, part, {first + begin, count, all}), whole, begin * columns, "a chunk");
    }
#if TESSERA_TILES
    if constexpr (tessera::TILES_MULTIPLY<T>) {
        const int32_t task[] = {0, 0, (int32_t)tokens, (int32_t)first, (int32_t)all};
        for (int64_t head = 0; head < how.heads; head++) {
            Elements<T> tiles(q.size()), vectors(q.size());
            auto call = attention_call<T>(how, paged, q, tiles, task);
            tessera::attend<T, tessera::AttentionByTiles>(call, paged.cache, task, head);
            call.out = vectors.data();
            tessera::attend<T, tessera::AttentionByVectors<T>>(call, paged.cache, task, head);
            check.same(tiles, vectors, 0, "tiles and vectors");
        }
    }
#endif
}

// Tokens that a query does not see, its own sequence's and a stranger's, may be anything: even no numbers, which a
// weight of zero would not take away.
template <class T>
void check_unseen_of(Check& check, const plain::Attention& how, int64_t seen) {
    const int64_t length = tessera::STRIP + 2 * PAGE + 9, width = how.heads * how.size;
    Paged<T> clean(length, 2, how.heads, how.size), dirty(length, 2, how.heads, how.size);
    const Matrix keys = drawn<T>(length, width), values = drawn<T>(length, width);
    Matrix bad_keys = keys, bad_values = values;
    const int64_t oldest = how.window ? seen - how.window : 0;
    for (int64_t t = 0; t < length; t++)
        if (t < oldest || t >= seen)
            for (int64_t d = 0; d < width; d++) {
                bad_keys[t][d] = NAN;
                bad_values[t][d] = t % 2 ? NAN : INFINITY;
            }
    clean.write(keys, values, 0);
    dirty.write(bad_keys, bad_values, 0);
    const int64_t tokens = std::min<int64_t>(8, length - seen + 1);
    const auto q = elements<T>(drawn<T>(tokens, how.q_heads * how.size));
    // The first token is the last one that may see all of `seen`; those after it see what is no number.
    auto right = attended<T>(how, clean, q, {seen - 1, tokens, 0}), found = attended<T>(how, dirty, q, {seen - 1, tokens, 0});
    right.resize(how.q_heads * how.size);
    found.resize(how.q_heads * how.size);
    check.same(found, right, 0, "a row that does not see what is no number");
    if (how.window) return;
    right = attended<T>(how, clean, q, {0, tokens, seen});
    found = attended<T>(how, dirty, q, {0, tokens, seen});
    check.same(found, right, 0, "rows that see a part of a page");
}

template <class T>
void check_attention_order() {
    if constexpr (tessera::IN_STEPS<T>) {
        Check products("attention, steps", TYPE<T>);
        check_products<T, tessera::AttentionByVectors<T>>(products);
#if TESSERA_TILES
        check_products<T, tessera::AttentionByTiles>(products);
#endif
    }
    Check tasks("attention, chunks", TYPE<T>), unseen("attention, unseen", TYPE<T>);
    for (int64_t share = 1; share <= 8; share++)
        for (int64_t size : {16, 64, 72, 80}) {
            plain::Attention how{2 * share, 2, size, 1 / std::sqrt((double)size)};
            check_tasks_of<T>(tasks, how, 0);
            check_tasks_of<T>(tasks, how, 2 * tessera::STRIP + 7);
            for (int64_t seen : {1, PAGE, PAGE + 3, tessera::STRIP - 1, tessera::STRIP, tessera::STRIP + PAGE + 7})
                check_unseen_of<T>(unseen, how, seen);
            how.window = PAGE + 3;
            check_tasks_of<T>(tasks, how, 0);
            check_unseen_of<T>(unseen, how, tessera::STRIP + PAGE + 7);
        }
    for (int64_t size : {7, 256}) check_tasks_of<T>(tasks, {4, 1, size, 0.1, 2.0}, 0);
}

}  // namespace self_test
