// Rows as codes (kvindex/storage/codecs.py): a byte for each number, which a scale makes elements.
// Compile-time: CODEC (CODEC_PLAIN, CODEC_INT8 or CODEC_FP8: the numbers of `CodecNumber` there).
#pragma once
#include "common/common.cuh"
#if !defined(CODEC) || !defined(CODEC_PLAIN) || !defined(CODEC_INT8) || !defined(CODEC_FP8)
#error "CODEC or the codecs' numbers are not defined"
#endif

constexpr bool ROWS_CODED = CODEC != CODEC_PLAIN;

// The numbers of four codes, of which the scale makes elements: of int8 codes as they are; of fp8
// codes (e4m3, never NaN) as float16, whose bias is 8 more, so that each is 2^-8 of its number.
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
