// Whether this process may use the instructions that this library was compiled for, and whether they do what is
// expected of them: asked once, before any kernel is called.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "arithmetic/pairs.h"
#include "arithmetic/tiles.h"

namespace tessera {

// EMULATED: by a self-test's tiles, which no service may use.
enum Admission { ADMITTED = 0, NOT_PERMITTED = 1, SUMS_DIFFER = 2, EMULATED = 3 };

#if !TESSERA_TILES

static inline Admission admit() { return ADMITTED; }

#else

static inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// `sum` and a step's products in the order of `pairs.h`, one after the other.
static inline float plain_step(float sum, const uint16_t* row, const uint16_t* column, int64_t column_stride) {
    float chains[2] = {};
    for (int64_t k = 0; k < STEP; k++) {
        const float x = flushed(BFloat16::widen(row[k]));
        const float w = flushed(BFloat16::widen(column[k / 2 * column_stride + k % 2]));
        chains[k % 2] = flushed(std::fma(w, x, chains[k % 2]));
    }
    return flushed(flushed(sum) + flushed(chains[0] + chains[1]));
}

// One tile of each kind of number: of like size, far apart, denormal.
static inline bool tiles_sum_as_expected() {
    alignas(64) uint16_t rows[TILE_SIDE * STEP], columns[TILE_SIDE * STEP];
    alignas(64) float before[TILE_SIDE * TILE_SIDE], after[TILE_SIDE * TILE_SIDE];
    uint32_t state = 1;
    const auto draw = [&state](uint32_t least, uint32_t exponents) {  // a bfloat16 of a random sign
        state = state * 1664525u + 1013904223u;
        return (uint16_t)((state >> 31) << 15 | (least + (state >> 8) % exponents) << 7 | (state >> 20 & 127));
    };
    const uint32_t kinds[][2] = {{120, 12}, {100, 50}, {60, 8}, {0, 4}};
    for (const auto& [least, exponents] : kinds) {
        for (auto& x : rows) x = draw(least, exponents);
        for (auto& w : columns) w = draw(least ? least : 120, exponents);
        for (auto& sum : before) sum = BFloat16::widen(draw(least, exponents));
        TileShapes shapes;
        for (int tile : {0, 4, 6}) shapes.set(tile, TILE_SIDE);
        shape_tiles(shapes);
        load_tile<0>(before, TILE_STRIDE);
        load_tile<4>(rows, TILE_STRIDE);
        load_tile<6>(columns, TILE_STRIDE);
        multiply_tiles<0, 4, 6>();
        store_tile<0>(after, TILE_STRIDE);
        release_tiles();
        for (int r = 0; r < TILE_SIDE; r++)
            for (int c = 0; c < TILE_SIDE; c++) {
                const int place = r * TILE_SIDE + c;
                const float sum = plain_step(before[place], rows + r * STEP, columns + c * 2, STEP);
                if (std::memcmp(&sum, &after[place], sizeof sum)) return false;
            }
    }
    return true;
}

static inline Admission admit() {
    if (!tiles_are_permitted()) return NOT_PERMITTED;
    if (!tiles_sum_as_expected()) return SUMS_DIFFER;
#if defined(TESSERA_EMULATED_TILES)
    return EMULATED;
#else
    return ADMITTED;
#endif
}

#endif

}  // namespace tessera
