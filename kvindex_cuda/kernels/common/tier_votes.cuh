// What vote.cu and candidates.cu agree on: how the tokens are cut into pieces, and bins of votes.
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

// The bin of any vote: below 64 each number has its own, then 32 to an octave; the larger the
// better, negative ones mirrored. And the least vote of a bin.
__device__ __forceinline__ int coarse_bin(int vote) {
    u32 size = u32(vote < 0 ? ~vote : vote);
    int over = max(0, 26 - __clz(int(size | 1)));
    int bin = over ? over * 32 + int(size >> over) : int(size);
    return BINS / 2 + (vote < 0 ? ~bin : bin);
}
__device__ __forceinline__ int least_of(int bin) {
    auto size_of = [](int bin) {  // the least that is in it
        int over = bin < 64 ? 0 : bin / 32 - 1;
        return over ? u32(bin - over * 32) << over : u32(bin);
    };
    bin -= BINS / 2;
    return bin < 0 ? int(~(size_of(~bin + 1) - 1)) : int(size_of(bin));
}
