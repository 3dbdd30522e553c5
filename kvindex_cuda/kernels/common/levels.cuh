// Decode the codes of keys (a sign and a magnitude of BITS bits per coordinate) to float16 numbers, in the
// order that tensor core fragments need. The magnitude levels are float16 numbers, so decoding is exact
// (kvindex.ops.codes.levels). With 3 bits, four levels are looked up at once with byte permutations.
// Compile-time constant: BITS (of a magnitude).
#pragma once
#include "common/common.cuh"

constexpr int LEVELS = 1 << BITS;

// The magnitude levels as float16 numbers. `table` points to the levels in shared memory. With 3 bits, there
// are 8 levels: then `low` contains their lower bytes and `high` their upper bytes, for lookups with
// __byte_perm.
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

// Decode four coordinates of a key to two words of two float16 numbers each. Hexadecimal digit i of `indices`
// is the magnitude level of coordinate i. Digit i of `signs` is 1 if the coordinate is negative.
__device__ __forceinline__ void four(u32 (&pairs)[2], u32 indices, u32 signs, const Levels& levels) {
    u32 low = __byte_perm(levels.low[0], levels.low[1], indices);
    u32 high = __byte_perm(levels.high[0], levels.high[1], indices) | __byte_perm(0x8000, 0, signs);
    pairs[0] = __byte_perm(low, high, 0x5140);
    pairs[1] = __byte_perm(low, high, 0x7362);
}

// Decode four of 32 coordinates of a key to float16: numbers c, c + 4, c + 8 and c + 12, where c = b + 16 * half,
// `b` is 0 to 3, and `half` is 0 or 1. Two of them are written into each word of `pairs`. Bit i of `sign` is the
// sign bit of coordinate i, and bit i of each word of `plane` is one bit of its magnitude.
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
