// Choose how many rows a KV head samples: the smallest of COUNTS numbers for which the expected error of attention
// is within a limit. The choice needs the candidates' estimated attention weights alone, so it is made before any
// row is read. Reference: kvindex/pariskv/row_budget.py. Used by select_rows.cu and select_latents.cu.
//
// Let w be a candidate's sampling weight (the root mean square of the heads' attention weights), c the probability
// with which it was sampled, and τ(k) the priority that follows the k largest ones. If k rows are sampled, the
// expected variance of their attention weights is
//     Σ GROUP w² / c · (max(τ(k) / w, 1 / c) − 1)        (sum over the candidates).
// 1. Find τ(k) for all numbers k together: the histogram of priorities shows which bins contain them, and the
//    entries in these bins are sorted.
// 2. Add up the variances for all numbers k together. The sums are integers, in units of the limit, so that they
//    do not depend on the order of the candidates, and every run chooses the same number.
//
// Limited by latency and by the arithmetic of one multiprocessor per KV head.
// Compile-time constants: COUNTS (numbers of rows to choose from), GROUP, THREADS, FEWEST (the smallest of these
// numbers, unless k is smaller).
#pragma once
#include "common/attention_weights.cuh"
#include "common/in_order.cuh"
#include "common/noise.cuh"

constexpr float CLAMP = 80;  // equals -pariskv.row_budget.FAINT: no term of a sum becomes infinite
// The limit of the variance, as an integer. A term, and the sum of a thread, are at most 8 times this number, so that
// sums of a warp fit into 32 bits. A larger sum is not within the limit either.
constexpr int WITHIN = 1 << 22, BEYOND = 1 << 25;
constexpr float SMALLEST_LIMIT = 1e-30f, LARGEST_TERM = 1e30f;

// Return the number `i` of the numbers of rows to choose from: 16, 24, 32, 48, 64, … and k.
__device__ __forceinline__ int count_at(int i, int k) {
    return i == COUNTS - 1 ? k : (i % 2 ? FEWEST + FEWEST / 2 : FEWEST) << i / 2;
}

// Add the attention weight of resident rows to log Σ exp of the candidates' logits, `total`. Every lane gets the
// result. All lanes of a warp call this function.
//   part: largest logit and Σ exp(logit − largest) of one part of the resident rows; {−inf, 0} in the other lanes.
//   more: log Σ exp of the logits of further tokens, or null.
__device__ __forceinline__ float with_residents(float total, float2 part, const float* more) {
    float peak = warp_max(part.x), other = more ? __ldcg(more) : NEVER;
    float sum = warp_sum(part.y > 0 ? part.y * expf(part.x - peak) : 0.0f);
    auto add = [&](float log) {
        if (!(log > NEVER && log < 3e38f)) return;  // no such rows, or a query that is not finite
        float high = fmaxf(total, log), low = fminf(total, log);
        total = high + log1pf(expf(low - high));
    };
    if (sum > 0) add(peak + logf(sum));
    add(other);
    return total;
}

// Shared memory of `choose_rows`.
struct Budget {
    u32 marked[BINS / 32];  // bit: the bin contains a threshold
    int sums[THREADS / 32];
    Cut cuts[COUNTS];       // for each number of rows k: where the (k + 1)-th largest priority is
    int ranks[COUNTS];      // its rank among the entries in marked bins, from 0
    float thresholds[COUNTS];  // τ(k), or −inf if there are at most k candidates; later, the factor exp(τ(k) − τ(k₀))
    u32 parts[COUNTS][THREADS / 32];  // the variance for each number of rows, from each warp
    u64 variances[COUNTS];
};

