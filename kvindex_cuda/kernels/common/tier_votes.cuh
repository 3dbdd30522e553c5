// Code that the two kernels for tiered votes (approximate scores of keys), vote.cu and candidates.cu, share: it
// divides tokens into chunks, and loads sign bits.
#pragma once
#include "common/common.cuh"

// Return the number of tokens per chunk, when the `tokens` tokens of an index are divided into chunks. It is the
// smallest multiple of CHUNK that gives at most PIECES chunks.
__device__ __forceinline__ i64 piece_of(i64 tokens) {
    i64 chunks = (tokens + CHUNK - 1) / CHUNK;
    return max(i64(1), (chunks + PIECES - 1) / PIECES) * CHUNK;
}

// Load the sign bits of one key: key number threadIdx.x of the block of keys whose sign bits begin at `signs`.
template <int WORDS>
__device__ __forceinline__ void load_signs(u32 (&words)[WORDS], const char* signs) {
    const u32* from = reinterpret_cast<const u32*>(signs) + threadIdx.x * WORDS;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
            uint4 all = reinterpret_cast<const uint4*>(from)[w / 4];
            words[w] = all.x, words[w + 1] = all.y, words[w + 2] = all.z, words[w + 3] = all.w;
        }
    } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = from[w];
    }
}
