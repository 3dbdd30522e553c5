// Functions to prepare queries: rotate a vector with one warp, convert it to float16 numbers, and compute the
// seed of the sampling noise. Used by prepare_query.cu and prepare_latents.cu.
// Compile-time constants: D, GROUP, DTYPE, CENTERED, PLANES, SAMPLING (see votes.cuh).
#pragma once
#include "common/votes.cuh"

constexpr int PER_LANE = (D + 31) / 32;    // coordinates of a lane; they are j = 32 w + lane
constexpr int ORDER = D & -D, ODD = D / ORDER;  // D = ODD · ORDER, and ORDER is a power of two
constexpr float SMALLEST = 1.1754943508222875e-38f;
constexpr double LARGEST = 1.8e16;  // √4096 times check.LARGEST, the largest allowed norm
constexpr float SAFE = D > 256 ? 5e14f : 1e15f;  // if all coordinates are smaller than this, no norm exceeds LARGEST,
                                                 // for D up to 1,024

// Rotate a vector: x becomes R x, where R = (Q ⊗ H) diag(s) / √D. H is Sylvester's Hadamard matrix of order
// ORDER, Q is a Hartley matrix of order ODD, and s are random signs. Each lane has the coordinates 32 w + lane
// of the vector, in x[w]. Reference: kvindex/ops/transform.py.
//   signs: s / √D, in the same layout as x.
//   waves: float32 [ODD], waves[i] = cos + sin of 2πi/ODD. The entries of Q are waves[i j mod ODD].
__device__ __forceinline__ void rotate(float (&x)[PER_LANE], const float (&signs)[PER_LANE],
                                       const float* waves) {
    constexpr int WORDS_OF = ORDER >= 32 ? ORDER / 32 : 1;  // words that a factor H mixes
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) x[w] *= signs[w];
#pragma unroll
    for (int step = 1; step < WORDS_OF; step *= 2)
#pragma unroll
        for (int w = 0; w < PER_LANE; w++)
            if (!(w & step)) {
                float low = x[w], high = x[w + step];
                x[w] = low + high, x[w + step] = low - high;
            }
#pragma unroll
    for (int step = 1; step < (ORDER < 32 ? ORDER : 32); step *= 2)
#pragma unroll
        for (int w = 0; w < PER_LANE; w++) {
            float other = __shfl_xor_sync(ALL, x[w], step);
            x[w] = lane & step ? other - x[w] : x[w] + other;
        }
    if (ODD == 1) return;
    float sums[PER_LANE] = {};
#pragma unroll
    for (int i = 0; i < ODD; i++)
#pragma unroll
        for (int w = 0; w < PER_LANE; w++) {
            int word = ORDER >= 32 ? i * WORDS_OF + w % WORDS_OF : i * ORDER / 32;
            float part = ORDER >= 32 ? x[word] : __shfl_sync(ALL, x[word], i * ORDER % 32 + lane % ORDER);
            int own = (32 * w + lane) / ORDER;
            if (own < ODD) sums[w] += waves[own * i % ODD] * part;
        }
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) x[w] = sums[w];
}

// Split x into two float16 numbers: `high` is the rounded value, and `low` is the remainder (the rounding
// error). |x| must be below 2^15.
__device__ __forceinline__ void split(float x, u16& high, u16& low) {
#ifdef EMULATED
    high = to_float16(x), low = to_float16(x - from_float16(high));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high) : "f"(x));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(x - from_float16(high)));
#endif
}

// Return the largest absolute coordinate of a vector that is distributed over the lanes. Floats are compared as
// unsigned integers, so NaN is the largest value.
__device__ __forceinline__ float peak_of(const float (&x)[PER_LANE]) {
    u32 peak = 0;
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) peak = max(peak, __float_as_uint(fabsf(x[w])));
    return __uint_as_float(__reduce_max_sync(ALL, peak));
}
__device__ __forceinline__ bool in_range(const float (&x)[PER_LANE]) {
    double square = 0;
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) square += double(x[w]) * double(x[w]);
    return warp_sum(square) < LARGEST * LARGEST;
}
// Return the power of two that scales the largest coordinate, `peak`, to [2^13, 2^14).
__device__ __forceinline__ float up_of(float peak) {
    int exponent = int(__float_as_uint(fmaxf(peak, SMALLEST)) >> 23);
    return __uint_as_float(u32(254 + 13 - min(max(exponent, 20), 230)) << 23);
}

#if SAMPLING
// Compute the seed of the sampling noise for one KV head of a sequence, from the number of valid keys and from
// the sign bits of the first valid key of the sequence. Reference: kvindex.ops.priority.seeds. All lanes of a
// warp call this function. The caller has already loaded the data that is needed in most cases:
//   bits: word number `lane` of the mask of the sequence's valid tokens.
//   byte: byte number `lane` of the sign bits of token 0, which is used if token 0 is valid.
template <class Arguments>
__device__ __forceinline__ u32 seed_of(const Arguments& args, i64 batch, i64 head_offset, i64 tokens, u32 bits,
                                       u32 byte) {
    constexpr int BYTES = D / 8;
    int lane = threadIdx.x % 32;
    i64 first = 0, words = (tokens + 31) / 32;
    for (i64 from = 0; from < words; from += 32) {
        if (from) bits = from + lane < words ? args.valid[batch * args.row * 8 + from + lane] : 0;
        u32 some = __ballot_sync(ALL, bits != 0);
        if (!some) continue;
        int word = __ffs(int(some)) - 1;
        first = (from + word) * 32 + __ffs(int(__shfl_sync(ALL, bits, word))) - 1;
        break;
    }
    const u8* signs = reinterpret_cast<const u8*>(args.codes[batch * args.row + first / TOKENS]) + head_offset +
                      first % TOKENS * STRIDE;
    u32 sum = 0;
    for (int j = lane; j < BYTES; j += 32) sum += hashed((j == lane && !first ? byte : signs[j]) + 256 * j);
    u32 number = warp_sum(sum) + hashed(u32(args.counted[batch])) + u32(args.seed) * u32(SPREAD);
    return hashed(number) - u32(first) * u32(SPREAD);
}
#endif