// Sort ids: call put(i, n) for each i below `count`, where n is the number of lower ids. The ids are divided into
// buckets by their highest bits, and compared with those of the same bucket. For many ids, this takes less time than
// comparing all of them with each other. All threads of the block call this function.
//   ids: different ids, none below 0, in shared memory.
//   buckets: int [BINS] in shared memory, aligned to 16 bytes.
//   room: int [count] in shared memory.
//   sums: int [THREADS / 32] in shared memory.
constexpr int FEW_SORTED = 256;  // up to so many ids, comparing all is as fast
template <class Put>
__device__ __forceinline__ void places_by_id(const int* ids, int count, int* buckets, int* room, int* sums, Put put) {
    static_assert(BINS == 4 * THREADS, "each thread adds up four buckets");
    __shared__ int largest;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) buckets[i] = 0;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) mine = max(mine, ids[i]);
    mine = warp_max(mine);
    if (lane == 0) atomicMax(&largest, mine);
    __syncthreads();
    int shift = max(0, 32 - __clz(largest / BINS));  // the smallest one with largest >> shift < BINS
    for (int i = threadIdx.x; i < count; i += THREADS) atomicAdd(buckets + (ids[i] >> shift), 1);
    __syncthreads();
    int4 four = reinterpret_cast<const int4*>(buckets)[threadIdx.x];
    int own = four.x + four.y + four.z + four.w, before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int add = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += add;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; w++) before += sums[w];
    // the position of the first id of each bucket; below, it moves to that of the next bucket
    reinterpret_cast<int4*>(buckets)[threadIdx.x] = {before, before + four.x, before + four.x + four.y,
                                                     before + four.x + four.y + four.z};
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) room[atomicAdd(buckets + (ids[i] >> shift), 1)] = ids[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int id = ids[i], bucket = id >> shift, first = bucket ? buckets[bucket - 1] : 0, place = first;
        for (int j = first; j < buckets[bucket]; j++) place += room[j] < id;
        put(i, place);
    }
}

struct Choice {
    int rows;
    Cut cut;  // of the entry that follows the chosen number of rows
};

// For each number of rows k, find the histogram bin of the (k + 1)-th largest entry (see `cut_of`).
template <bool SHARED>
__device__ __forceinline__ void find_cuts(Budget& budget, const int* histogram, int k) {
    Bins<THREADS> bins = bins_of<SHARED, THREADS>(histogram);
    constexpr int EACH = Bins<THREADS>::EACH;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = BINS - EACH * (threadIdx.x + 1), mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) mine += bins[i];
    int before = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int add = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += add;
    }
    if (lane == 31) budget.sums[warp] = before;
    if (threadIdx.x < COUNTS) budget.cuts[threadIdx.x] = {-1, 0};
    if (threadIdx.x < BINS / 32) budget.marked[threadIdx.x] = 0;
    __syncthreads();
    before -= mine;
    for (int w = 0; w < warp; w++) before += budget.sums[w];
    if (!mine) return;
#pragma unroll 1
    for (int c = 0; c < COUNTS; c++) {
        int wanted = count_at(c, k) + 1, above = before;
        if (before >= wanted || before + mine < wanted) continue;
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--) {
            if (above < wanted && above + bins[i] >= wanted) {
                budget.cuts[c] = {first + i, above};
                atomicOr(budget.marked + (first + i) / 32, 1u << (first + i) % 32);
            }
            above += bins[i];
        }
    }
}

