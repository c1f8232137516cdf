// Memory for scratch that begins a line of the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

template <class E>
class Lines {
public:
    // Room for `count` elements: what it gave before is void where it grew.
    E* fit(int64_t count) {
        constexpr size_t LINE = 64;
        memory_.resize(std::max<size_t>(memory_.size(), count + LINE / sizeof(E)));
        return (E*)(((uintptr_t)memory_.data() + LINE - 1) & ~(uintptr_t)(LINE - 1));
    }

private:
    std::vector<E> memory_;
};

}  // namespace tessera
