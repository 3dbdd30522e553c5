// Votes of keys by products of bytes (pariskv.sign_votes): 0 or 1 for the signs of 16 keys, the rounded queries of 8 heads
// as they are, for Σ s r = 2 Σ b r − Σ r. For prepare_latents.cu, sample_latents.cu and vote_latents.cu.
//
// Rounded queries lie in pieces of 16 coordinates, of all heads side by side, as the matrix unit reads them in shared
// memory (warpgroup.cuh). Of 32 coordinates a piece has the even ones, the next the odd ones: four bits of a key, 8
// apart, are four bytes of it by a shift and a mask.
// Compile-time: D, GROUP (heads of a tile), TILES, DRAWN, and what votes.cuh has.
#pragma once
#include "common/votes.cuh"

constexpr int HEADS = TILES * GROUP, COLUMNS_OF = (HEADS + 15) / 16 * 16;  // zeros after the heads
constexpr int PIECE = COLUMNS_OF * 16;  // bytes of a piece of all rounded queries
constexpr int WIDTH = WORDS * 32;       // bytes of a rounded query

// Where coordinate `lane` of 32 w is among the rounded queries, of head 0.
__device__ __forceinline__ int byte_of(int w, int lane) {
    return (2 * w + lane % 2) * PIECE + lane / 2 % 4 * 4 + lane / 8;
}

#if DRAWN
typedef float Vote;
#define NO_VOTE NEVER
#else
typedef int Vote;
#define NO_VOTE LEAST
#endif

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
                u32 bits = *reinterpret_cast<const u32*>(signs + key * STRIDE + w * 4) >> 2 * t;
                keys.words[half][w][row] = bits & 0x01010101u, keys.words[half][w][row + 2] = bits >> 1 & 0x01010101u;
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
