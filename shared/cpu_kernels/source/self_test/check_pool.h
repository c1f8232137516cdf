// Every tile of a region is done once, the first ones before the others are waited for, whatever the threads do meanwhile.
#pragma once

#include <atomic>
#include <vector>

#include "../pool.h"
#include "check.h"

namespace self_test {

struct CountedRegion {
    std::vector<std::atomic<int>> done;
    int first;
    std::atomic<int> first_done{0};

    CountedRegion(int tiles, int first) : done(tiles), first(first) {}

    // One of the others waits for the first ones, as what adapters add does (`segments.h`).
    static void work(void* context, int tile) {
        auto& region = *(CountedRegion*)context;
        if (tile < region.first) {
            region.first_done++;
        } else {
            while (region.first_done < region.first) tessera::Pool::pause();
        }
        region.done[tile]++;
    }
};

inline void check_pool() {
    Check check("pool, tiles", 0);
    for (const int threads : {1, 2, 3, 8}) {
        tessera::Pool pool(threads);
        for (int number = 0; number < 300; number++) {
            const int tiles = 1 + number * 7 % 41, first = number % 3 ? number % (tiles + 1) : tiles;
            CountedRegion region(tiles, first);
            pool.run(tiles, first, CountedRegion::work, &region);
            const std::vector<int> found(region.done.begin(), region.done.end());
            check.same(found, std::vector<int>(tiles, 1), 0, "how often tiles are done");
        }
    }
}

}  // namespace self_test
