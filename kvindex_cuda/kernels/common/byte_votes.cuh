// Compute the approximate scores (votes) of keys with 8-bit tensor core products. A product multiplies sign
// bits b of 16 keys, as bytes of 0 or 1, by the rounded queries r of 8 heads. The product with the signs s = ±1
// follows from Σ r s = 2 Σ r b − Σ r. Used by prepare_latents.cu, sample_latents.cu and vote_latents.cu.
// Reference: kvindex/pariskv/sign_votes.py.
//
// In shared memory, rounded queries are divided into slices of 16 coordinates. A slice contains these
// coordinates of all heads (the layout of warpgroup.cuh). Of every 32 coordinates, the even ones are in one
// slice and the odd ones in the next. With this order, one shift and one mask turn four sign bits of a key, 8
// bits apart, into four bytes.
// Compile-time constants: D, GROUP (heads of a tile), TILES, SAMPLING (1: candidates are sampled), and those of
// votes.cuh.
#pragma once
#include "common/votes.cuh"

// columns of the query matrix: one per query head, padded with zeros to a multiple of 16
constexpr int HEADS = TILES * GROUP, COLUMNS_OF = (HEADS + 15) / 16 * 16;
constexpr int PIECE = COLUMNS_OF * 16;  // bytes of one part (16 coordinates) of all rounded queries
constexpr int WIDTH = WORDS * 32;       // bytes of one rounded query

// Return the byte offset of one coordinate in the array of rounded queries: coordinate number 32 w + lane of
// the first query head.
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

// Sign bits of 16 · HALVES keys, as the left-hand matrices of tensor core products with 16 keys each. In matrix
// number `half`, lane l has sign bits of keys 16 half + l / 4 and 16 half + l / 4 + 8.
template <int HALVES>
struct Keys {
    u32 words[HALVES][WORDS][4];
};
// Load the sign bits of 16 · HALVES keys from address `signs`.
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

// Convert tensor core products to votes (approximate scores of keys), and update `best`, the maximum vote of
// each key over the heads. Of 8 query heads, a lane processes two: numbers 2 (lane % 4) and 2 (lane % 4) + 1.
//   dots: Σ r b over the coordinates for each of the lane's keys and heads, where r are the integer coordinates
//     of the rounded query and b are the sign bits of the key.
//   factor: integer by which the votes of each key are multiplied; it is computed from the key's weight.
//   sum: Σ r over the coordinates, for each of the two heads.
//   offset: for each of the two heads, the product of the query with the center of the keys, in the unit of
//     votes.
//   scale: a factor and an offset per head that convert votes to a scale that all heads share (Sampling in
//     votes.cuh).
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

// Convert the product of a query and a block center to an integer in the unit of votes (approximate scores).
__device__ __forceinline__ int offset_of(float product, float units) {
    return __float2int_rn(fminf(fmaxf(product * units, -1073741824.0f), 1073741824.0f));
}

// Four neighboring lanes have votes (approximate scores) of the same four keys, each lane for different query
// heads. Compute the maximum vote of each key over the four lanes. Each lane returns the maximum for one of the
// keys, number lane % 4.
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
