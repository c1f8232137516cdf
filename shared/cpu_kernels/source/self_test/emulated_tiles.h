// For the self-test alone: the tiles of `tiles.h` in plain C++, so that what is computed with them can be compared with
// plain loops on a machine without AMX. A library built with them is refused (`admission.h`).
//
// What a processor answers with an invalid instruction ends the process here: a tile without a shape, or shapes that do
// not belong together. Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: TDPBF16PS, TDPBSUD,
// TDPBSSD.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace tessera {

struct EmulatedTiles {
    static constexpr int COUNT = 8;
    TileShapes shapes;
    bool configured = false;
    uint8_t data[COUNT][TILE_SIDE][TILE_STRIDE];

    int rows(int tile) const { return shapes.rows[tile]; }
    int row_bytes(int tile) const { return shapes.row_bytes[tile]; }
    float* floats_of(int tile, int row) { return (float*)data[tile][row]; }
    int32_t* ints_of(int tile, int row) { return (int32_t*)data[tile][row]; }

    void require(bool holds, const char* what) const {
        if (holds) return;
        std::fprintf(stderr, "emulated tiles: %s\n", what);
        std::abort();
    }
    void require_shape(int tile) const {
        require(configured && tile < COUNT && rows(tile) && row_bytes(tile), "a tile that has no shape");
    }
    void require_product(int sums, int x, int columns) const {
        for (int tile : {sums, x, columns}) require_shape(tile);
        require(sums != x && sums != columns && x != columns, "one tile in two places");
        require(row_bytes(x) % 4 == 0 && row_bytes(columns) % 4 == 0, "no whole words");
        require(rows(sums) == rows(x), "rows and sums of them");
        require(row_bytes(sums) == row_bytes(columns), "columns and sums of them");
        require(row_bytes(x) / 4 == rows(columns), "inputs of rows and of columns");
    }
};

// One for all that is compiled.
inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

static inline void release_tiles() {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.configured = false;
    std::memset(tiles.data, 0, sizeof tiles.data);
}

static inline void shape_tiles(const TileShapes& shapes) {
    release_tiles();
    EmulatedTiles& tiles = emulated_tiles();
    tiles.shapes = shapes;
    tiles.configured = true;
    for (int tile = 0; tile < 16; tile++) {
        tiles.require(shapes.rows[tile] <= TILE_SIDE && shapes.row_bytes[tile] <= TILE_STRIDE, "a shape too large");
        tiles.require(!shapes.rows[tile] == !shapes.row_bytes[tile], "half a shape");
        tiles.require(tile < tiles.COUNT || !shapes.rows[tile], "there are eight tiles");
    }
}

template <int TILE>
static inline void zero_tile() {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.require_shape(TILE);
    std::memset(tiles.data[TILE], 0, sizeof tiles.data[TILE]);
}

template <int TILE>
static inline void load_tile(const void* from, int64_t stride) {
    zero_tile<TILE>();
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.rows(TILE); r++)
        std::memcpy(tiles.data[TILE][r], (const char*)from + r * stride, tiles.row_bytes(TILE));
}

template <int TILE>
static inline void store_tile(void* to, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.require_shape(TILE);
    for (int r = 0; r < tiles.rows(TILE); r++)
        std::memcpy((char*)to + r * stride, tiles.data[TILE][r], tiles.row_bytes(TILE));
}

static inline float emulated_flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// Of an element of the sums: even products in one chain, odd ones in another (`pairs.h`).
template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_tiles() {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.require_product(SUMS, ROWS, COLUMNS);
    const auto number = [&](int tile, int row, int place) {
        uint16_t bits;
        std::memcpy(&bits, tiles.data[tile][row] + 2 * place, 2);
        const uint32_t word = (uint32_t)bits << 16;
        float x;
        std::memcpy(&x, &word, 4);
        return emulated_flush(x);
    };
    const int columns = tiles.row_bytes(SUMS) / 4, pairs = tiles.rows(COLUMNS);
    for (int r = 0; r < tiles.rows(SUMS); r++) {
        float chains[2][TILE_SIDE] = {};
        for (int k = 0; k < pairs; k++)
            for (int odd = 0; odd < 2; odd++) {
                const float x = number(ROWS, r, 2 * k + odd);
                for (int c = 0; c < columns; c++)
                    chains[odd][c] =
                        emulated_flush(std::fma(x, number(COLUMNS, k, 2 * c + odd), chains[odd][c]));
            }
        for (int c = 0; c < columns; c++) {
            float& sum = tiles.floats_of(SUMS, r)[c];
            sum = emulated_flush(emulated_flush(sum) + emulated_flush(chains[0][c] + chains[1][c]));
        }
    }
}

// E: of the columns' bytes.
template <class E, int SUMS, int ROWS, int COLUMNS>
static inline void emulate_byte_product() {
    EmulatedTiles& tiles = emulated_tiles();
    tiles.require_product(SUMS, ROWS, COLUMNS);
    const int columns = tiles.row_bytes(SUMS) / 4, words = tiles.rows(COLUMNS);
    for (int r = 0; r < tiles.rows(SUMS); r++)
        for (int k = 0; k < words; k++) {
            const auto* x = (const int8_t*)tiles.data[ROWS][r] + 4 * k;
            for (int c = 0; c < columns; c++) {
                const auto* w = (const E*)tiles.data[COLUMNS][k] + 4 * c;
                int32_t sum = 0;
                for (int i = 0; i < 4; i++) sum += x[i] * w[i];
                tiles.ints_of(SUMS, r)[c] += sum;
            }
        }
}

template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_byte_tiles() {
    emulate_byte_product<uint8_t, SUMS, ROWS, COLUMNS>();
}

template <int SUMS, int ROWS, int COLUMNS>
static inline void multiply_signed_tiles() {
    emulate_byte_product<int8_t, SUMS, ROWS, COLUMNS>();
}

static inline bool tiles_are_permitted() { return true; }

}  // namespace tessera
