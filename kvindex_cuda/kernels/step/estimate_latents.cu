// Select the candidates of a group with many query heads, and estimate the products of their keys with the
// queries (ParisKV paper, B.2.2, equation 10). This file has two kernels, take_candidates and estimate_latents.
// Reference: ranked and rerank in kvindex/pariskv/decode_step.py, kvindex.ops.rerank.estimate.
//
// take_candidates: select the C entries with the highest approximate scores (votes) from the list of
// vote_latents.cu; of equal votes, those with lower token ids. If the list has fewer than C entries or has
// overflowed, select from all votes instead. With SAMPLING, candidates are the keys that pass the threshold of
// kvindex.ops.priority.
// estimate_latents: multiply 16 candidates at a time with two tiles of heads on tensor cores. Each warp
// multiplies 128 coordinates. It loads the queries' numbers for these coordinates into registers before the
// candidates are known. Most of the time is spent waiting for codes. The partial sums of the warps are
// added in shared memory. Sums of exponentials are integers, so they do not depend on the order of the
// candidates.
//
// Compile-time constants: D, BITS (of a magnitude), GROUP (heads of a tile), TILES, CENTERED (1: blocks of
// codes have centers), SOFTCAP, SAMPLING (1: candidates are sampled), RAGGED (1: each sequence has its own
// length).
#include "common/product.cuh"
#include "common/attention_weights.cuh"
#if SAMPLING
#include "common/noise.cuh"
#endif

constexpr int HEADS = TILES * GROUP;
constexpr int PAIR = TILES % 2 == 0 ? 2 : 1;       // tiles per thread block; kvindex_cuda/pariskv/steps/latents.py has
                                                   // the same number, as for the next two
constexpr int ESTIMATORS = 32 * QUADS;             // threads of a block of estimate_latents
constexpr int BATCHES = TILES / PAIR > 2 ? 2 : 1;  // groups of 16 candidates per iteration
constexpr int TASKS = (BATCHES * PAIR + QUADS - 1) / QUADS;  // tasks per warp; a task is 16 candidates and one tile
constexpr int HELD = 16;                           // entries that each thread of take_candidates keeps in registers
static_assert(COLUMNS == 1, "eight heads a tile");

struct TakeArguments {
    const int* votes;       // written by vote_latents.cu, as are counts, list and histogram
    const int* counts;
    const u64* list;
    const int* histogram;
    const int* thresholds;  // [B]: written by sample_latents.cu, as are bases and shifts
    const int* bases;
    const int* shifts;
    const i64* length;      // [1], or RAGGED: [B]: number of tokens
    const int* wanted;      // [B]: C, the number of candidates wanted
    const int* counted;     // [B]: number of valid keys
    u64* candidates;        // [B, capacity]: entries, in any order
    int* candidate_counts;  // [B] APART: number of candidates
    int2* cuts;             // [B]: the two thresholds of kvindex.ops.priority; only if SAMPLING
    i64 room, capacity;
};

