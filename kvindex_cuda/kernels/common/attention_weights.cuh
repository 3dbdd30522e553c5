// Functions for the attention weights of a search's candidates: find out which entries of the list are
// candidates, compute their logits, and add up the exponentials of the logits for the softmax. Used by
// rerank.cu, rerank_blocks.cu, select_rows.cu, and the kernels for latents.
// Compile-time constants: GROUP (query heads of a group), SOFTCAP (1: logits are capped).
#pragma once
#include "common/common.cuh"

constexpr int FRACTION_BITS = 28;     // fraction bits in a bucket's first octave; a bucket has room for 2^19 addends
constexpr float LOG2E = 1.4426950408889634f;

// Finds out which keys are candidates, that is, among the C keys with the highest approximate scores (votes).
// `bin` is the histogram bin of the key with the C-th highest vote. Keys in higher bins are candidates. Keys in
// this bin still have to be compared with each other.
struct Cutoff {
    int base, shift, bin;
    __device__ __forceinline__ int side(u64 entry) const {  // 1: candidate, 0: in bin number `bin`, −1: no candidate
        int mine = bin_of(vote_of(entry), base, shift);
        return (mine > bin) - (mine < bin);
    }
};

__device__ __forceinline__ float capped(float estimate, float scale, float softcap) {
    float logit = estimate * scale;
#if SOFTCAP
    logit = softcap * tanhf(logit / softcap);
#endif
    return logit;
}

// Computes Σ exp(logit) with integer additions, so that the result does not depend on their order. The
// exponentials differ by many orders of magnitude. So each range of 16 octaves (a factor of 2^16) has a partial
// sum of its own, called a bucket. Each lane has two buckets in registers: the even-numbered bucket that it used
// last, and the odd-numbered bucket that it used last. All other buckets are in memory.
struct Exponentials {
    int even = -1, odd = -1;  // numbers of the buckets
    u64 even_sum = 0, odd_sum = 0;

    __device__ __forceinline__ void add(u64* memory, float logit) {
        float x = fminf(fmaxf(logit * LOG2E, -2040.0f), 2040.0f);
        int octaves = int(floorf(x * 0.0625f)), bucket = octaves + BUCKETS / 2;
        u64 value = u64(exp2f(x - 16.0f * octaves) * float(1 << FRACTION_BITS));
        bool is_odd = bucket & 1;
        int bucket_there = is_odd ? odd : even;
        u64 sum = is_odd ? odd_sum : even_sum;
        if (bucket_there != bucket) {
            if (bucket_there >= 0) atomicAdd(memory + bucket_there, sum);
            sum = 0;
        }
        sum += value;
        odd = is_odd ? bucket : odd, even = is_odd ? even : bucket;
        odd_sum = is_odd ? sum : odd_sum, even_sum = is_odd ? even_sum : sum;
    }

    __device__ __forceinline__ void write(u64* memory) {
        if (even >= 0) atomicAdd(memory + even, even_sum);
        if (odd >= 0) atomicAdd(memory + odd, odd_sum);
    }

    // Each lane of a warp has partial sums in registers, and the number of the bucket that each sum belongs to.
    // Add these sums to the buckets in memory. Lanes with equal lane % FIRST belong to the same head. The
    // sums for the highest bucket number of a head are first added up with shuffles, and then added to memory by
    // one atomic addition. Every other sum is added by an atomic addition of its own. All lanes of the warp must
    // call this function.
    template <int FIRST>
    __device__ __forceinline__ void flush(u64* memory) {
        flush<FIRST>(memory, even, even_sum);
        flush<FIRST>(memory, odd, odd_sum);
    }
    template <int FIRST>
    // not inlined, because it has four callers
    static __device__ __noinline__ void flush(u64* memory, int bucket, u64 sum) {
        if (!__any_sync(ALL, bucket >= 0)) return;
        int top = bucket;
        for (int step = FIRST; step < 32; step *= 2) top = max(top, __shfl_xor_sync(ALL, top, step));
        if (bucket != top) {
            if (bucket >= 0) atomicAdd(memory + bucket, sum);
            sum = 0;
        }
        for (int step = FIRST; step < 32; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
        if (threadIdx.x % 32 < FIRST && top >= 0) atomicAdd(memory + top, sum);
    }
};
