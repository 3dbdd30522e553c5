// Decode the codes of keys (a sign and a magnitude of BITS bits per coordinate) to float16 numbers, in the
// order that tensor core fragments need. The magnitude levels are float16 numbers, so decoding is exact
// (kvindex.ops.codes.levels). With 3 bits, four levels are looked up at once with byte permutations.
// Compile-time constant: BITS (of a magnitude).
#pragma once
#include "common/common.cuh"

constexpr int LEVELS = 1 << BITS;

// The magnitude levels as float16 numbers. `table` is all levels in shared memory. `low` and `high` are the
// lower and the upper bytes of 8 levels, for lookups with __byte_perm.
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

// Decode four coordinates to two words of two float16 numbers each. Nibble i of `indices` is the level of
// coordinate i; nibble i of `signs` is 1 if the coordinate is negative.
__device__ __forceinline__ void four(u32 (&pairs)[2], u32 indices, u32 signs, const Levels& levels) {
    u32 low = __byte_perm(levels.low[0], levels.low[1], indices);
    u32 high = __byte_perm(levels.high[0], levels.high[1], indices) | __byte_perm(0x8000, 0, signs);
    pairs[0] = __byte_perm(low, high, 0x5140);
    pairs[1] = __byte_perm(low, high, 0x7362);
}

// Decode 4 of the 32 coordinates in a word, those at bits b + 16 half + {0, 4, 8, 12}, to two words of two
// float16 numbers each.
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
