// Votes by look-ups: how vote.cu and candidates.cu cut the tokens into pieces.
#pragma once
#include "common/common.cuh"

// Tokens of a piece.
__device__ __forceinline__ i64 piece_of(i64 tokens) {
    i64 chunks = (tokens + CHUNK - 1) / CHUNK;
    return max(i64(1), (chunks + PIECES - 1) / PIECES) * CHUNK;
}
