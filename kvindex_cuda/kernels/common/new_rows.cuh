// Convert the keys and values of new tokens to the format in which an engine's pages store them: unchanged, or in
// FP8 (e4m3) with one byte per number.
// Compile-time constants: FP8_PAGES, DTYPE (see write_pages.cu).
#pragma once
#include "common/fp8.cuh"

// A piece is what one thread copies at a time: 16 bytes of a stored row, or 8 numbers in FP8.
#if FP8_PAGES
typedef uint2 Piece;
constexpr int WIDTH = DTYPE == 0 ? 2 : 1;  // units of 16 bytes of a piece of a new key or value
#else
typedef uint4 Piece;
constexpr int WIDTH = 1;
#endif

// Return a piece of a new key or value as it is stored. `from` is its first unit of 16 bytes. Numbers in FP8 are
// divided by `scale` before they are rounded.
__device__ __forceinline__ Piece to_stored(const uint4* from, float scale) {
#if FP8_PAGES
    u32 words[4 * WIDTH], codes[2] = {};
#pragma unroll
    for (int r = 0; r < WIDTH; r++) {
        uint4 all = from[r];
        words[4 * r] = all.x, words[4 * r + 1] = all.y, words[4 * r + 2] = all.z, words[4 * r + 3] = all.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#if DTYPE == 0
        float x = __uint_as_float(words[i]);
#elif DTYPE == 1
        float x = from_float16(u16(words[i / 2] >> (i % 2 * 16)));
#else
        float x = from_bfloat16(u16(words[i / 2] >> (i % 2 * 16)));
#endif
        codes[i / 4] |= to_fp8(__fdiv_rn(x, scale)) << (i % 4 * 8);
    }
    return {codes[0], codes[1]};
#else
    return *from;
#endif
}
