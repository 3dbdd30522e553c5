// Find a threshold for the approximate scores (votes) of the keys. More than C keys almost certainly reach it,
// where C is the number of candidates. The threshold is a quantile of the votes of a sample of the keys. Used
// by prepare_query.cu and sample_latents.cu. Reference: thresholds_of in kvindex/pariskv/sign_votes.py.
// Compile-time constants: SAMPLING (1: candidates are sampled at random), SAMPLED (number of votes in the
// sample), STEP (granularity of thresholds if SAMPLING).
#pragma once
#include "common/common.cuh"

struct Threshold {
    int threshold, base, shift;  // base, shift: first bin and log2 of the width of the histogram's bins, for votes from
                                 // the threshold on
};

// Return a threshold: keys with at least this vote (approximate score) can become candidates. The threshold
// is the vote at a certain rank in `sample`; rank 1 is the highest vote. To find it, the function makes a histogram
// of the sampled votes and looks for the bin that contains this rank. Then it makes a finer histogram of that bin,
// and so on until the bin contains few votes. 256 threads call this function.
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
    // The threshold is the `rank`-th highest vote (approximate score) in a sample of the keys. At least C keys of
    // the index should reach it. `mean` is the expected number of sampled keys that are among the C best keys of the
    // index. The actual number varies about twice as much as for independently sampled keys, because neighboring
    // keys are similar. Therefore `rank` is larger than `mean`.
    float mean = all > 0 ? floorf(share * float(found) / all) : 0.0f;
    int rank = int(mean + 9 * sqrtf(mean)) + 8;
    bool enough = rank < found;
    int base = found ? low : 0, above = 0, range = 0;
    u32 width = found ? u32(top) - u32(base) : 0;
    // Return log2 of the width of a bin, for a histogram of integer scores (votes). Its BINS bins together cover
    // a range of `width` scores.
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
