// Attention over a cache of codes: as `attention.h`, by the products of `coded_products.h`.
//
// Codes are numbers whatever memory holds, and what a row does not see has no weight: nothing has to be looked for that
// is no finite number.
#pragma once

#include <vector>

#include "attention.h"
#include "coded_products.h"

namespace tessera {

struct CodedWorkspace {
    Lines<int32_t> words, starts;
    Lines<float> steps, kept, scores, sums, highest, totals, weight_steps;
    Lines<uint8_t> codes;
    std::vector<int64_t> positions;
};

// The rows of one task that share a head of keys, in groups of like size.
template <class T>
class CodedTask {
    typedef typename T::Element Element;
    typedef CodedProducts<T> Products;
    static constexpr int64_t GROUP_ROWS = (Products::MOST_ROWS + LANES - 1) / LANES * LANES;

public:
    CodedTask(const Attention& call, const Cache& cache, const int32_t* task, int64_t head, CodedWorkspace& space)
        : call_(call), cache_(cache), head_(head), size_(cache.size), table_(call.table + task[0] * call.table_stride),
          token_(task[1]), tokens_(task[2]), position_(task[3]), all_(task[4]),
          share_(call.q_heads / cache.heads), rows_(tokens_ * share_),
          groups_((rows_ + Products::MOST_ROWS - 1) / Products::MOST_ROWS), each_((rows_ + groups_ - 1) / groups_),
          space_(space), products_(strip_, cache) {
        scores_ = space.scores.fit(each_ * STRIP);
        weights_ = {space.codes.fit(each_ * STRIP), space.weight_steps.fit(GROUP_ROWS)};
        sums_ = space.sums.fit(rows_ * size_);
        std::fill_n(sums_, rows_ * size_, 0.0f);
        gather();
    }

    void run() {
        const int64_t keys = all_ ? all_ : position_ + tokens_;
        const int64_t oldest = call_.window ? std::max<int64_t>(0, position_ - call_.window + 1) : 0;
        find_pages(oldest / STRIP, keys, strip_.next);
        for (int64_t strip = oldest / STRIP * STRIP; strip < keys; strip += STRIP) {
            std::copy_n(strip_.next, STRIP_PAGES, strip_.pages);
            find_pages(strip / STRIP + 1, keys, strip_.next);
            strip_.count = (int)std::min<int64_t>(STRIP_PAGES, (keys - strip + PAGE - 1) / PAGE);
            strip_.take_scales();
            for (int64_t group = 0; group < groups_; group++) add(strip, group);
        }
        write();
    }

private:
    // Row r: a head of a token.
    const Element* query_of(int64_t r) const {
        return (const Element*)call_.q + (token_ + r / share_) * call_.q_stride + head_of(r) * cache_.real;
    }
    int64_t head_of(int64_t r) const { return head_ * share_ + r % share_; }

    void gather() {
        const int64_t units = size_ / 4, kept = cache_.kept_count;
        queries_ = {rows_, space_.words.fit(rows_ * units), space_.steps.fit(rows_), space_.starts.fit(rows_),
                    space_.kept.fit(rows_ * kept)};
        softmax_ = {space_.highest.fit(groups_ * GROUP_ROWS), space_.totals.fit(rows_ * PAGE)};
        std::fill_n(softmax_.totals, rows_ * PAGE, 0.0f);
        std::fill_n(softmax_.highest, groups_ * GROUP_ROWS, -1e30f);
        std::vector<int32_t> codes(size_ + LANES);
        std::vector<Element> copy(cache_.real);
        for (int64_t r = 0; r < rows_; r++) {
            const Element* query = query_of(r);
            std::fill(codes.begin(), codes.end(), 0);
            queries_.steps[r] = to_codes<T>(without_kept<T>(cache_, head_, query, copy.data()), cache_.real, codes.data());
            int32_t sum = 0;
            for (int64_t u = 0; u < units; u++) {
                int8_t unit[4];
                for (int i = 0; i < 4; i++) sum += unit[i] = (int8_t)codes[4 * u + i];
                std::memcpy(queries_.words + u * rows_ + r, unit, 4);
            }
            queries_.starts[r] = (KeyDots::TAKEN_OFF - ZERO_BYTE) * sum;
            for (int64_t i = 0; i < kept; i++) {
                const int32_t d = cache_.kept[head_ * kept + i];
                queries_.kept[r * kept + i] = d < 0 ? 0.0f : T::widen(query[d]);
            }
            if (!call_.sinks) continue;
            softmax_.highest[r / each_ * GROUP_ROWS + r % each_] = call_.sinks[head_of(r)] * LOG2_E;
            softmax_.totals[r * PAGE] = 1.0f;
        }
    }

