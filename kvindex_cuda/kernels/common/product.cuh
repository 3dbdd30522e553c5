// Multiply the codes of 16 keys with the queries of all heads of a group on tensor cores (ParisKV paper, B.2.2,
// equation 10). The codes are decoded to float16 in registers, without rounding. Reference:
// kvindex.ops.rerank.estimate.
// Compile-time constants: D, BITS (of a magnitude), GROUP (query heads of a group).
#pragma once
#include "common/levels.cuh"
#include "common/operands.cuh"

constexpr int ROWS = FOLDED ? 1 : 2;  // keys, out of 16, whose estimates a lane has

// Codes of 16 keys. Lane l has words of the sign bits and magnitude planes of keys l / 4 (index 0) and l / 4 +
// 8 (index 1): words l % 4, l % 4 + 4, and so on.
struct Tile {
    u32 signs[2][QUADS], planes[2][QUADS][BITS > 0 ? BITS : 1];
    int logs[2];
};

// Load the codes of key number `key` of a block, as the lane's first (`half` = 0) or second key of the tile.
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

// Return the number of the query head whose results `multiply` has put into sums[·][side] of this lane.
__device__ __forceinline__ int head_of(int set, int side) {
    int t = threadIdx.x % 4;
    return FOLDED ? 2 * (t % 2) + side : set * 8 + 2 * t + side;
}
// Return the number (0 to 15) of the key whose results `multiply` has put into sums[half] of this lane.
// `log_of` returns the log weight of this key.
__device__ __forceinline__ int key_of(int half) {
    int lane = threadIdx.x % 32;
    return (FOLDED ? lane % 4 >= 2 : half) * 8 + lane / 4;
}
__device__ __forceinline__ int log_of(const Tile& tile, int half) {
    return (FOLDED ? threadIdx.x % 4 >= 2 : half) ? tile.logs[1] : tile.logs[0];
}

// Multiply the decoded codes of 16 keys with the queries of 8 heads. sums[half][side] is the result for key
// `key_of(half)` and head `head_of(set, side)`. operands: uint2 [OPERANDS] in shared memory, written by
// prepare_query.cu. All lanes of a warp call this function.
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
    // With up to four heads (FOLDED), columns 0 to 3 of the product belong to the rounded queries, and columns
    // 4 to 7 to the remainders. Lanes exchange these results and add them up.
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
