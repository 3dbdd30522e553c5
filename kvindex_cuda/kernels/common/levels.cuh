// Decode signs and magnitudes to float16 numbers, which represent the magnitude levels exactly
// (kvindex.ops.codes.levels), in the order in which tensor cores take them. With 3 magnitude bits, one
// byte permutation looks up four levels.
// Compile-time constant: BITS (of a magnitude).
#pragma once
#include "common/common.cuh"

constexpr int LEVELS = 1 << BITS;

// The magnitude levels, which are float16 numbers. `low` and `high` have their lower and upper bytes for
// __byte_perm, `table` points to all of them in shared memory.
struct Levels {
    u32 low[2], high[2];
    const u16* table;
};

__device__ __forceinline__ Levels levels_of(const u16* halves) {
    Levels levels = {{0, 0}, {0, 0}, halves};
    if (BITS == 3)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            levels.low[i / 4] |= u32(halves[i % LEVELS] & 255) << (i % 4 * 8);
            levels.high[i / 4] |= u32(halves[i % LEVELS] >> 8) << (i % 4 * 8);
        }
    return levels;
}

// Decode four coordinates to two pairs of float16 numbers. Each nibble of `indices` is a coordinate's level
// index. A nibble of `signs` is 1 if the coordinate is negative.
__device__ __forceinline__ void four(u32 (&pairs)[2], u32 indices, u32 signs, const Levels& levels) {
    u32 low = __byte_perm(levels.low[0], levels.low[1], indices);
    u32 high = __byte_perm(levels.high[0], levels.high[1], indices) | __byte_perm(0x8000, 0, signs);
    pairs[0] = __byte_perm(low, high, 0x5140);
    pairs[1] = __byte_perm(low, high, 0x7362);
}

// Decode four of the 32 coordinates in a word, b + 16 half + {0, 4, 8, 12}, to two pairs of float16 numbers.
// The matrix product takes a word in 8 steps; these are the coordinates of step 2 b + half.
__device__ __forceinline__ void decode(u32 (&pairs)[2], u32 sign, const u32 (&plane)[BITS > 0 ? BITS : 1],
                                       int b, int half, const Levels& levels) {
    int shift = b + 16 * half;
    if (BITS == 3) {
        u32 select = (plane[0] >> shift & 0x1111) | (plane[BITS > 1 ? 1 : 0] >> shift & 0x1111) << 1 |
                     (plane[BITS > 2 ? 2 : 0] >> shift & 0x1111) << 2;
        four(pairs, select, ~sign >> shift & 0x1111, levels);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = shift + 4 * i, level = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++) level |= (plane[p] >> at & 1) << p;
        u32 value = levels.table[level] | (~sign >> at & 1) << 15;
        pairs[i / 2] = i % 2 ? pairs[i / 2] | value << 16 : value;
    }
}