// The kernel take_candidates selects the candidates of each sequence from a list of keys with high coarse scores.
// Grid: (B), THREADS threads. Reads each entry of the list (8 bytes) twice; writes 8 bytes per candidate.
// Limited by latency, because each thread processes only a few entries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
take_candidates(const __grid_constant__ TakeArguments args) {
    __shared__ u64 edge[EDGE], least;
    __shared__ int bins[256], edges, taken;
    i64 b = blockIdx.x;
    if (threadIdx.x == 0) edges = taken = 0, least = 0;
    after_previous();
    let_next_begin();
    int n = __ldcg(args.counts + b * APART), counted = args.counted[b], target = min(args.wanted[b], counted);
    int threshold = __ldcg(args.thresholds + b), base = __ldcg(args.bases + b), shift = __ldcg(args.shifts + b);
    const u64* list = args.list + b * args.capacity;
    const int* votes = args.votes + b * args.room;
    int tokens = int(min(__ldcg(args.length + RAGGED * b), args.room));
    bool whole = counted <= args.wanted[b];            // all valid keys are candidates
    int asked = target + (SAMPLING && !whole);            // with SAMPLING, the priority of one more key is the threshold
    bool listed = n >= asked && n <= args.capacity;    // the list contains all entries needed
    bool few = listed && n <= HELD * THREADS;          // the list fits into registers while the threshold is found
    u64 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int at = i * THREADS + threadIdx.x;
        held[i] = few && at < n ? __ldcg(list + at) : 0;
    }
    auto each = [&](auto use) {
        if (few) {
#pragma unroll
            for (int i = 0; i < HELD; i++)
                if (held[i]) use(held[i]);
        } else if (listed) {
            for (int i = threadIdx.x; i < n; i += THREADS) use(__ldcg(list + i));
        } else {
            for (int i = threadIdx.x; i < tokens; i += THREADS)
                if (int vote = __ldcg(votes + i); vote != LEAST) use(entry_of(vote, i));
        }
    };
    auto bin_in = [&](u64 entry) { return bin_of(vote_of(entry), base, shift); };
    Cut cut = {-1, 0};
    if (listed && n > asked) cut = cut_of<false, THREADS>(args.histogram + b * BINS, asked);
    __syncthreads();
#if SAMPLING
    int2 cuts = {LEAST, LEAST + 1};
    if (!whole) {
        bool told = cut.bin >= 0 && cut.bin < BINS - 1 && (cut.bin > 0 || threshold > LEAST + 1);
        if (told) {
            int bin = cut.bin - (cut.above < target);
            cuts = {base + cut.bin * STEP, base + (bin + 1) * STEP};
        } else {
            int beyond = vote_of(radix_cut(each, asked, bins)) & -STEP;
            int last = target ? vote_of(radix_cut(each, target, bins)) : beyond + STEP;
            cuts = {beyond, last < beyond + STEP ? beyond : beyond + STEP};
        }
    }
    if (threadIdx.x == 0) args.cuts[b] = cuts, least = entry_of(cuts.y, -1);
#else
    bool some = asked > 0 && (listed ? n : counted) > asked;
    if (some && cut.bin >= 0) {
        each([&](u64 entry) {
            if (bin_in(entry) != cut.bin) return;
            int slot = atomicAdd(&edges, 1);
            if (slot < EDGE) edge[slot] = entry;
        });
        __syncthreads();
        int rank = asked - cut.above;
        for (int i = threadIdx.x; i < min(edges, EDGE); i += THREADS) {
            int better = 0;
            for (int j = 0; j < min(edges, EDGE); j++) better += edge[j] > edge[i];
            if (better == rank - 1) least = edge[i];
        }
    }
    __syncthreads();
    if (some && (cut.bin < 0 || edges > EDGE)) {
        u64 word = radix_cut(each, asked, bins);
        if (threadIdx.x == 0) least = word;
    }
    if (!asked && threadIdx.x == 0) least = ~0ull;
