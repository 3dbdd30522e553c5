// Reranking: estimates from codes of a few bits (paper, B.2.2, equation 10), then what the group
// agrees on (kvindex/group.py). One log weight of 16 bits per key.
//
// Codes become float16 in registers, which hold the levels exactly (ops.codes.levels), and the
// matrix unit multiplies 16 candidates with 8 query heads; queries go in as a float16 and what it
// leaves, 22 bits together. Of 3 magnitude bits a byte permutation looks up four levels at once.
// Sums that all candidates enter are kept as integers, so that the order in which the scan wrote
// its list leaves no trace: the same ids from run to run.
// Compile-time: D, BITS (of a magnitude), GROUP, CENTRED, SOFTCAP, POLICY (0 mean_share,
// 1 max_share).
#include "common.cuh"

constexpr int BYTES = D / 8;
constexpr int WORDS = (BYTES + 3) / 4;  // of a key's signs, and of one plane of its magnitudes
constexpr int LEVELS = 1 << BITS;
constexpr int EDGE = 1024;              // entries of a bin that are told apart in shared memory
constexpr int BUCKETS = 256;            // of exponentials: 16 octaves each
constexpr float LOG2E = 1.4426950408889634f;

constexpr int QUADS = (WORDS + 3) / 4;
constexpr int SETS = (GROUP + 7) / 8;   // of 8 query heads
constexpr int QUEUE = 48;               // candidates that a warp holds back: 15 and 32 more

// Levels as bytes for __byte_perm, or as float16 in shared memory.
struct Levels {
    u32 low[2], high[2];
    const u16* table;
};

// Step 2 b + half of a word: coordinates b + 16 half + 0, 4, 8, 12 as two pairs of float16.
__device__ __forceinline__ void decode(u32 (&pairs)[2], u32 sign, const u32 (&plane)[BITS > 0 ? BITS : 1],
                                       int b, int half, const Levels& levels) {
    int shift = b + 16 * half;
    if (BITS == 3) {
        u32 select = (plane[0] >> shift & 0x1111) | (plane[BITS > 1 ? 1 : 0] >> shift & 0x1111) << 1 |
                     (plane[BITS > 2 ? 2 : 0] >> shift & 0x1111) << 2;
        u32 negative = __byte_perm(0x8000, 0, ~sign >> shift & 0x1111);
        u32 low = __byte_perm(levels.low[0], levels.low[1], select);
        u32 high = __byte_perm(levels.high[0], levels.high[1], select) | negative;
        pairs[0] = __byte_perm(low, high, 0x5140);
        pairs[1] = __byte_perm(low, high, 0x7362);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = shift + 4 * i, level = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++) level |= (plane[p] >> at & 1) << p;
        u32 value = levels.table[level] | (~sign >> at & 1) << 15;
        pairs[i / 2] = i % 2 ? pairs[i / 2] | value << 16 : value;
    }
}

// Queries of up to 8 heads as right factors: column lane / 4, this lane's word of each quad.
struct Asked {
    u32 high[QUADS][8][2], low[QUADS][8][2];
};
__device__ __forceinline__ void load(Asked& asked, const float* turned, int set, float scale) {
    int lane = threadIdx.x % 32, head = set * 8 + lane / 4;
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++)
#pragma unroll
        for (int step = 0; step < 8; step++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                asked.high[quad][step][pair] = asked.low[quad][step][pair] = 0;
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    int at = (quad * 4 + lane % 4) * 32 + step / 2 + step % 2 * 16 + pair * 8 + side * 4;
                    float x = head < GROUP && at < D ? turned[head * D + at] * scale : 0.0f;
                    u16 high = to_float16(x), low = to_float16(x - from_float16(high));
                    asked.high[quad][step][pair] |= u32(high) << (16 * side);
                    asked.low[quad][step][pair] |= u32(low) << (16 * side);
                }
            }
}

// What a power of 2 brings a head's largest coordinate to [2^13, 2^14), in all lanes of a column.
__device__ __forceinline__ float scale_of(const float* turned, int set) {
    int lane = threadIdx.x % 32, head = set * 8 + lane / 4;
    float peak = 0;
    if (head < GROUP)
        for (int i = lane % 4; i < D; i += 4) peak = fmaxf(peak, fabsf(turned[head * D + i]));
    peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
    int exponent = int(__float_as_uint(peak) >> 23);  // biased; norms are at most 2^60
    exponent = min(max(exponent, 20), 230);
    return __uint_as_float(u32(254 + 13 - exponent) << 23);
}

__device__ __forceinline__ float capped(float estimate, float scale, float softcap) {
    float logit = estimate * scale;
#if SOFTCAP
    logit = softcap * tanhf(logit / softcap);
#endif
    return logit;
}

// exp(logit) as an integer in its bucket: 30 bits below the bucket's first octave.
__device__ __forceinline__ void add_exponential(u64* buckets, float logit) {
    float x = fminf(fmaxf(logit * LOG2E, -2040.0f), 2040.0f);
    int bucket = int(floorf(x * 0.0625f));
    atomicAdd(buckets + bucket + BUCKETS / 2, u64(exp2f(x - 16.0f * bucket) * 1073741824.0f));
}