// Return the number of rows for one KV head. All threads of the block call this function.
//   budget: shared memory.
//   histogram: [BINS] in shared memory if SHARED, otherwise in global memory: number of entries in each bin of their
//     priorities (`bin_of`).
//   k: the largest number of rows.
//   limit: largest allowed variance.
//   edge, edges, order: shared memory for EDGE entries, a counter that is 0 before and after the call, and 256
//     integers.
//   seed: of the noise.
//   every: a function that iterates over the entries of the thread. every(inside, use) calls use(entry, bin, weight)
//     for each candidate with inside(bin). An entry is a priority and a token id, and `weight` is −log c.
template <bool SHARED, class Every>
__device__ __forceinline__ Choice choose_rows(Budget& budget, const int* histogram, int k, float limit, u64* edge,
                                              int& edges, int* order, u32 seed, Every every) {
    auto priority_of = [](u64 entry) { return from_ordered(u32(entry >> 32)); };
    find_cuts<SHARED>(budget, histogram, k);
    __syncthreads();
    if (threadIdx.x < COUNTS) {
        int c = threadIdx.x, bin = budget.cuts[c].bin, rank = count_at(c, k) - budget.cuts[c].above;
        for (int i = 0; i < c; i++) {  // bins do not ascend; count each higher one once
            int higher = budget.cuts[i].bin;
            if (higher > bin && higher != budget.cuts[i + 1].bin)
                rank += SHARED ? histogram[higher] : __ldcg(histogram + higher);
        }
        budget.ranks[c] = bin < 0 ? -1 : rank;
        budget.thresholds[c] = NEVER;
    }
    auto is_marked = [&](int bin) { return budget.marked[bin / 32] >> bin % 32 & 1; };
    every(is_marked, [&](u64 entry, int, float) {
        int slot = atomicAdd(&edges, 1);
        if (slot < EDGE) edge[slot] = entry;
    });
    __syncthreads();
    int many = edges;
    if (many > EDGE) {  // nearly all priorities are equal: a slow path
        auto all = [&](auto use) { every([](int) { return true; }, [&](u64 entry, int, float) { use(entry); }); };
        for (int c = 0; c < COUNTS; c++) {
            if (budget.ranks[c] < 0) continue;
            u64 entry = radix_cut(all, count_at(c, k) + 1, order);
            if (threadIdx.x == 0) budget.thresholds[c] = priority_of(entry);
        }
    } else {
        in_order(edge, many, [&](int i, int better) {
#pragma unroll 1
            for (int c = 0; c < COUNTS; c++)
                if (budget.ranks[c] == better) budget.thresholds[c] = priority_of(edge[i]);
        });
    }
    __syncthreads();
    // Sizes are relative to the largest threshold, `base`, so that a candidate needs no exponential for each k.
    float base = budget.thresholds[0];
    if (base == NEVER) base = 0;
    __syncthreads();
    if (threadIdx.x < COUNTS) budget.thresholds[threadIdx.x] = expf(budget.thresholds[threadIdx.x] - base);
    if (threadIdx.x == 0) edges = 0;
    __syncthreads();
    float unit = float(WITHIN) / fmaxf(limit, SMALLEST_LIMIT) * GROUP;
    int sums[COUNTS > 1 ? COUNTS - 1 : 1] = {};
    every([](int) { return true; }, [&](u64 entry, int, float weight) {
        float size = priority_of(entry) - noise_of(id_of(entry), seed) * NATS;
        float least = fminf(weight, CLAMP), term = fminf(expf(2 * size + least) * unit, LARGEST_TERM);
        float inverse = expf(fminf(base - size, CLAMP));
        least = expf(least);
#pragma unroll
        for (int c = 0; c < COUNTS - 1; c++) {
            float part = term * (fmaxf(budget.thresholds[c] * inverse, least) - 1);
            sums[c] = min(sums[c] + __float2int_rn(fminf(part, float(BEYOND))), BEYOND);
        }
    });
#pragma unroll
    for (int c = 0; c < COUNTS - 1; c++) {
        int sum = __reduce_add_sync(ALL, sums[c]);
        if (threadIdx.x % 32 == 0) budget.parts[c][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    // no atomic additions: those of 64 bits in shared memory are loops, in which the warps would wait for each other
    if (threadIdx.x < COUNTS - 1) {
        u64 sum = 0;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) sum += budget.parts[threadIdx.x][w];
        budget.variances[threadIdx.x] = sum;
    }
    __syncthreads();
    int chosen = 0;
    while (chosen < COUNTS - 1 && budget.variances[chosen] > u64(WITHIN)) chosen++;
    return {count_at(chosen, k), budget.cuts[chosen]};
}
