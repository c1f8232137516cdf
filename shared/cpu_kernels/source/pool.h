// A pool of threads for regions of a few microseconds to some hundred milliseconds.
//
// A region is a number of tiles that the threads take one after the other, so that a thread which
// another process delays costs no more than its tile. Between regions the threads spin for some
// microseconds, then sleep.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>
#include <thread>
#include <vector>

namespace tessera {

class Pool {
public:
    typedef void (*Work)(void* context, int tile);

    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { serve(); });
    }

    ~Pool() {
        leaving_.store(true);
        announce();
        for (auto& worker : workers_) worker.join();
    }

    int threads() const { return (int)workers_.size() + 1; }

    // What a thread does while it waits for another one, a short time.
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // Runs work(context, 0 .. tiles - 1). A second caller meanwhile does its tiles alone.
    void run(int tiles, Work work, void* context) {
        if (workers_.empty() || tiles == 1 || busy_.exchange(true)) {
            for (int tile = 0; tile < tiles; tile++) work(context, tile);
            return;
        }
        const uint64_t region = (state_.load() >> 32) + 1;
        // Closed first: a thread that still works on the last region must not take a tile of this one with
        // the number of tiles of that one.
        state_.store(region << 32 | UINT32_MAX);
        work_ = work;
        context_ = context;
        tiles_.store(tiles);
        done_.store(0);
        state_.store(region << 32);
        announce();
        take();
        while (done_.load(std::memory_order_acquire) < tiles) pause();
        busy_.store(false);
    }

private:
    // Takes tiles of the current region until there are none.
    void take() {
        uint64_t seen = state_.load();
        while (true) {
            const uint32_t tile = (uint32_t)seen;
            if (tile >= (uint32_t)tiles_.load()) return;
            if (!state_.compare_exchange_weak(seen, seen + 1)) continue;
            work_(context_, (int)tile);
            done_.fetch_add(1, std::memory_order_release);
            seen = state_.load();
        }
    }

    void serve() {
        int known = 0;
        while (true) {
            wait(known);
            known = calls_.load();
            if (leaving_.load()) return;
            take();
        }
    }

    void announce() {
        calls_.fetch_add(1);
        if (sleeping_.load() > 0)
            syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void wait(int known) {
        const long until = now() + SPIN_NS;
        do {
            for (int i = 0; i < 32; i++) {
                if (calls_.load(std::memory_order_acquire) != known) return;
                pause();
            }
        } while (now() < until);
        sleeping_.fetch_add(1);
        while (calls_.load() == known)
            syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, known, nullptr, nullptr, 0);
        sleeping_.fetch_sub(1);
    }

    static long now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000000L + t.tv_nsec;
    }

    static constexpr long SPIN_NS = 50000;

    std::atomic<uint64_t> state_{0};  // number of the region << 32 | next tile
    std::atomic<int> tiles_{0};
    std::atomic<int> done_{0};
    std::atomic<int> calls_{0};  // what sleepers wait for
    std::atomic<int> sleeping_{0};
    std::atomic<bool> leaving_{false};
    std::atomic<bool> busy_{false};
    Work work_ = nullptr;
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};

}  // namespace tessera
