// Attention over a paged cache (`pages.h`): scores, their softmax (`attention_call.h`) and sums of values, strip by
// strip of keys, by vectors or by tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_call.h"
#include "../arithmetic/lines.h"
#include "../pool.h"
#include "tile_attention.h"
#include "../linear/tile_linear.h"
#include "vector_attention.h"

namespace tessera {

constexpr int64_t ATTENTION_TILES_FROM = 6;  // rows of a task: of fewer the same sums come as fast by vectors

// A token's query of one head.
template <class T>
struct QueryRow {
    const typename T::Element* query;
    typename T::Element* out;
    int64_t position, head;
};

// What one thread needs for a task; kept from call to call.
template <class T, class P>
struct Workspace {
    Lines<typename P::Word> queries, weights, lone_weights;
    Lines<float> scores, sums, lone_sums, highest, totals;
    Lines<typename T::Element> pages;
    std::vector<QueryRow<T>> rows;
};

// Whether a page's values are all finite numbers.
template <class T>
static inline bool is_finite(const void* page, int64_t size) {
    const ints exponent = broadcast_int(0x7f800000);
    const auto* values = (const typename T::Element*)page + PAGE * size;
    ints strange = {};
    for (int64_t i = 0; i < PAGE * size; i += LANES * T::PER_UNIT) {
        const ints units = load<ints>(values + i);
        strange |= (units & exponent) == exponent;
        if (T::PER_UNIT == 2) strange |= ((units << 16) & exponent) == exponent;
    }
    for (int i = 0; i < LANES; i++)
        if (strange[i]) return false;
    return true;
}

// The rows of one task that share a head of keys, in groups of like size. P: what multiplies them.
template <class T, class P>
class TaskAttention {
    typedef typename T::Element Element;
    typedef typename P::Word Word;
    static constexpr int64_t GROUP_ROWS = (P::MOST_ROWS + LANES - 1) / LANES * LANES;

public:
    TaskAttention(const Attention& call, const Cache& cache, const int32_t* task, int64_t head, Workspace<T, P>& space)
        : call_(call), cache_(cache), head_(head), size_(cache.size), table_(call.table + task[0] * call.table_stride),
          tokens_(task[2]), position_(task[3]), all_(task[4]), rows_(tokens_ * call.q_heads / cache.heads),
          groups_((rows_ + P::MOST_ROWS - 1) / P::MOST_ROWS), each_(P::group_rows(rows_, groups_)), space_(space),
          products_(each_, size_) {
        weights_ = space.weights.fit(each_ * P::words(STRIP));
        scores_ = space.scores.fit(each_ * STRIP);
        sums_ = space.sums.fit(groups_ * each_ * size_);
        std::fill_n(sums_, groups_ * each_ * size_, 0.0f);
        gather(task[1]);
    }

    void run() {
        const int64_t keys = all_ ? all_ : position_ + tokens_;
        const int64_t oldest = call_.window ? std::max<int64_t>(0, position_ - call_.window + 1) : 0;
        find_pages(oldest / STRIP, keys, next_);
        for (int64_t strip = oldest / STRIP * STRIP; strip < keys; strip += STRIP) {
            std::copy_n(next_, STRIP_PAGES, pages_);
            find_pages(strip / STRIP + 1, keys, next_);
            count_ = (int)std::min<int64_t>(STRIP_PAGES, (keys - strip + PAGE - 1) / PAGE);
            const bool finite = is_safe(strip);
            products_.prepare(pages_, count_, next_);
            for (int64_t group = 0; group < groups_; group++) add(strip, group, finite);
        }
        write();
    }

private:
    // Copies queries, each padded with zeros.
    void gather(int64_t token) {
        const int64_t share = call_.q_heads / cache_.heads, real = cache_.real;
        auto& rows = space_.rows;
        rows.clear();
        for (int64_t t = 0; t < tokens_; t++)
            for (int64_t h = head_ * share; h < (head_ + 1) * share; h++)
                rows.push_back({(const Element*)call_.q + (token + t) * call_.q_stride + h * real,
                                (Element*)call_.out + (token + t) * call_.out_stride + h * real, position_ + t, h});
        queries_ = space_.queries.fit(groups_ * each_ * P::words(size_));
        softmax_ = {space_.highest.fit(groups_ * GROUP_ROWS), space_.totals.fit(groups_ * each_ * PAGE)};
        std::fill_n(softmax_.totals, groups_ * each_ * PAGE, 0.0f);
        std::vector<Element> padded(size_);
        for (int64_t group = 0; group < groups_; group++)
            for (int64_t i = 0, r = group * each_; i < rows_of(group); i++, r++) {
                const Element* query = rows[r].query;
                if (real < size_) query = std::copy_n(query, real, padded.data()) - real;
                P::put_query(query, size_, queries_ + r * P::words(size_));
                const float* sink = call_.sinks ? call_.sinks + rows[r].head : nullptr;
                softmax_.highest[group * GROUP_ROWS + i] = sink ? *sink * LOG2_E : -1e30f;
                softmax_.totals[r * PAGE] = sink ? 1.0f : 0.0f;
            }
    }

