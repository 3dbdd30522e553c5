// Votes of keys by products of bytes (ops.step_votes): 0 or 1 for the signs of 16 keys, the rounded queries of 8 heads
// as they are, for Σ s r = 2 Σ b r − Σ r. For sample_latents.cu and vote_latents.cu.
// Compile-time: D, GROUP (heads of a tile), TILES, DRAWN, and what votes.cuh has.
#pragma once
#include "common/votes.cuh"

constexpr int HEADS = TILES * GROUP, COLUMNS_OF = (HEADS + 7) / 8 * 8;
constexpr int WIDTH = WORDS * 32;  // bytes of a rounded query

#if DRAWN
typedef float Vote;
#define NO_VOTE NEVER
#else
typedef int Vote;
#define NO_VOTE LEAST
#endif

// Four bits as bytes of 0 or 1.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Signs as left factors: of keys 16 half + lane / 4 and 8 further.
template <int HALVES>
struct Keys {
    u32 words[HALVES][WORDS][4];
};
// signs: of the first of the 16 HALVES keys.
template <int HALVES>
__device__ __forceinline__ void load(Keys<HALVES>& keys, const char* signs) {
    int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                int key = half * 16 + row * 8 + lane / 4;
                u32 bits = *reinterpret_cast<const u32*>(signs + key * STRIDE + w * 4) >> 8 * t;
                keys.words[half][w][row] = spread(bits), keys.words[half][w][row + 2] = spread(bits >> 4);
            }
}

// Sums of `b r` to votes, the best of them beside those before: of the lane's keys, for heads 2 (lane % 4) and one more
// of 8. sum: of their rounded queries; offset: in votes; scale: of votes.cuh.
template <int HALVES>
__device__ __forceinline__ void vote(Vote (&best)[2 * HALVES], const int (&dots)[HALVES][4], const int (&factor)[2 * HALVES],
                                     int2 sum, int2 offset, float4 scale) {
#pragma unroll
    for (int i = 0; i < 4 * HALVES; i++) {
        int own = i / 2, dot = 2 * dots[own / 2][own % 2 * 2 + i % 2] - (i % 2 ? sum.y : sum.x);
        int vote = mad(dot, factor[own], i % 2 ? offset.y : offset.x);
#if DRAWN
        best[own] = fmaxf(best[own], fmaf(float(vote), i % 2 ? scale.z : scale.x, i % 2 ? scale.w : scale.y));
#else
        best[own] = max(best[own], vote);
#endif
    }
}

// What a center's product with a query is in votes.
__device__ __forceinline__ int offset_of(float product, float units) {
    return __float2int_rn(fminf(fmaxf(product * units, -1073741824.0f), 1073741824.0f));
}

// The best of four lanes' heads: lane t has it of its t-th key of `best`.
template <int KEYS>
__device__ __forceinline__ Vote best_of(Vote (&best)[KEYS]) {
    Vote mine = NO_VOTE;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            Vote other = __shfl_xor_sync(ALL, best[i], step);
            best[i] = other > best[i] ? other : best[i];
        }
        if (threadIdx.x % 4 == i) mine = best[i];
    }
    return mine;
}
