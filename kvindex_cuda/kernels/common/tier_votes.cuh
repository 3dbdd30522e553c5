// What vote.cu and candidates.cu agree on: how the tokens are cut into pieces.
#pragma once
#include "common/common.cuh"

constexpr int CHUNK = 1024;   // keys of a block at a time: 4 blocks of codes
constexpr int PIECES = 256;   // of the tokens, each some chunks: ties are counted by pieces
constexpr int POINTS = 256;   // more than a key can have from tiers: 6 M, with 4 heads in a word

// Tokens of a piece.
__device__ __forceinline__ i64 piece_of(i64 tokens) {
    i64 chunks = (tokens + CHUNK - 1) / CHUNK;
    return max(i64(1), (chunks + PIECES - 1) / PIECES) * CHUNK;
}
