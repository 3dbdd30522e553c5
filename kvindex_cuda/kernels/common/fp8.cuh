// Convert 8-bit floats (e4m3, without infinities).
#pragma once
#include "common/common.cuh"

// Convert four e4m3 numbers in the bytes of `word` to floats x, which are the numbers divided by FP8_UNIT: their
// bits are shifted to become float16 numbers, whose exponent bias is 8 higher.
constexpr float FP8_UNIT = 256;
__device__ __forceinline__ void from_fp8(float (&x)[4], u32 word) {
    float2 even = from_float16s((word << 8 & 0x80008000) | (word << 7 & 0x3f803f80));
    float2 odd = from_float16s((word & 0x80008000) | (word >> 1 & 0x3f803f80));
    x[0] = even.x, x[1] = odd.x, x[2] = even.y, x[3] = odd.y;
}
