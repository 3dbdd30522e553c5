// Random noise per key, for sampling candidates and rows. The integers are the same as in the reference,
// kvindex/ops/priority.py.
//
// The noise of a key is -log2 u, where u is a pseudorandom number in (0, 1). Logarithms are in units of 2^-16
// octaves.
// Compile-time constants (runtime/constants.py): SPREAD, ADDED, FACTOR_0 and FACTOR_1 of the hash, CURVE_0 to
// CURVE_3 of the logarithm.
#pragma once
#include "common/common.cuh"

constexpr float NATS = 1.0576586617430806e-05f;  // log(2) / 2^16, converts units to natural logarithms

__device__ __forceinline__ u32 hashed(u32 x) {
    u64 both = u64(x) * FACTOR_0 + ADDED;
    both = u64(u32(both >> 32) ^ u32(both)) * FACTOR_1 + ADDED;
    return u32(both >> 32) ^ u32(both);
}

// Return an upper bound of a key's size plus noise, minus the constant NOISE_BOUND. The bound is at most 0.09
// octaves too high. It uses the bits of a float, read as an integer, as an approximate logarithm: they are
// linear between powers of two.
constexpr float NOISE_BOUND = (32 + 127) << 16;
__device__ __forceinline__ float bound_of(float size, u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed);
    return fmaf(float(int(__float_as_uint(__uint2float_rn(bits)))), -1.0f / 128, size);
}
// Convert a threshold for comparison with `bound_of`. The result is lower by the largest rounding error, so
// that the comparison misses no key.
__device__ __forceinline__ float lowered(int threshold) {
    float exact = float(threshold);
    return exact - NOISE_BOUND - fabsf(exact) * 4.76837158203125e-07f - 64;
}

// Return the noise of a key, −log2 u in units of 2^-16. The pseudorandom number u follows from the key's
// token id and the seed of the key's group; it is an odd multiple of 2^-32.
__device__ __forceinline__ int noise_of(u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed) | 1;
    int zeros = __clz(int(bits)), t = int(bits << zeros << 1 >> 16), curve = CURVE_3;
    curve = CURVE_2 + (curve * t >> 16);
    curve = CURVE_1 + (curve * t >> 16);
    curve = CURVE_0 + (curve * t >> 16);
    return ((1 + zeros) << 16) - t - ((t * (65536 - t) >> 16) * curve >> 16);
}

// Load four floats. Every call loads them from L1 again, so that the compiler does not keep them in
// registers.
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

// Priority of a key: its size plus its noise.
__device__ __forceinline__ int priority_of(float size, u32 id, u32 seed) {
    return __float2int_rn(fminf(fmaxf(size, -536870912.0f), 536870912.0f)) + noise_of(id, seed);
}

// Return the log weight −log π of a candidate, where π is the probability with which its key was sampled.
__device__ __forceinline__ float log_weight(int priority, u32 id, u32 seed, int threshold) {
    i64 above = i64(priority) - noise_of(id, seed) - threshold;
    return above < 0 ? float(-above) * NATS : 0.0f;
}