    int rows_of(int64_t group) const { return (int)std::min(each_, rows_ - group * each_); }

    // The pages of strip `number`, null where there are none.
    void find_pages(int64_t number, int64_t keys, CodedPage* pages) const {
        for (int64_t p = number * STRIP_PAGES; p < (number + 1) * STRIP_PAGES; p++) {
            const PagePlace at(cache_, p);
            *pages++ = p * PAGE < keys ? coded_page_of<T>(cache_, table_[at.block], at.page, head_)
                                       : CodedPage{nullptr, size_};
        }
    }

    // Adds a strip's values to the sums of a group.
    void add(int64_t strip, int64_t group) {
        const int64_t first = group * each_;
        const int rows = rows_of(group);
        Seen seen[Products::MOST_ROWS];
        for (int r = 0; r < rows; r++) seen[r] = Seen(call_, position_ + (first + r) / share_, all_, strip);
        products_.score(queries_, first, rows, scores_, group == 0);
        alignas(64) float factors[GROUP_ROWS];
        const Softmax softmax{softmax_.highest + group * GROUP_ROWS, softmax_.totals + first * PAGE};
        soften_to_codes(call_, rows, seen, strip_.count * PAGE, scores_, strip_.value_scales, softmax, factors, weights_,
                        group == 0 ? products_.asking(rows) : Asking{nullptr, 0, 0, 1});
        products_.mix(weights_, factors, rows, sums_ + first * size_, group == 0);
    }

    void write() const {
        for (int64_t r = 0; r < rows_; r++) {
            const float* from = sums_ + r * size_;
            Element* to = (Element*)call_.out + (token_ + r / share_) * call_.out_stride + head_of(r) * cache_.real;
            const float inverse = 1.0f / sum_of(softmax_.totals + r * PAGE);
            for (int64_t d = 0; d < cache_.real; d += LANES)
                write_some<T>(to + d, load<floats>(from + d) * inverse, (int)std::min<int64_t>(LANES, cache_.real - d));
        }
    }

    const Attention& call_;
    const Cache& cache_;
    const int64_t head_, size_;
    const int32_t* table_;
    const int64_t token_, tokens_, position_, all_, share_, rows_;
    const int64_t groups_, each_;  // of rows: how many, and how many have each but the last
    CodedWorkspace& space_;
    CodedStrip strip_;
    Products products_;
    CodedQueries queries_{};  // of all groups
    float *scores_, *sums_;  // of a group and strip; of all groups
    CodedWeights weights_{};  // of a group and strip
    Softmax softmax_{};  // of all groups, maxima GROUP_ROWS apart
};

template <class T>
static void coded_attention_tile(void* context, int tile) {
    static thread_local CodedWorkspace space;
    const auto& region = *(const AttentionRegion<T>*)context;
    const Attention& call = *region.call;
    const int64_t head = tile / call.num_tasks;  // all tasks of one head, then those of the next
    const DenormalsAreZero<T> flushed;
    CodedTask<T>(call, *region.cache, call.tasks + 5 * (tile % call.num_tasks), head, space).run();
}

template <class T>
static void coded_attention(Pool& pool, const Attention& call, const Cache& cache) {
    AttentionRegion<T> region{&call, &cache};
    const int tiles = (int)(call.num_tasks * cache.heads);
    const int64_t bytes = call_keys(call) * cache.heads * cache.size * 2;
    if (bytes < LEAST_ATTENTION_BYTES) {
        for (int tile = 0; tile < tiles; tile++) coded_attention_tile<T>(&region, tile);
        return;
    }
    pool.run(tiles, coded_attention_tile<T>, &region);
}

}  // namespace tessera
