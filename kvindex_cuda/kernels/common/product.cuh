// Multiply the codes of 16 keys with the queries of all heads of a group on tensor cores (ParisKV paper, B.2.2,
// equation 10). The codes are decoded to float16 in registers, without rounding. Reference:
// kvindex.ops.rerank.estimate.
// Compile-time constants: D, BITS (of a magnitude), GROUP (query heads of a group).
#pragma once
#include "common/levels.cuh"
#include "common/operands.cuh"

constexpr int ROWS = FOLDED ? 1 : 2;  // keys, out of 16, whose estimates a lane has

// Codes of 16 keys, divided among the lanes of a warp. Lane l stores parts of the codes of two keys: key l / 4 at
// index 0, and key l / 4 + 8 at index 1. The sign bits and each magnitude plane of a key are sequences of 32-bit
// words. Of each sequence, the lane stores the words l % 4, l % 4 + 4, and so on.
struct Tile {
    u32 signs[2][QUADS], planes[2][QUADS][BITS > 0 ? BITS : 1];
    int logs[2];
};

// Load the codes of one key from a block of codes. `tile` has room for the codes of two keys per lane. The codes
// are written to the place of the first key (`half` = 0) or of the second key (`half` = 1). `key` is the key's
// number in the block.
//   logs, magnitudes: byte offsets of the log weights and of the magnitudes in the block.
__device__ __forceinline__ void load(Tile& tile, int half, const char* block, int key, i64 logs,
                                     i64 magnitudes) {
    const u32* signs = reinterpret_cast<const u32*>(block) + key * WORDS;
    const u32* planes = reinterpret_cast<const u32*>(block + magnitudes) + key * (BITS * WORDS);
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
        int w = quad * 4 + threadIdx.x % 4;
        bool has = QUADS * 4 == WORDS || w < WORDS;
        tile.signs[half][quad] = has ? __ldg(signs + w) : 0;
        tile.planes[half][quad][0] = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++)
            tile.planes[half][quad][p] = has ? __ldg(planes + p * WORDS + w) : 0;
    }
    tile.logs[half] = reinterpret_cast<const u16*>(block + logs)[key];
}

// A lane that called `multiply` has inner products of keys with two query heads: sums[half][0] and
// sums[half][1]. Return the number of the query head of sums[half][side].
__device__ __forceinline__ int head_of(int set, int side) {
    int t = threadIdx.x % 4;
    return FOLDED ? 2 * (t % 2) + side : set * 8 + 2 * t + side;
}
// A lane that called `multiply` has the inner products of query heads with two keys: sums[0][side] for the
// first key, and sums[1][side] for the second. With FOLDED, it has only one key, in sums[0][side]. Return the
// number (0 to 15) of the key of sums[half][side]. The function `log_of` returns the log weight of this key.
__device__ __forceinline__ int key_of(int half) {
    int lane = threadIdx.x % 32;
    return (FOLDED ? lane % 4 >= 2 : half) * 8 + lane / 4;
}
__device__ __forceinline__ int log_of(const Tile& tile, int half) {
    return (FOLDED ? threadIdx.x % 4 >= 2 : half) ? tile.logs[1] : tile.logs[0];
}

// Compute the inner products of 16 decoded keys with the queries of 8 heads. All lanes of a warp call this
// function. A lane receives the inner products of two keys with two heads: sums[half][side] is for key number
// `key_of(half)` and head number `head_of(set, side)`, where `half` and `side` are 0 or 1.
//   operands: the queries, uint2 [OPERANDS] in shared memory, written by prepare_query.cu.
//   set: which 8 of the group's heads.
__device__ __forceinline__ void multiply(float (&sums)[ROWS][2], const Tile& tile, const uint2* operands,
                                         int set, const Levels& levels) {
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 upper[2], lower[2];
            decode(upper, tile.signs[0][quad], tile.planes[0][quad], i / 2, i % 2, levels);
            decode(lower, tile.signs[1][quad], tile.planes[1][quad], i / 2, i % 2, levels);
            int from = ((set * QUADS + quad) * 8 + i) * 32 + threadIdx.x % 32;
            uint2 b = operands[FOLDED ? from : 2 * from];
            mma_halves(c, upper[0], lower[0], upper[1], lower[1], b.x, b.y);
            if (FOLDED) continue;
            b = operands[2 * from + 1];
            mma_halves(c, upper[0], lower[0], upper[1], lower[1], b.x, b.y);
        }
    // With up to four heads (FOLDED), one tensor core product has two kinds of columns: 0 to 3 are products
    // with the rounded queries, and 4 to 7 are products with the remainders (the rounding errors of the
    // queries). Lanes exchange these results and add them up.
    bool later = threadIdx.x % 4 >= 2;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        if (FOLDED) {
            float other = __shfl_xor_sync(ALL, later ? c[side] : c[2 + side], 2);
            sums[0][side] = (later ? c[2 + side] : c[side]) + other;
        } else {
            sums[0][side] = c[side];
            sums[ROWS - 1][side] = c[2 + side];
        }
    }
}
