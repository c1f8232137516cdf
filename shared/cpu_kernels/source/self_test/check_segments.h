// What low-rank adapters add to linear layers: the sums of plain loops, and of every row the same bits whatever rows and
// segments are beside it.
#pragma once

#include "check_linear.h"

namespace self_test {

using tessera::Adapter;
using tessera::Addition;
using tessera::Segments;

// One addition to outputs [first, first + up.rows) of a layer, of which the first `gates` gate the others (0: none).
template <class T>
struct DrawnAddition {
    Matrix down, up;
    int64_t first, gates;
    Elements<T> down_elements;
    std::vector<Elements<T>> vectors;
    std::vector<Addition> packed;

    DrawnAddition(int64_t rank, int64_t inputs, int64_t first, int64_t outputs, int64_t gates)
        : down(drawn_weight<T>(rank, inputs)), up(drawn<T>(outputs, rank, 1)), first(first), gates(gates),
          down_elements(elements<T>(by_fours())) {
        vectors.reserve(2);
        const int64_t left = gates ? std::min(std::max<int64_t>(gates - first, 0), outputs) : outputs;
        if (left) pack(0, left, first, gates ? tessera::LEFT : tessera::BOTH_SIDES);
        if (left < outputs) pack(left, outputs, first + left - gates, tessera::RIGHT);
    }

    // Of so many vectors with so many ranks, a number's place in their units.
    static int64_t place(int64_t vector, int64_t ranks, int64_t rank, int64_t lane) {
        constexpr int64_t EACH = tessera::UNIT<T>;
        const int64_t units = (ranks + EACH - 1) / EACH;
        return ((vector * units + rank / EACH) * LANES + lane) * EACH + rank % EACH;
    }

    static int64_t whole_units(int64_t ranks) { return place(1, ranks, 0, 0) / LANES; }

    // As `segment_inputs.h` has it.
    Matrix by_fours() const {
        const int64_t vectors = (down.columns + LANES - 1) / LANES, fours = down.rows / 4;
        Matrix lying(1, (fours * 4 + whole_units(down.rows % 4)) * vectors * LANES);
        for (int64_t k = 0; k < down.rows; k++) {
            const int64_t four = k / 4 * 4, ranks = std::min<int64_t>(4, down.rows - four);
            for (int64_t i = 0; i < down.columns; i++)
                lying[0][four * vectors * LANES + place(i / LANES, ranks, k % 4, i % LANES)] = down[k][i];
        }
        return lying;
    }

    void pack(int64_t begin, int64_t end, int64_t output, int64_t side) {
        const int64_t rank = down.rows, from = output / LANES, to = (output + end - begin + LANES - 1) / LANES;
        Matrix lying(1, (to - from) * whole_units(rank) * LANES);
        for (int64_t o = begin; o < end; o++) {
            const int64_t lane = output + o - begin - from * LANES;
            for (int64_t k = 0; k < rank; k++) lying[0][place(lane / LANES, rank, k, lane % LANES)] = up[o][k];
        }
        vectors.push_back(elements<T>(lying));
        packed.push_back({down_elements.data(), vectors.back().data(), rank, down.columns, from, to, side});
    }
};

// Which rows are in which segments, as the kernels get it.
struct DrawnSegments {
    std::vector<int64_t> starts{0}, members;
    Segments call;

    DrawnSegments(int64_t rows, const std::vector<std::vector<int64_t>>& of) {
        for (const auto& some : of) {
            members.insert(members.end(), some.begin(), some.end());
            starts.push_back((int64_t)members.size());
        }
        call = {rows, (int64_t)of.size(), starts.data(), members.data()};
    }
};

template <class T>
void check_segments_of(Check& check, int64_t inputs, int64_t outputs, bool gated) {
    typedef typename T::Element Element;
    const int64_t rows = MANY, gates = gated ? outputs : 0, all = gated ? 2 * outputs : outputs;
    const Matrix x = drawn<T>(rows, inputs), w = drawn_weight<T>(all, inputs);
    const Packed<T> packed(w, nullptr, gated ? tessera::SWIGLU : tessera::PLAIN);
    // To all outputs, to some in the middle, and to the last one; the second adapter has two of them.
    std::vector<DrawnAddition<T>> drawn_additions;
    drawn_additions.reserve(3);
    drawn_additions.emplace_back(5, inputs, 0, all, gates);
    drawn_additions.emplace_back(16, inputs, all / 3, all - all / 3 - all / 4, gates);
    drawn_additions.emplace_back(1, inputs, all - 1, 1, gates);
    std::vector<Addition> own[2];
    own[0] = drawn_additions[0].packed;
    for (int i : {1, 2}) own[1].insert(own[1].end(), drawn_additions[i].packed.begin(), drawn_additions[i].packed.end());
    Adapter adapters[2] = {};
    for (int a : {0, 1}) adapters[a].products[Adapter::QKV] = {own[a].data(), (int64_t)own[a].size()};
    const Adapter* of_segments[] = {&adapters[0], &adapters[1]};

    std::vector<std::vector<int64_t>> members(2);
    for (int64_t row = 0; row < rows; row++) {
        if (row % 3 != 1 || row > rows / 2) members[0].push_back(row);
        if (row % 4 == 2 || row > rows / 2) members[1].push_back(row);
    }
    const DrawnSegments segments(rows, members);
    const auto in = elements<T>(x);
    std::vector<Element> y(rows * outputs);
    tessera_adapted_linear(TYPE<T>, &packed.layer, &segments.call, of_segments, in.data(), y.data(), rows, inputs, outputs);

    Matrix expected(rows, outputs);
    for (int64_t row = 0; row < rows; row++) {
        Matrix merged = w;
        for (size_t s = 0; s < 2; s++) {
            if (!std::count(members[s].begin(), members[s].end(), row)) continue;
            for (size_t i = s; i < (s ? 3 : 1); i++) {
                const auto& one = drawn_additions[i];
                for (int64_t o = 0; o < one.up.rows; o++)
                    for (int64_t k = 0; k < inputs; k++)
                        for (int64_t r = 0; r < one.up.columns; r++)
                            merged[one.first + o][k] += one.up[o][r] * one.down[r][k];
            }
        }
        Matrix alone(1, inputs);
        std::copy(x[row], x[row] + inputs, alone[0]);
        const Matrix right = linear(alone, merged, nullptr, gated ? tessera::SWIGLU : tessera::PLAIN);
        std::copy(right[0], right[0] + outputs, expected[row]);
    }
    check.near<T>(y, expected);

    for (int64_t row = 0; row < rows; row++) {
        std::vector<std::vector<int64_t>> mine(2);
        for (size_t s = 0; s < 2; s++)
            if (std::count(members[s].begin(), members[s].end(), row)) mine[s].push_back(0);
        const DrawnSegments one(1, mine);
        std::vector<Element> found(outputs);
        tessera_adapted_linear(TYPE<T>, &packed.layer, &one.call, of_segments, in.data() + row * inputs, found.data(), 1,
                               inputs, outputs);
        check.same(found, y, row * outputs, "a row alone");
    }
}

template <class T>
void check_segments() {
    Check check("linear, adapters", TYPE<T>);
    for (const bool gated : {false, true}) {
        check_segments_of<T>(check, 34, PANEL - 1, gated);
        check_segments_of<T>(check, 70, 3 * PANEL + PANEL / 2 + 1, gated);
    }
}

}  // namespace self_test