#endif
    __syncthreads();
    u64 from = least;
    u64* candidates = args.candidates + b * args.capacity;
    if (few) {  // one counter increment for a whole warp
        int mine = 0, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < HELD; i++) mine += held[i] && held[i] >= from;
        int upto = mine;
        for (int step = 1; step < 32; step *= 2) {
            int add = __shfl_up_sync(ALL, upto, step);
            if (lane >= step) upto += add;
        }
        int start = lane == 31 ? atomicAdd(&taken, upto) : 0, to = __shfl_sync(ALL, start, 31) + upto - mine;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (held[i] && held[i] >= from) candidates[to++] = held[i];
    } else {
        each([&](u64 entry) {
            if (entry < from) return;
            int to = atomicAdd(&taken, 1);
            if (to < args.capacity) candidates[to] = entry;
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) args.candidate_counts[b * APART] = int(min(i64(taken), args.capacity));
}

struct EstimateArguments {
    const i64* codes;             // [B, row]: addresses of blocks of codes
    const uint2* operands;        // written by prepare_latents.cu for each tile, as are ups and products
    const float* ups;
    const float* products;        // [B, row, HEADS]: ⟨q, μ⟩, the product of each query with each block's center
    const float* levels;          // [LEVELS]
    const u64* candidates;        // written by take_candidates, as are candidate_counts and cuts
    const int* candidate_counts;
    const int2* cuts;
    const u32* seeds;             // [B]: seed of the noise
    float* estimates;             // [B, capacity, HEADS]: estimated products of query and key
    u64* buckets;                 // [B, HEADS, BUCKETS]: sums of exponentials over the candidates (attention_weights.cuh), cleared
                                  // before the launch
    int* tickets;                 // [B TILES]: counts finished thread blocks, cleared before the launch
    float* totals;                // [B, HEADS]: logarithm of the sum of exponentials
    i64 row, logs, magnitudes, capacity;
    float scale, softcap;
};

// Return log Σ exp(logit) of a head, where the sum is over all candidates. The sum is stored as several
// integers (buckets), one for each range of logits (attention_weights.cuh). Every lane of the warp gets the
// result.
__device__ __forceinline__ float log_sum(const u64* buckets) {
    constexpr int OWN = BUCKETS / 32;
    int lane = threadIdx.x % 32, top = -1;
    u64 mine[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        mine[i] = __ldcg(buckets + lane * OWN + i);
        if (mine[i]) top = lane * OWN + i;
    }
    top = warp_max(top);
    if (top < 0) return NEVER;
    float octaves = 16.0f * (top - BUCKETS / 2 + 1), sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (mine[i])
            sum += float(mine[i]) * exp2f(16.0f * (lane * OWN + i - BUCKETS / 2) - FRACTION_BITS - octaves);
    return (log2f(warp_sum(sum)) + octaves) * (1 / LOG2E);
}

// A warp loads the codes of 16 candidate keys. Each lane loads a part of the codes of two candidates: numbers
// lane / 4 (index 0 of both arrays) and lane / 4 + 8 (index 1). The part is 32 sign bits, and 32 bits of each
// magnitude plane. Plane p contains bit p of the magnitude of each coordinate.
struct Part {
    u32 signs[2], planes[2][BITS > 0 ? BITS : 1];
};
__device__ __forceinline__ void load(Part& part, int half, const char* place, int key, i64 magnitudes) {
    int w = threadIdx.x / 32 * 4 + threadIdx.x % 4;
    bool has = place && (QUADS * 4 == WORDS || w < WORDS);
    part.signs[half] = has ? __ldg(reinterpret_cast<const u32*>(place) + key * WORDS + w) : 0;
    part.planes[half][0] = 0;
#pragma unroll
    for (int p = 0; p < BITS; p++)
        part.planes[half][p] =
            has ? __ldg(reinterpret_cast<const u32*>(place + magnitudes) + key * (BITS * WORDS) + p * WORDS + w) : 0;
}

// Fragments of queries for tensor cores. A warp multiplies 128 coordinates of the keys with the queries of PAIR
// tiles of heads, and needs 8 products for each tile. steps[tile][i] is the fragment for product i. It has two
// words of rounded values, then two words of remainders (the rounding errors; operands.cuh).
struct Operands {
    uint4 steps[PAIR][8];  // the last two are unused if the operands are FOLDED
};
__device__ __forceinline__ void load(Operands& right, const uint2* operands) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < PAIR * 8; i++) {
        int at = ((i / 8 * QUADS + warp) * 8 + i % 8) * 32 + lane;
        uint4& step = right.steps[i / 8][i % 8];
        if (FOLDED) {
            uint2 two = __ldcg(operands + at);
            step = {two.x, two.y, 0, 0};
        } else {
            step = __ldcg(reinterpret_cast<const uint4*>(operands) + at);
        }
    }
}

