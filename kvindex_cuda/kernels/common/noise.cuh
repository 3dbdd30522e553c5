// Pseudorandom noise for sampling keys at random, by priority (kvindex/ops/priority.py, with identical integer
// results). The noise of a key is −log2 u with u uniform in (0, 1), as an integer in units of 2^-16. It is
// computed by a hash of the token id and a polynomial for the logarithm.
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

// Return an upper bound of a key's priority, minus the constant NOISE_BOUND. The priority is the logarithm of the
// key's estimated attention weight (`size`) plus random noise, the logarithm of a random number. Both are base-2
// logarithms in units of 2^-16. The bound takes less time than the priority, because it only approximates the
// logarithm of the random number: it reads the bits of a float as an integer. The bound is at most 0.09 · 2^16
// units higher than the priority.
constexpr float NOISE_BOUND = (32 + 127) << 16;
__device__ __forceinline__ float bound_of(float size, u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed);
    return fmaf(float(int(__float_as_uint(__uint2float_rn(bits)))), -1.0f / 128, size);
}
// Convert a threshold for priorities so that it can be compared with the upper bounds that `bound_of` returns.
// The result is lower by the largest rounding error, so that no key with a higher priority is missed.
__device__ __forceinline__ float lowered(int threshold) {
    float exact = float(threshold);
    return exact - NOISE_BOUND - fabsf(exact) * 4.76837158203125e-07f - 64;
}

// Return the noise of a key: −log2 u in units of 2^-16. The random number u in (0, 1) is a hash of the token's
// position `id` and of `seed`, the seed of a group of query heads.
__device__ __forceinline__ int noise_of(u32 id, u32 seed) {
    u32 bits = hashed(id * u32(SPREAD) + seed) | 1;
    int zeros = __clz(int(bits)), t = int(bits << zeros << 1 >> 16), curve = CURVE_3;
    curve = CURVE_2 + (curve * t >> 16);
    curve = CURVE_1 + (curve * t >> 16);
    curve = CURVE_0 + (curve * t >> 16);
    return ((1 + zeros) << 16) - t - ((t * (65536 - t) >> 16) * curve >> 16);
}

// Load four floats with a volatile instruction, so that the compiler loads them again instead of spending
// registers on them.
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

// Return the priority of a key: the logarithm of its estimated attention weight (`size`) plus its random noise.
__device__ __forceinline__ int priority_of(float size, u32 id, u32 seed) {
    return __float2int_rn(fminf(fmaxf(size, -536870912.0f), 536870912.0f)) + noise_of(id, seed);
}

// Return the log weight −log π of a sampled candidate. π is the probability with which the candidate was sampled:
// π = min(1, 2^((size − threshold) / 2^16)). Here `size` is the logarithm of the key's estimated attention weight
// to base 2, in units of 2^-16. The function computes it by subtracting the key's random noise from its priority.
__device__ __forceinline__ float log_weight(int priority, u32 id, u32 seed, int threshold) {
    i64 above = i64(priority) - noise_of(id, seed) - threshold;
    return above < 0 ? float(-above) * NATS : 0.0f;
}
