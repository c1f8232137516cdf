// Tiles of Intel's AMX: registers of 16 rows of 64 bytes, and the sums of products of bfloat16 that they add up.
//
// TDPBF16PS adds to a tile of float32 the products of 16 rows of 32 bfloat16 with 16 columns of as many, in an
// order of its own (`pairs.h`). Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18,
// and the instruction in volume 2.
//
// The instructions are spelt out: gcc's macros do not say that they read memory, so that stores before them may be
// left out, and take eight of the 64 bytes of a configuration for what is read.
#pragma once

#include "vectors.h"

#if TESSERA_TILES

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tessera {

constexpr int TILE_SIDE = 16;      // rows of a tile, and float32 or pairs of bfloat16 in a row
constexpr int TILE_STRIDE = 64;    // bytes of a row

// How many rows each tile has, and how many bytes a row: what LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int count, int bytes = TILE_STRIDE) {
        rows[tile] = (uint8_t)count;
        row_bytes[tile] = (uint16_t)bytes;
    }
};

#if defined(TESSERA_EMULATED_TILES)

}  // namespace tessera

#include "../self_test/emulated_tiles.h"

#else

// Tiles are this thread's, and zero, until `release_tiles`: while they are in use a change of threads saves 8 KB more.
static inline void shape_tiles(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

static inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
static inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows `stride` bytes apart.
template <int TILE>
static inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
static inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// SUMS += ROWS times COLUMNS: rows of 32 bfloat16, and for each pair of them 16 columns' pairs side by side.
template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// The same in whole numbers: ROWS are rows of 64 signed bytes, COLUMNS for each four of them 16 columns' unsigned bytes,
// SUMS of 32 bits. Whole numbers are exact: vectors give the same whatever the order (TDPBSUD).
template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_byte_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// The same with columns of signed bytes (TDPBSSD).
template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_signed_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

// Asks the system for the registers of tiles, for all threads of this process, those that run already too. False
// where it refuses: a kernel before Linux 5.16, a seccomp filter, or an alternate signal stack that is too small.
static inline bool tiles_are_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

}  // namespace tessera

#endif
#endif