// Compute this warp's part of the dot products of 16 candidate keys (decoded from their codes) with the queries:
// the sums over the 128 coordinates for which the warp is responsible. The result for candidate number
// `key_of(half)` and head number `head_of(0, side)` of a tile is sums[tile][half][side]. `half` and `side` are 0
// or 1 (product.cuh).
__device__ __forceinline__ void multiply_part(float (&sums)[PAIR][ROWS][2], const Part& part, const Operands& right,
                                              const Levels& levels) {
    constexpr int CHAINS = 2;  // one sum for rounded values and one for remainders; if FOLDED puts both in one product,
                               // one sum for every other product
    float c[PAIR][CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 upper[2], lower[2];
        decode(upper, part.signs[0], part.planes[0], i / 2, i % 2, levels);
        decode(lower, part.signs[1], part.planes[1], i / 2, i % 2, levels);
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            uint4 step = right.steps[p][i];
            mma_halves(c[p][FOLDED ? i % 2 : 0], upper[0], lower[0], upper[1], lower[1], step.x, step.y);
            if (!FOLDED) mma_halves(c[p][1], upper[0], lower[0], upper[1], lower[1], step.z, step.w);
        }
    }
    // With up to four heads (FOLDED), one tensor core product has two kinds of columns: 0 to 3 are products
    // with the rounded queries, and 4 to 7 are products with the remainders (the rounding errors of the
    // queries). Lanes exchange these results and add them up.
    bool later = threadIdx.x % 4 >= 2;
#pragma unroll
    for (int p = 0; p < PAIR; p++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            float upper = c[p][0][side] + c[p][1][side], lower = c[p][0][2 + side] + c[p][1][2 + side];
            if (FOLDED) {
                float other = __shfl_xor_sync(ALL, later ? upper : lower, 2);
                sums[p][0][side] = (later ? lower : upper) + other;
            } else {
                sums[p][0][side] = upper, sums[p][ROWS - 1][side] = lower;
            }
        }
}

