// Noise of keys, by which candidates and rows are drawn (kvindex/ops/priority.py): the same integers there.
//
// A logarithm is in units of 2^-16 of an octave.
// Compile-time: SPREAD, STEP, ROUND_0, ROUND_1, CURVE_0 to CURVE_3 (runtime/constants.py).
#pragma once
#include "common/common.cuh"

constexpr float NATS = 1.0576586617430806e-05f;  // log(2) / 2^16

__device__ __forceinline__ u32 hashed(u32 x) {
    x = (x ^ x >> 16) * u32(ROUND_0);
    x = (x ^ x >> 15) * u32(ROUND_1);
    return x ^ x >> 15;
}

// At least the noise of a key, .09 octaves above it at most: a float's exponent and mantissa are a logarithm that
// goes straight between powers of two. 16 units are for what both round.
__device__ __forceinline__ int noise_bound(u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed);
    return ((32 + 127) << 16) + 16 - int(__float_as_uint(__uint2float_rn(bits)) >> 7);
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

// Of a key with a size, which is rounded and within 2^29.
__device__ __forceinline__ int priority_of(int size, u32 id, u32 seed) { return size + noise_of(id, seed); }

// −log π of a candidate, from its priority and the threshold.
__device__ __forceinline__ float log_weight(int priority, u32 id, u32 seed, int threshold) {
    i64 above = i64(priority) - noise_of(id, seed) - threshold;
    return above < 0 ? float(-above) * NATS : 0.0f;
}