// Grid: (splits, BG), 256 threads. Reads for each candidate its signs, magnitudes and log weight
// (at D = 128 and 3 bits 16 + 48 + 2 bytes in 4 sectors); writes 4 GROUP bytes.
// turned float32 [BG, GROUP, D]; products float32 [BG, row, GROUP]; levels float32 [LEVELS];
// reference float32 [BG]; wanted, counted int32 [B]; counts, list, histogram, thresholds, shifts:
// of the scan. estimates float32 [BG, capacity, GROUP]: −inf for what is no candidate. buckets
// uint64 [BG, GROUP, BUCKETS], edge int32 [BG, EDGE], edges, tickets int32 [BG]: cleared before.
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, const float* turned,
       const float* products, const float* given_levels, const float* references,
       const int* wanted, const int* counted, const int* counts, const u64* list,
       const int* histogram, const int* thresholds, const int* shifts, float* estimates,
       u64* all_buckets, int* edge, int* edges, int* tickets, i64 capacity, i64 kv_heads,
       float scale, float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ u64 buckets[GROUP * BUCKETS];
    __shared__ u64 words[EDGE];
    __shared__ int bins[256];
    __shared__ int queues[8][QUEUE];
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int lane = threadIdx.x % 32, t = lane % 4;
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(given_levels[i]);
    for (int i = threadIdx.x; i < GROUP * BUCKETS; i += 256) buckets[i] = 0;
    __syncthreads();
    Levels levels = {{0, 0}, {0, 0}, halves};
    if (BITS == 3)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            levels.low[i / 4] |= u32(halves[i % LEVELS] & 255) << (i % 4 * 8);
            levels.high[i / 4] |= u32(halves[i % LEVELS] >> 8) << (i % 4 * 8);
        }
    turned += bg * GROUP * D;
    list += bg * capacity;
    estimates += bg * capacity * GROUP;
    edge += bg * EDGE;
    float reference = references[bg];
    int n = counts[bg], target = min(wanted[batch], counted[batch]);
    int threshold = thresholds[bg], shift = shifts[bg];
    Cut cut = {-1, n};  // all of the list
    if (n > target) cut = cut_of(histogram + bg * BINS, target);

    float first_up = scale_of(turned, 0);
    Asked first_asked;
    load(first_asked, turned, 0, first_up);
    int* queue = queues[threadIdx.x / 32];
    int held = 0;
    // the first 16 candidates of the queue, or what there is
    auto work = [&]() {
        const char* block[2];
        int key[2], at[2];
        i64 s[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int slot = lane / 4 + 8 * half;
            at[half] = slot < held ? queue[slot] : -1;
            int id = at[half] >= 0 ? id_of(list[at[half]]) : 0;
            s[half] = id / TOKENS;
            key[half] = id % TOKENS;
            block[half] = reinterpret_cast<const char*>(table[batch * row + s[half]]) + bg % kv_heads * head;
        }
        u32 sign[2][QUADS], plane[2][QUADS][BITS > 0 ? BITS : 1];
        float weight[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32* signs = reinterpret_cast<const u32*>(block[half]) + key[half] * WORDS;
            const u32* planes =
                reinterpret_cast<const u32*>(block[half] + magnitudes) + key[half] * (BITS * WORDS);
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
                int w = quad * 4 + t;
                sign[half][quad] = w < WORDS ? __ldg(signs + w) : 0;
                plane[half][quad][0] = 0;
#pragma unroll
                for (int p = 0; p < BITS; p++)
                    plane[half][quad][p] = w < WORDS ? __ldg(planes + p * WORDS + w) : 0;
            }
            int log = reinterpret_cast<const u16*>(block[half] + logs)[key[half]];
            weight[half] = log ? exp2f(float(log - 65535) * (octaves / 65536)) * reference : 0.0f;
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float up = first_up, c[4] = {0, 0, 0, 0};
            Asked asked = first_asked;
            if (set > 0) {
                up = scale_of(turned, set);
                load(asked, turned, set, up);
            }
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++)
#pragma unroll
                for (int step = 0; step < 8; step++) {
                    u32 upper[2], lower[2];
                    decode(upper, sign[0][quad], plane[0][quad], step / 2, step % 2, levels);
                    decode(lower, sign[1][quad], plane[1][quad], step / 2, step % 2, levels);
                    mma_halves(c, upper[0], lower[0], upper[1], lower[1],
                               asked.high[quad][step][0], asked.high[quad][step][1]);
                    mma_halves(c, upper[0], lower[0], upper[1], lower[1],
                               asked.low[quad][step][0], asked.low[quad][step][1]);
                }
            // columns 2 t and 2 t + 1 were scaled as their own lanes scaled them
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int h = set * 8 + 2 * t + side;
                float down = 1 / __shfl_sync(ALL, up, (2 * t + side) * 4);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (h >= GROUP || at[half] < 0) continue;
                    float found = c[2 * half + side] * down * weight[half];
#if CENTRED
                    found += products[(bg * row + s[half]) * GROUP + h];
