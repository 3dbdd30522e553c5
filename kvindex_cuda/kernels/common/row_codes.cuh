// Decode rows (keys and values) that are stored with one byte per number and a float32 scale
// (kvindex/storage/codecs.py).
// Compile-time constant: CODEC (CODEC_PLAIN, CODEC_INT8 or CODEC_FP8, the values of `CodecNumber` in that
// file).
#pragma once
#include "common/fp8.cuh"
#if !defined(CODEC) || !defined(CODEC_PLAIN) || !defined(CODEC_INT8) || !defined(CODEC_FP8)
#error "CODEC or the codecs' numbers are not defined"
#endif

constexpr bool ROWS_CODED = CODEC != CODEC_PLAIN;

// Convert four bytes of a stored row to floats x. The numbers that they represent are x · CODED · scale, where
// `scale` is stored with the row.
constexpr float CODED = CODEC == CODEC_FP8 ? FP8_UNIT : 1;
__device__ __forceinline__ void from_codes(float (&x)[4], u32 word) {
#if CODEC == CODEC_FP8
    from_fp8(x, word);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = float(i8(word >> (8 * i)));
#endif
}
