// A pool of threads for regions of a few microseconds to some hundred milliseconds.
//
// A region is a number of tiles that the threads take one after the other, so that a thread which another process delays
// costs no more than its tile. Tiles whose memory follows each other's are best taken by one thread, which the processor
// then reads ahead for: of those each thread has a run, and takes others' when it has none left. Between regions the
// threads spin for some microseconds, then sleep.
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

    explicit Pool(int threads) : runs_(2 * threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
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

    // Where the first `runs` of the threads' runs end, of so many tiles.
    static int runs_end(int tiles, int threads, int runs) { return (int)((int64_t)tiles * runs / threads); }

    // Runs work(context, 0 .. tiles - 1), each tile taken by whoever comes. A second caller meanwhile does its tiles alone.
    void run(int tiles, Work work, void* context) { run(tiles, tiles, work, context, false); }

    // The same for tiles that are divided among the threads in their order: the first ones, and, taken when of those none
    // is left, the others.
    void run(int tiles, int first, Work work, void* context) { run(tiles, first, work, context, true); }

private:
    void run(int tiles, int first, Work work, void* context, bool divided) {
        if (workers_.empty() || tiles == 1 || busy_.exchange(true)) {
            for (int tile = 0; tile < tiles; tile++) work(context, tile);
            return;
        }
        // Closed first: a thread that still works on the last region must not take a tile of this one with the ends of
        // that one.
        const uint64_t region = ++regions_ << 32;
        for (Run& one : runs_) one.next.store(region | UINT32_MAX);
        work_ = work;
        context_ = context;
        tiles_ = tiles;
        taken_.store(0);
        done_.store(0);
        for (int i = 0, begin = 0; i < 2 * threads(); i++) {
            // Undivided: all of them are the first run of the first thread.
            const int own = divided ? i % threads() + 1 : threads();
            const int end = i < threads() ? runs_end(first, threads(), own) : first + runs_end(tiles - first, threads(), own);
            runs_[i].end.store((uint32_t)end);
            runs_[i].next.store(region | (uint32_t)begin);
            begin = end;
        }
        announce();
        take(0);
        while (done_.load(std::memory_order_acquire) < tiles) pause();
        busy_.store(false);
    }

    // Tiles that follow each other: the next one to be taken, below the number of its region, and their end.
    struct alignas(64) Run {
        std::atomic<uint64_t> next{UINT32_MAX};
        std::atomic<uint32_t> end{0};
    };

    // Takes tiles of the current region until there are none: of the first ones and then of the others this thread's own,
    // and those that other threads have not come to.
    void take(int thread) {
        for (int i = 0; i < 2 * threads() && taken_.load() < tiles_.load(); i++)
            take_run(runs_[i / threads() * threads() + (thread + i) % threads()]);
    }

    void take_run(Run& run) {
        uint64_t seen = run.next.load();
        while ((uint32_t)seen < run.end.load()) {
            if (!run.next.compare_exchange_weak(seen, seen + 1)) continue;
            taken_.fetch_add(1);
            work_(context_, (int)(uint32_t)seen);
            done_.fetch_add(1, std::memory_order_release);
            seen = run.next.load();
        }
    }

    void serve(int thread) {
        int known = 0;
        while (true) {
            wait(known);
            known = calls_.load();
            if (leaving_.load()) return;
            take(thread);
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

    std::vector<Run> runs_;  // each thread's of the first tiles, then each thread's of the others
    uint64_t regions_ = 0;
    std::atomic<int> tiles_{0};
    std::atomic<int> taken_{0};
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