#endif
                    estimates[i64(at[half]) * GROUP + h] = found;
                    add_exponential(buckets + h * BUCKETS, capped(found, scale, softcap));
                }
            }
        }
        __syncwarp();
        int rest = held > 16 && lane < held - 16 ? queue[16 + lane] : 0;
        __syncwarp();
        if (held > 16 && lane < held - 16) queue[lane] = rest;
        held = max(held - 16, 0);
        __syncwarp();
    };
    // lanes with a candidate queue it; all lanes of a warp call it
    auto put = [&](bool in, int i) {
        u32 all = __ballot_sync(ALL, in);
        if (in) queue[held + __popc(all & ((1u << lane) - 1))] = i;
        held += __popc(all);
        __syncwarp();
        while (held >= 16) work();
    };
    for (int first = blockIdx.x * 256 + threadIdx.x - lane; first < n; first += gridDim.x * 256) {
        int i = first + lane, bin = -2;
        if (i < n) {
            bin = BINS;
            if (cut.bin >= 0) bin = min((u32(vote_of(list[i])) - u32(threshold)) >> shift, u32(BINS - 1));
            if (bin <= cut.bin)
                for (int h = 0; h < GROUP; h++) estimates[i64(i) * GROUP + h] = NEVER;
            if (bin == cut.bin) {
                int slot = atomicAdd(edges + bg, 1);
                if (slot < EDGE) edge[slot] = i;
            }
        }
        put(i < n && bin > cut.bin, i);
    }
    bool last = last_block(tickets + bg, gridDim.x);
    if (last && cut.bin >= 0) {  // of the cut's own bin the best, by their words
        int many = __ldcg(edges + bg), rank = target - cut.above;
        if (many <= EDGE) {
            for (int i = threadIdx.x; i < many; i += 256) words[i] = list[__ldcg(edge + i)];
            __syncthreads();
            for (int first = threadIdx.x - lane; first < many; first += 256) {
                int i = first + lane, better = 0;
                if (i < many)
                    for (int j = 0; j < many; j++) better += words[j] > words[i];
                put(i < many && better < rank, i < many ? __ldcg(edge + i) : 0);
            }
        } else {
            auto each = [&](auto use) {
                for (int i = threadIdx.x; i < n; i += 256) use(list[i]);
            };
            u64 least = radix_cut(each, target, bins);
            for (int first = threadIdx.x - lane; first < n; first += 256) {
                int i = first + lane;
                bool in = i < n && list[i] >= least;
                if (in) in = min((u32(vote_of(list[i])) - u32(threshold)) >> shift, u32(BINS - 1)) == cut.bin;
                put(in, i);
            }
        }
    }
    while (held > 0) work();
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * BUCKETS; i += 256)
        if (buckets[i]) atomicAdd(all_buckets + bg * GROUP * BUCKETS + i, buckets[i]);
}

// log Σ exp of a head's buckets, in every lane of the warp that asks.
__device__ __forceinline__ float log_sum(const u64* buckets) {
    int lane = threadIdx.x % 32, top = -1;
    u64 mine[BUCKETS / 32];
#pragma unroll
    for (int i = 0; i < BUCKETS / 32; i++) {
        mine[i] = __ldcg(buckets + lane * (BUCKETS / 32) + i);
        if (mine[i]) top = lane * (BUCKETS / 32) + i;
    }
    top = warp_max(top);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < BUCKETS / 32; i++)
        if (mine[i]) sum += double(mine[i]) * exp2(16.0 * (lane * (BUCKETS / 32) + i - top) - 30);
    sum = warp_sum(sum);
    return float((log2(sum) + 16.0 * (top - BUCKETS / 2)) / 1.4426950408889634);
}

// Grid: (splits, BG), 256 threads. Reads 4 GROUP bytes per candidate; writes 4, and a histogram.
// shares float32 [BG, capacity]: the logarithm of what the group agrees on, −inf for no candidate.
extern "C" __global__ void __launch_bounds__(256, 2)
agree(const float* estimates, const u64* all_buckets, const int* counts, float* shares,
      int* histogram, i64 capacity, float scale, float softcap) {
    __shared__ float totals[GROUP];
    i64 bg = blockIdx.y;
    for (int h = threadIdx.x / 32; h < GROUP; h += 8) {
        float total = log_sum(all_buckets + (bg * GROUP + h) * BUCKETS);
        if (threadIdx.x % 32 == 0) totals[h] = total;
    }
    __syncthreads();
    estimates += bg * capacity * GROUP;
    int n = counts[bg];
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
        float best = NEVER, each[GROUP], share = NEVER;
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            each[h] = capped(estimates[i64(i) * GROUP + h], scale, softcap) - totals[h];
            best = fmaxf(best, each[h]);
        }
        if (estimates[i64(i) * GROUP] > NEVER) {
            share = best;
#if POLICY == 0
            float sum = 0;
            for (int h = 0; h < GROUP; h++) sum += expf(each[h] - best);
            share = best + logf(sum) - logf(float(GROUP));
#endif
            atomicAdd(histogram + bg * BINS + bin_of(share), 1);
        }
        shares[bg * capacity + i] = share;
    }
}
