// Decode rows (keys and values) that are stored with one byte per number and a float32 scale
// (kvindex/storage/codecs.py).
// Compile-time constant: CODEC (CODEC_PLAIN, CODEC_INT8 or CODEC_FP8, the values of `CodecNumber` in that
// file).
#pragma once
#include "common/common.cuh"
#if !defined(CODEC) || !defined(CODEC_PLAIN) || !defined(CODEC_INT8) || !defined(CODEC_FP8)
#error "CODEC or the codecs' numbers are not defined"
#endif

constexpr bool ROWS_CODED = CODEC != CODEC_PLAIN;

// Convert four bytes of a stored row to floats x. The numbers that they represent are x · CODED · scale, where
// `scale` is stored with the row. For fp8 (e4m3), the bits are shifted to become float16 numbers. These are
// 2^-8 times too small, because the exponent bias of float16 is 8 higher; the constant CODED = 256 corrects
// this.
constexpr float CODED = CODEC == CODEC_FP8 ? 256 : 1;
__device__ __forceinline__ void from_codes(float (&x)[4], u32 word) {
#if CODEC == CODEC_FP8
    float2 even = from_float16s((word << 8 & 0x80008000) | (word << 7 & 0x3f803f80));
    float2 odd = from_float16s((word & 0x80008000) | (word >> 1 & 0x3f803f80));
    x[0] = even.x, x[1] = odd.x, x[2] = even.y, x[3] = odd.y;
#else
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = float(i8(word >> (8 * i)));
#endif
}
