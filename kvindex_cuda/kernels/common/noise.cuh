// Noise of keys, by which candidates and rows are drawn (kvindex/ops/priority.py): the same integers there.
//
// A logarithm is in units of 2^-16 of an octave.
// Compile-time: SPREAD, ADDED, FACTOR_0, FACTOR_1, CURVE_0 to CURVE_3 (runtime/constants.py).
#pragma once
#include "common/common.cuh"

constexpr float NATS = 1.0576586617430806e-05f;  // log(2) / 2^16

__device__ __forceinline__ u32 hashed(u32 x) {
    u64 both = u64(x) * FACTOR_0 + ADDED;
    both = u64(u32(both >> 32) ^ u32(both)) * FACTOR_1 + ADDED;
    return u32(both >> 32) ^ u32(both);
}

// What a key's size and noise come to at most, .09 octaves above it, less NOISE_BOUND: a float's exponent and
// mantissa are a logarithm that goes straight between powers of two.
constexpr float NOISE_BOUND = (32 + 127) << 16;
__device__ __forceinline__ float bound_of(float size, u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed);
    return fmaf(float(int(__float_as_uint(__uint2float_rn(bits)))), -1.0f / 128, size);
}
// What bounds are compared with for a threshold: what is rounded on the way is taken off.
__device__ __forceinline__ float lowered(int threshold) {
    float exact = float(threshold);
    return exact - NOISE_BOUND - fabsf(exact) * 4.76837158203125e-07f - 64;
}

// −log2 u of a key, from the seed of its group: u is an odd multiple of 2^-32.
__device__ __forceinline__ int noise_of(u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed) | 1;
    int zeros = __clz(int(bits)), t = int(bits << zeros << 1 >> 16), curve = CURVE_3;
    curve = CURVE_2 + (curve * t >> 16);
    curve = CURVE_1 + (curve * t >> 16);
    curve = CURVE_0 + (curve * t >> 16);
    return ((1 + zeros) << 16) - t - ((t * (65536 - t) >> 16) * curve >> 16);
}

// From L1, each time anew: no register is to hold it.
__device__ __forceinline__ float4 load_again(const float4* place) {
#ifdef EMULATED
    return *place;
#else
    float4 four;
    asm volatile("ld.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(place));
    return four;
#endif
}

// Of a key with a size.
__device__ __forceinline__ int priority_of(float size, u32 id, u32 seed) {
    return __float2int_rn(fminf(fmaxf(size, -536870912.0f), 536870912.0f)) + noise_of(id, seed);
}

// −log π of a candidate, from its priority and the threshold.
__device__ __forceinline__ float log_weight(int priority, u32 id, u32 seed, int threshold) {
    i64 above = i64(priority) - noise_of(id, seed) - threshold;
    return above < 0 ? float(-above) * NATS : 0.0f;
}