    int rows_of(int64_t group) const { return (int)std::min(each_, rows_ - group * each_); }

    // The pages of strip `number`, null where there are none.
    void find_pages(int64_t number, int64_t keys, const void** pages) const {
        for (int64_t p = number * STRIP_PAGES; p < (number + 1) * STRIP_PAGES; p++) {
            const PagePlace at(cache_, p);
            *pages++ = p * PAGE < keys ? page_of<T>(cache_, table_[at.block], at.page, head_) : nullptr;
        }
    }

    // False where a page that some row sees in part only has values that are no finite numbers: a weight of zero does
    // not take those away.
    bool is_safe(int64_t strip) const {
        const Seen last(call_, position_ + tokens_ - 1, all_, strip), first(call_, position_, all_, strip);
        for (int p = 0; p < count_; p++) {
            const bool seen_by_all = p * PAGE >= last.from && (p + 1) * PAGE <= first.to;
            if (!seen_by_all && !is_finite<T>(pages_[p], size_)) return false;
        }
        return true;
    }

    // Adds a strip's values to the sums of a group.
    void add(int64_t strip, int64_t group, bool finite) {
        const int64_t first = group * each_;
        const int rows = rows_of(group);
        const int weighed = (count_ * PAGE + P::KEYS - 1) / P::KEYS * P::KEYS;
        float* sums = sums_ + first * size_;
        Seen seen[P::MOST_ROWS];
        for (int r = 0; r < rows; r++) seen[r] = Seen(call_, space_.rows[first + r].position, all_, strip);
        products_.score(queries_ + first * P::words(size_), rows, scores_, group == 0);
        alignas(64) float factors[GROUP_ROWS];
        const Softmax softmax{softmax_.highest + group * GROUP_ROWS, softmax_.totals + first * PAGE};
        soften<P>(call_, rows, seen, weighed, scores_, softmax, factors, weights_);
        for (int r = 0; r < rows; r++)
            if (factors[r] != 1.0f)
                for (float *sum = sums + r * size_, *end = sum + size_; sum < end; sum += LANES)
                    store(sum, load<floats>(sum) * factors[r]);
        if (finite) return products_.mix(weights_, rows, sums, group == 0);
        for (int r = 0; r < rows; r++) mix_alone(seen[r], weights_ + r * P::words(STRIP), sums + r * size_);
        products_.prepare(pages_, count_, next_);
    }

