// Shares of attention: the cut among candidates, logits, sums of exponentials as integers. For rerank.cu,
// rerank_blocks.cu and select_rows.cu.
// Compile-time: GROUP, SOFTCAP.
#pragma once
#include "common/common.cuh"

constexpr int FRACTION_BITS = 28;     // bits of a bucket below its first octave: 2^19 addends fit
constexpr float LOG2E = 1.4426950408889634f;

// Which entries of the list are candidates: the C best. They lie in bins above that of the cut; those of the
// cut's own bin, the edge, are told apart by their words once all are known.
struct Cutoff {
    int base, shift, bin;
    __device__ __forceinline__ int side(u64 entry) const {  // 1 in, 0 edge, −1 out
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

// Sums of exponentials as integers, one for every 16 octaves: a lane has those of the last even
// and the last odd bucket that it met, the others are in memory.
struct Exponentials {
    int even = -1, odd = -1;  // buckets
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

    // All lanes call it: those of a head (lane % FIRST) add up their sums of their top bucket.
    template <int FIRST>
    __device__ __forceinline__ void flush(u64* memory) {
        flush<FIRST>(memory, even, even_sum);
        flush<FIRST>(memory, odd, odd_sum);
    }
    template <int FIRST>
    static __device__ __noinline__ void flush(u64* memory, int bucket, u64 sum) {  // for four callers
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
