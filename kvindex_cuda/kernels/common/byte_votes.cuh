// Compute votes of keys with a product of 8-bit matrices: the sign bits of 16 keys, as bytes of 0 or 1, times
// the rounded queries r of 8 heads. For sign bits b and signs s, Σ s r = 2 Σ b r − Σ r. Used by
// prepare_latents.cu, sample_latents.cu and vote_latents.cu. Reference: kvindex/pariskv/sign_votes.py.
//
// Rounded queries are stored in parts of 16 coordinates. A part has these coordinates of all heads next to
// each other, in the order in which tensor cores read shared memory (warpgroup.cuh). Of every 32
// coordinates, one part has the even ones and the next part has the odd ones. In that order, four bits of a
// key that are 8 apart become four bytes with one shift and one mask.
// Compile-time constants: D, GROUP (heads of a tile), TILES, SAMPLING (1: candidates are sampled), and those of
// votes.cuh.
#pragma once
#include "common/votes.cuh"

// columns of the right matrix: one per query head, then zeros up to a multiple of 16
constexpr int HEADS = TILES * GROUP, COLUMNS_OF = (HEADS + 15) / 16 * 16;
constexpr int PIECE = COLUMNS_OF * 16;  // bytes of one part (16 coordinates) of all rounded queries
constexpr int WIDTH = WORDS * 32;       // bytes of one rounded query

// Byte offset of coordinate `32 w + lane` of head 0 among the rounded queries.
__device__ __forceinline__ int byte_of(int w, int lane) {
    return (2 * w + lane % 2) * PIECE + lane / 2 % 4 * 4 + lane / 8;
}

#if SAMPLING
typedef float Vote;
#define NO_VOTE NEVER
#else
typedef int Vote;
#define NO_VOTE LEAST
#endif

// Sign bits of 16 · HALVES keys, one left matrix per 16 keys. In matrix `half`, a lane has the sign bits of
// keys 16 half + lane / 4 and 16 half + lane / 4 + 8.
template <int HALVES>
struct Keys {
    u32 words[HALVES][WORDS][4];
};
// Load the sign bits of 16 · HALVES keys. `signs` is the address of the first key's sign bits.
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

// Convert the products Σ b r of a lane's keys to votes, and update `best`, the maximum over heads. A lane has
// the products for two heads of a set of 8: 2 (lane % 4) and 2 (lane % 4) + 1. For these two heads:
//   sum: Σ r.
//   offset: product of query and center, in the unit of votes.
//   scale: see Sampling in votes.cuh.
template <int HALVES>
__device__ __forceinline__ void vote(Vote (&best)[2 * HALVES], const int (&dots)[HALVES][4], const int (&factor)[2 * HALVES],
                                     int2 sum, int2 offset, float4 scale) {
#pragma unroll
    for (int i = 0; i < 4 * HALVES; i++) {
        int own = i / 2, dot = 2 * dots[own / 2][own % 2 * 2 + i % 2] - (i % 2 ? sum.y : sum.x);
        int vote = mad(dot, factor[own], i % 2 ? offset.y : offset.x);
#if SAMPLING
        best[own] = fmaxf(best[own], fmaf(float(vote), i % 2 ? scale.z : scale.x, i % 2 ? scale.w : scale.y));
#else
        best[own] = max(best[own], vote);
#endif
    }
}

// Convert the product of a query and a center to an integer in the unit of votes.
__device__ __forceinline__ int offset_of(float product, float units) {
    return __float2int_rn(fminf(fmaxf(product * units, -1073741824.0f), 1073741824.0f));
}

// Compute the maximum over the heads of four neighboring lanes. Of the four, lane t returns the maximum for
// the t-th key of `best`.
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