    // Of one row, over copies of the strip's pages in which the values of keys that it does not see are zero.
    void mix_alone(Seen seen, const Word* weights, float* to) {
        const int64_t elements = 2 * PAGE * size_;
        Element* copies = space_.pages.fit(count_ * elements);
        const void* pages[STRIP_PAGES];
        for (int p = 0; p < count_; p++) {
            Element* copy = copies + p * elements;
            std::copy_n((const Element*)pages_[p], elements, copy);
            for (int token = 0; token < PAGE; token++)
                if (p * PAGE + token < seen.from || p * PAGE + token >= seen.to)
                    for (int64_t d = 0; d < size_; d++) copy[value_place<T>(token, d, size_)] = 0;
            pages[p] = copy;
        }
        Word* lone_weights = space_.lone_weights.fit(each_ * P::words(STRIP));
        float* lone_sums = space_.lone_sums.fit(each_ * size_);
        std::copy_n(weights, P::words(STRIP), lone_weights);
        std::copy_n(to, size_, lone_sums);
        products_.prepare(pages, count_, nullptr);
        products_.mix(lone_weights, 1, lone_sums, false);
        std::copy_n(lone_sums, size_, to);
    }

    void write() const {
        for (int64_t r = 0; r < rows_; r++) {
            const float* from = sums_ + r * size_;
            const float inverse = 1.0f / sum_of(softmax_.totals + r * PAGE);
            for (int64_t d = 0; d < cache_.real; d += LANES)
                write_some<T>(space_.rows[r].out + d, load<floats>(from + d) * inverse,
                              (int)std::min<int64_t>(LANES, cache_.real - d));
        }
    }

    const Attention& call_;
    const Cache& cache_;
    const int64_t head_, size_;
    const int32_t* table_;
    const int64_t tokens_, position_, all_, rows_;
    const int64_t groups_, each_;  // of rows: how many, and how many have each but the last
    Workspace<T, P>& space_;
    P products_;
    Word *queries_, *weights_;  // of all groups; of a group and strip
    float *scores_, *sums_;     // of a group and strip; of all groups
    Softmax softmax_;           // of all groups, maxima GROUP_ROWS apart
    const void *pages_[STRIP_PAGES], *next_[STRIP_PAGES];  // of a strip, of the one after it
    int count_ = 0;  // of pages
};

template <class T, class P>
static void attend(const Attention& call, const Cache& cache, const int32_t* task, int64_t head) {
    static thread_local Workspace<T, P> space;
    const DenormalsAreZero<T> flushed;
    TaskAttention<T, P>(call, cache, task, head, space).run();
}

template <class T>
struct AttentionRegion {
    const Attention* call;
    const Cache* cache;
};

template <class T>
static void attention_tile(void* context, int tile) {
    const auto& call = *((const AttentionRegion<T>*)context)->call;
    const auto& cache = *((const AttentionRegion<T>*)context)->cache;
    // All tasks of one head, then those of the next: tasks of a row share its keys, which fit in a core's own cache.
    const int64_t head = tile / call.num_tasks;
    const int32_t* task = call.tasks + 5 * (tile % call.num_tasks);
#if TESSERA_TILES
    if constexpr (TILES_MULTIPLY<T>)
        if (task[2] * call.q_heads / cache.heads >= ATTENTION_TILES_FROM)
            return attend<T, AttentionByTiles>(call, cache, task, head);
#endif
    attend<T, AttentionByVectors<T>>(call, cache, task, head);
}

constexpr int64_t LEAST_ATTENTION_BYTES = 256 << 10;  // of keys and values, below which there is no second thread

// Keys that the tasks of a call read, a few queries at a time.
static inline int64_t call_keys(const Attention& call) {
    int64_t keys = 0;
    for (int64_t i = 0; i < call.num_tasks; i++) {
        const int32_t* task = call.tasks + 5 * i;
        keys += (task[2] + 3) / 4 * (task[4] ? task[4] : task[3] + task[2]);
    }
    return keys;
}

template <class T>
static void attention(Pool& pool, const Attention& call, const Cache& cache) {
    AttentionRegion<T> region{&call, &cache};
    const int tiles = (int)(call.num_tasks * cache.heads);
    const int64_t bytes = call_keys(call) * cache.heads * cache.size * 2 * sizeof(typename T::Element);
    if (bytes < LEAST_ATTENTION_BYTES) {
        for (int tile = 0; tile < tiles; tile++) attention_tile<T>(&region, tile);
        return;
    }
    pool.run(tiles, attention_tile<T>, &region);
}

}  // namespace tessera
