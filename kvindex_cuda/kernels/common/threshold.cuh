// Find a threshold for votes that more than C keys almost certainly reach, where C is the number of candidates.
// The threshold is a quantile of the votes of a sample of the keys. Used by prepare_query.cu and
// sample_latents.cu. Reference: thresholds_of in kvindex/pariskv/sign_votes.py.
// Compile-time constants: SAMPLING (1: candidates are sampled), SAMPLED (votes in the sample), STEP
// (granularity of thresholds if SAMPLING).
#pragma once
#include "common/common.cuh"

struct Threshold {
    int threshold, base, shift;  // base, shift: first bin and log2 of the width of the histogram's bins, for votes from
                                 // the threshold on
};

// Find the threshold: the vote that has rank `rank` in the sample, counted from the highest. This repeats a
// histogram, each time of the bin that contains that vote, until few votes are left in the bin. 256 threads
// call this function.
//   share: C, the number of candidates.
//   all: number of valid keys.
//   histogram: int [BINS] in shared memory, aligned to 16 bytes.
__device__ __forceinline__ Threshold threshold_of(const int* sample, float share, float all, int* histogram) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int EACH = SAMPLED / 256;
    __shared__ int counts[8], lows[8], tops[8];
    int each[EACH], found = 0, top = LEAST, low = 2147483647;
#pragma unroll
    for (int i = 0; i < EACH; i++) each[i] = __ldcg(sample + i * 256 + threadIdx.x);
    for (int i = threadIdx.x; i < BINS; i += 256) histogram[i] = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (each[i] != LEAST) found++, top = max(top, each[i]), low = min(low, each[i]);
    found = warp_sum(found);
    top = warp_max(top);
    low = -1 - warp_max(-1 - low);
    if (lane == 0) counts[warp] = found, tops[warp] = top, lows[warp] = low;
    __syncthreads();
    found = 0;
    for (int i = 0; i < 8; i++)
        found += counts[i], top = max(top, tops[i]), low = min(low, lows[i]);
    // On average, `mean` votes of the sample belong to the C best keys. The actual number varies: about twice as
    // much as for independent samples, because neighboring keys are similar. `rank` has a margin for that.
    float mean = all > 0 ? floorf(share * float(found) / all) : 0.0f;
    int rank = int(mean + 9 * sqrtf(mean)) + 8;
    bool enough = rank < found;
    int base = found ? low : 0, above = 0, range = 0;
    u32 width = found ? u32(top) - u32(base) : 0;
    // return log2 of the bin width with which BINS bins cover a range of `width` votes
    auto shift_of = [](u32 width) { return max(0, 21 - __clz(int(width))); };
    while (enough) {
        range = shift_of(width);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 over = u32(each[i]) - u32(base);
            if (each[i] >= base && over <= width) atomicAdd(histogram + (over >> range), 1);
        }
        __syncthreads();
        Cut cut = cut_of<true>(histogram, rank - above);
        int many = histogram[cut.bin];
        base += int(u32(cut.bin) << range);
        above += cut.above;
        if (range == 0 || many <= 16 + rank / 8) break;
        width = (1u << range) - 1;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += 256) histogram[i] = 0;
        __syncthreads();
    }
    if (SAMPLING) base &= -STEP;
    return {enough ? base : LEAST + 1, base,  // no valid key has the vote LEAST
            SAMPLING ? shift_of(STEP * BINS - 1) : found ? shift_of(u32(top) - u32(base)) : 0};
}