// Estimate the inner products of all candidate keys with all queries.
// Grid: (splits, TILES / PAIR, B), ESTIMATORS threads.
// Reads the signs, magnitudes and log weight of each candidate TILES / PAIR times: once from memory, then from
// L2. Each thread block also reads the prepared queries of PAIR tiles of heads. Writes 4 HEADS bytes per
// candidate.
extern "C" __global__ void __launch_bounds__(ESTIMATORS, 320 / ESTIMATORS)
estimate_latents(const __grid_constant__ EstimateArguments args) {
    __shared__ u16 halves[LEVELS];
    __shared__ float parts[2][QUADS][BATCHES][PAIR][ROWS * 2][32];  // partial sums over coordinates, double-buffered
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.y * PAIR;
    i64 b = blockIdx.z, of = b * TILES + tile;
    for (int i = threadIdx.x; i < LEVELS; i += ESTIMATORS) halves[i] = to_float16(args.levels[i]);
    // prepare_latents.cu writes the operands (queries as tensor core fragments). They may be read here without
    // waiting, because the kernel in prepare_latents.cu had ended when this kernel started.
    Operands right;
    load(right, args.operands + of * OPERANDS);
    float down[TASKS][2];
#pragma unroll
    for (int i = 0; i < TASKS * 2; i++) {
        int task = warp + i / 2 * QUADS, h = head_of(0, i % 2);
        down[i / 2][i % 2] = h < GROUP && task < BATCHES * PAIR ? 1 / __ldcg(args.ups + (of + task % PAIR) * GROUP + h) : 1.0f;
    }
    __syncthreads();
    Levels levels = levels_of(halves);
    const u64* candidates = args.candidates + b * args.capacity;
    u64* buckets = args.buckets + (b * HEADS + tile * GROUP) * BUCKETS;
    int first = blockIdx.x * (BATCHES * 16);
    auto entries_at = [&](i64 at) { return lane < BATCHES * 16 && at < args.capacity ? __ldcg(candidates + at) : 0; };
    after_previous();
    let_next_begin();
    int n = __ldcg(args.candidate_counts + b * APART);
    u64 next = entries_at(first + lane);  // loaded before their number is known; those past it are ignored
#if SAMPLING
    u32 seed = __ldcg(args.seeds + b);
    int threshold = __ldcg(&args.cuts[b].x);
#endif
    Exponentials sums[TASKS][2];
#pragma unroll 1
    for (int turn = 0; first < n; first += gridDim.x * (BATCHES * 16), turn ^= 1) {
        u64 mine = first + lane < n ? next : 0, block = mine ? u64(args.codes[b * args.row + id_of(mine) / TOKENS]) : 0;
        next = entries_at(i64(first) + gridDim.x * (BATCHES * 16) + lane);
        Part codes[BATCHES];
#pragma unroll
        for (int i = 0; i < BATCHES * 2; i++) {
            int row = i * 8 + lane / 4;
            u64 place = __shfl_sync(ALL, block, row), entry = __shfl_sync(ALL, mine, row);
            load(codes[i / 2], i % 2, reinterpret_cast<const char*>(place), id_of(entry) % TOKENS, args.magnitudes);
        }
        int logs[TASKS][ROWS];
        float centers[TASKS][ROWS][2];
#pragma unroll
        for (int i = 0; i < TASKS * ROWS; i++) {
            int task = warp + i / ROWS * QUADS, half = i % ROWS;
            bool some = task < BATCHES * PAIR;
            int row = (some ? task / PAIR * 16 : 0) + key_of(half);
            u64 place = __shfl_sync(ALL, block, row), entry = __shfl_sync(ALL, mine, row);
            bool there = some && place;
            logs[i / ROWS][half] =
                there ? reinterpret_cast<const u16*>(place + args.logs)[id_of(entry) % TOKENS] : 0;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int h = head_of(0, side);
                centers[i / ROWS][half][side] = CENTERED && there && h < GROUP
                    ? __ldcg(args.products + (b * args.row + id_of(entry) / TOKENS) * HEADS + (tile + task % PAIR) * GROUP + h)
                    : 0.0f;
            }
        }
#pragma unroll
        for (int batch = 0; batch < BATCHES; batch++) {
            float both[PAIR][ROWS][2];
            multiply_part(both, codes[batch], right, levels);
#pragma unroll
            for (int i = 0; i < PAIR * ROWS * 2; i++)
                parts[turn][warp][batch][i / (ROWS * 2)][i % (ROWS * 2)][lane] = both[i / (ROWS * 2)][i / 2 % ROWS][i % 2];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TASKS; i++) {
            int task = warp + i * QUADS, batch = task / PAIR, p = task % PAIR;
            if (task >= BATCHES * PAIR) break;
#pragma unroll
            for (int half = 0; half < ROWS; half++) {
                int at = first + batch * 16 + key_of(half), log = logs[i][half];
                u64 entry = __shfl_sync(ALL, mine, batch * 16 + key_of(half));
                float weight = log ? exp2f(float(log - 32768) * (OCTAVES / 65536.0f)) : 0.0f, stands_for = 0;
#if SAMPLING
                stands_for = log_weight(vote_of(entry), u32(id_of(entry)), seed, threshold);
#endif
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    int h = head_of(0, side);
                    if (h >= GROUP || at >= n) continue;
                    float sum = 0;
#pragma unroll
                    for (int q = 0; q < QUADS; q++) sum += parts[turn][q][batch][p][half * 2 + side][lane];
                    float found = sum * down[i][side] * weight + centers[i][half][side];
                    args.estimates[(b * args.capacity + at) * HEADS + (tile + p) * GROUP + h] = found;
                    sums[i][side].add(buckets + (p * GROUP + h) * BUCKETS, capped(found, args.scale, args.softcap) + stands_for);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TASKS * 2; i++) {
        int task = warp + i / 2 * QUADS;
        if (task < BATCHES * PAIR)
            sums[i / 2][i % 2].flush<FOLDED ? 2 : 4>(buckets + (task % PAIR * GROUP + head_of(0, i % 2)) * BUCKETS);
    }
    if (!last_block(args.tickets + of, gridDim.x)) return;
#pragma unroll 4
    for (int h = warp; h < PAIR * GROUP; h += QUADS) {
        float total = log_sum(buckets + h * BUCKETS);
        if (lane == 0) args.totals[b * HEADS + tile * GROUP + h] = total;
    }
}
