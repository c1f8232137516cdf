// Every tile of a region is done once, those for all threads before those that each has a run of, whatever the threads
// do meanwhile.
#pragma once

#include <atomic>
#include <vector>

#include "../pool.h"
#include "check.h"

namespace self_test {

struct CountedRegion {
    std::vector<std::atomic<int>> done;
    int shared;
    std::atomic<int> shared_done{0};

    CountedRegion(int tiles, int shared) : done(tiles), shared(shared) {}

    // A tile of a run waits for those for all, as what adapters add does (`segments.h`).
    static void work(void* context, int tile) {
        auto& region = *(CountedRegion*)context;
        if (tile < region.shared) {
            region.shared_done++;
        } else {
            while (region.shared_done < region.shared) tessera::Pool::pause();
        }
        region.done[tile]++;
    }
};

inline void check_pool() {
    Check check("pool, tiles", 0);
    for (const int threads : {1, 2, 3, 8}) {
        tessera::Pool pool(threads);
        for (int number = 0; number < 300; number++) {
            const int tiles = 1 + number * 7 % 41, shared = number % 3 ? number % (tiles + 1) : tiles;
            CountedRegion region(tiles, shared);
            pool.run(tiles, shared, CountedRegion::work, &region);
            const std::vector<int> found(region.done.begin(), region.done.end());
            check.same(found, std::vector<int>(tiles, 1), 0, "how often tiles are done");
        }
    }
}

}  // namespace self_test
