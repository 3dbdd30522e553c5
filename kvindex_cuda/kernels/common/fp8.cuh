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

// Convert a float to e4m3: round to nearest, ties to even. Sizes above 448, the largest number, become 448. NaN
// stays NaN. The results are those of the instruction `cvt.rn.satfinite.e4m3x2.f32` of newer GPUs.
__device__ __forceinline__ u32 to_fp8(float x) {
    if (x != x) return 0x7f;
    u32 sign = __float_as_uint(x) >> 24 & 0x80;
    float size = fminf(fabsf(x), 448.0f);
    // below 2^-6, numbers are multiples of 2^-9; the sum is rounded to such a multiple
    if (size < 0.015625f) return sign | (__float_as_uint(size + 16384.0f) - __float_as_uint(16384.0f));
    u32 whole = __float_as_uint(size) - (120u << 23);  // exponents are 120 lower than those of a float
    return sign | (whole + 0x7ffff + (whole >> 20 & 1)) >> 20;
}
