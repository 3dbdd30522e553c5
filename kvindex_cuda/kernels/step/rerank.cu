// Rerank: estimate the product of query and key for each candidate, from codes of a few bits per coordinate and
// one 16-bit log weight per key (ParisKV paper, B.2.2, equation 10). Candidates are the C keys with the highest
// approximate scores (votes) in the list that scan.cu has written. Reference: rerank in
// kvindex/pariskv/decode_step.py, kvindex.ops.rerank.estimate.
//
// A warp multiplies 16 candidates with all heads of its group on tensor cores (product.cuh). The entries of the
// list are dealt to warps in turn, so that warps get about equally many candidates. A warp reads up to 32 HANDS
// of its entries at a time, then the addresses of their blocks, and collects the candidates in a queue. It
// loads the codes of the next 16 candidates while it multiplies 16.
// Sums over all candidates are integers, so they do not depend on the order of the list, and every run selects
// the same ids.
// With SAMPLING, candidates are sampled at random: all keys that pass the threshold of kvindex.ops.priority. In
// sums, each candidate has a weight for the keys that it stands for.
//
// Limited by the latency of scattered reads: first counts, list and histogram, which are requested together;
// then addresses of blocks, while the threshold for candidates is computed; then codes. Requesting the codes of
// all list entries early, candidates or not, took 2 to 4 µs longer, because the codes of non-candidates also
// come from memory.
// Compile-time constants: D, BITS (of a magnitude), GROUP (query heads per KV head), CENTERED, SOFTCAP, RAGGED
// (1: each sequence has its own length), and DTYPE, PLANES and SAMPLING of votes.cuh.
#include "common/exact.cuh"
#include "common/product.cuh"
#include "common/attention_weights.cuh"

constexpr int ONCE = 16;  // candidates that a warp multiplies at a time
constexpr int HANDS = OPERANDS <= 1024 ? 8 : 4;
constexpr int QUEUE = 32 * HANDS;  // candidates that a warp collects before it multiplies

// A candidate key that waits in a warp's queue until the warp estimates its inner products with the queries.
// `block` is the address of the codes of the key's block and KV head. If SAMPLING, `slot` is the candidate's
// random priority. Otherwise, `slot` is −1 if the key's coarse score is certainly among the C highest. If this
// is not certain, because the score is in the same histogram bin as the C-th highest one, `slot` is the position
// of the candidate in `edge`, the list of these undecided candidates.
struct __align__(16) Candidate {
    u64 block;
    int id, slot;
};

// Inputs and outputs of a thread block for one group (the query heads that share a KV head).
struct Work {
    const i64* table;
    i64 logs, magnitudes, head_offset;
    const float* products;
    const u64* list;
    u64 *candidates, *buckets, *edge;
    float *estimates, *edge_estimates;
    int *many, *edges;
    float scale, softcap;
    float down[COLUMNS][2];
    Cutoff cutoff;
    Levels levels;
    const uint2* operands;
    Candidate* queue;
    u32 seed;
    int threshold;

    __device__ __forceinline__ u64 block_of(u64 entry) const {
        return u64(table[id_of(entry) / TOKENS]) + head_offset;
    }
    __device__ __forceinline__ bool takes(u64 entry) const { return cutoff.side(entry) >= SAMPLING; }
    __device__ __forceinline__ int slot_of(u64 entry) const {
#if SAMPLING
        return vote_of(entry);
#else
        return cutoff.side(entry) ? -1 : atomicAdd(edges, 1);
#endif
    }
    // Store an entry at position `at` of the queue.
    __device__ __forceinline__ void put(int at, u64 entry, u64 block, int slot) const {
        queue[at] = {block, id_of(entry), slot};
        if (!SAMPLING && slot >= 0 && slot < EDGE) edge[slot] = entry;
    }
};

// One lane's part of the codes of up to `ONCE` candidates. A warp multiplies these candidates by the queries at
// the same time.
struct Batch {
    Tile tile;
    float products[COLUMNS][ROWS][2];
};

// Start loading the codes of the next candidates in the warp's queue, at most `ONCE` of them. `here` points to
// the first of these candidates. `many` is the number of candidates that are left in the queue, including this
// first one.
__device__ __forceinline__ void begin(Batch& next, const Candidate* here, int many, const Work& work) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        next.tile.logs[half] = 0;
        if (half * 8 + lane / 4 >= many) continue;
        Candidate one = here[half * 8 + lane / 4];
        const char* block = reinterpret_cast<const char*>(one.block);
        load(next.tile, half, block, one.id % TOKENS, work.logs, work.magnitudes);
    }
#pragma unroll
    for (int half = 0; half < ROWS; half++)
#pragma unroll
        for (int i = 0; i < COLUMNS * 2; i++) {
            int h = head_of(i / 2, i % 2);
            bool has = CENTERED && key_of(half) < many && h < GROUP;
            i64 segment = has ? here[key_of(half)].id / TOKENS : 0;
            next.products[i / 2][half][i % 2] = has ? work.products[segment * GROUP + h] : 0.0f;
        }
}

// Multiply the candidates whose codes are loaded with the queries, store the estimated products, and add the
// exponentials of the logits to `sums`. `here` points to the first of these candidates in the warp's queue.
// first: number of that candidate among all candidates of the group.
__device__ __forceinline__ void finish(const Batch& now, const Candidate* here, int many, int first,
                                       Exponentials (&sums)[COLUMNS][2], const Work& work) {
#pragma unroll
    for (int set = 0; set < COLUMNS; set++) {
        float both[ROWS][2];
        multiply(both, now.tile, work.operands, set, work.levels);
#pragma unroll
        for (int half = 0; half < ROWS; half++) {
            int key = key_of(half), log = log_of(now.tile, half), slot = here[min(key, many - 1)].slot;
            float weight = log ? exp2f(float(log - 32768) * (OCTAVES / 65536.0f)) : 0.0f;
#if SAMPLING
            float stands_for = log_weight(slot, u32(here[min(key, many - 1)].id), work.seed, work.threshold);
#endif
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int h = head_of(set, side);
                if (h >= GROUP || key >= many) continue;
                float found = both[half][side] * work.down[set][side] * weight;
                if (CENTERED) found += now.products[set][half][side];
                work.estimates[i64(first + key) * GROUP + h] = found;
                float logit = capped(found, work.scale, work.softcap);
#if SAMPLING
                sums[set][side].add(work.buckets + h * BUCKETS, logit + stands_for);
#else
                if (slot < 0)
                    sums[set][side].add(work.buckets + h * BUCKETS, logit);
                else if (slot < EDGE)
                    work.edge_estimates[slot * GROUP + h] = found;
#endif
            }
        }
    }
}

// Estimate the scores of all candidates of this warp, up to `ONCE` candidates at a time. If AHEAD is true, the
// codes of the next candidates are loaded while those of the current candidates are multiplied.
//   gather(): a function that writes the next candidates into the warp's queue and returns their number, or 0 if
//     no candidates are left.
//   write(first): a function that copies the list entries of the candidates in the queue to the array
//     `candidates`, from index `first` on.
template <bool AHEAD, class Gather, class Keep>
__device__ __forceinline__ void estimate(const Work& work, Gather gather, Keep write) {
    Exponentials sums[COLUMNS][2];
    while (int count = gather()) {
        int first = threadIdx.x % 32 == 0 ? atomicAdd(work.many, count) : 0;
        __syncwarp();
        Batch even, odd;  // two batches by name: copying one into the other would wait for its loads
        auto start = [&](Batch& next, int at) {
            if (at < count) begin(next, work.queue + at, count - at, work);
        };
        auto end = [&](const Batch& now, int at) {
            if (at < count) finish(now, work.queue + at, count - at, first + at, sums, work);
        };
        start(even, 0);
        first = __shfl_sync(ALL, first, 0);
        write(first);
        for (int at = 0; at < count; at += 2 * ONCE) {
            if (AHEAD) start(odd, at + ONCE);
            end(even, at);
            start(AHEAD ? even : odd, at + (AHEAD ? 2 : 1) * ONCE);
            end(odd, at + ONCE);
            if (!AHEAD) start(even, at + 2 * ONCE);
        }
        __syncwarp();
    }
#pragma unroll
    for (int set = 0; set < COLUMNS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++)
            sums[set][side].flush<FOLDED ? 2 : 4>(work.buckets + head_of(set, side) * BUCKETS);
}

__device__ __forceinline__ u32 lower_lanes() { return (1u << threadIdx.x % 32) - 1; }

#if SAMPLING
// Return two thresholds of priority sampling (kvindex.ops.priority). The priority of a key is its estimated
// log weight plus random noise. A key is a candidate if its priority is at least the second threshold. If its
// priority without noise is at least the first threshold, the key is a candidate whatever its noise is.
__device__ __noinline__ int2 thresholds_alone(const Voters& voters, int target, bool all) {
    if (all) return {LEAST, LEAST + 1};
    int beyond = vote_of(last_of_the_best(voters, target + 1)) & -STEP;
    int last = target ? vote_of(last_of_the_best(voters, target)) : beyond + STEP;
    return {beyond, last < beyond + STEP ? beyond : beyond + STEP};
}
#endif

// Slow path, if the list that scan.cu has written is not sufficient (exact.cuh): find the candidates among all
// keys, and estimate their inner products with the queries. The candidates are the C keys with the highest votes
// (approximate scores). With SAMPLING, they are all keys whose entry (packed priority and token id) is at least
// `least`.
__device__ __noinline__ void estimate_alone(const Work& work, const Voters& voters, int target, u64 least) {
    if (!SAMPLING) least = target ? last_of_the_best(voters, target) : ~0ull;
    u32 next = (blockIdx.x * 8 + threadIdx.x / 32) * 32, hits = 0;
    u64 entry = 0;
    auto gather = [&]() {
        int count = 0;
        for (; !count && next < voters.tokens; next += gridDim.x * 256) {
            entry = entry_alone(voters, next);
            bool inside = entry && entry >= least;
            hits = __ballot_sync(ALL, inside);
            count = __popc(hits);
            int slot = SAMPLING && inside ? work.slot_of(entry) : -1;
            if (inside) work.put(__popc(hits & lower_lanes()), entry, work.block_of(entry), slot);
        }
        return count;
    };
    estimate<false>(work, gather, [&](int first) {
        if (hits >> threadIdx.x % 32 & 1) work.candidates[first + __popc(hits & lower_lanes())] = entry;
    });
}

struct Arguments {
    const i64* codes;             // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                                  // head_bytes
    const uint2* operands;        // written by prepare_query.cu, as are ups, bases and shifts
    const float* ups;
    const float* products;        // [BG, row, GROUP]: ⟨q, μ⟩ of each block, written by scan.cu
    const float* levels;          // [LEVELS]
    const int* wanted;            // [B]: C, the number of candidates wanted
    const int* counted;           // [B]: number of valid keys
    const int* bases;
    const int* shifts;
    const int* counts;            // written by scan.cu, as are list and histogram
    const u64* list;
    const int* histogram;
    u64* candidates;              // [BG, capacity]: entries of the candidates and of the threshold's bin, in any order
    int* candidate_counts;        // [BG] APART: number of these entries, cleared before the launch
    float* estimates;             // [BG, capacity, GROUP]: their estimates
    u64* buckets;                 // [BG, GROUP, BUCKETS]: sums of exponentials over the candidates above
                                  // the threshold's bin, cleared before the launch
    u64* edge;                    // [BG, EDGE]: entries of the threshold's bin
    float* edge_estimates;        // [BG, EDGE, GROUP]: their estimates
    int* edge_counts;             // [BG] APART: number of entries in the threshold's bin, cleared before the launch
    // [BG]: two numbers that determine the candidates. Without SAMPLING: the histogram bin of the C-th best
    // entry, and the number of entries in higher bins (−1 and 0 if all entries are candidates). With SAMPLING:
    // the two thresholds of kvindex.ops.priority.
    int2* cuts;
    const int* thresholds;        // written by prepare_query.cu
    const float2* scales;         // see votes.cuh, as for `seeds`
    const u32* seeds;
    const u32* planes;            // from here to `length`: as in scan.cu
    const int* sums;
    const void* queries;
    const float* units;
    const float* weight_scale;
    const int* factors;
    const u32* valid;
    const i64* length;
    int* signals;                 // counts finished warps of scan.cu, of which there are `scanners`, and thread blocks
                                  // of this kernel (common.cuh)
    i64 row, head_bytes, logs, magnitudes, scanners, capacity, kv_heads;
    float scale, softcap;
};

// Grid: (splits, BG), 256 threads.
// Reads the list of scan.cu, and the signs, magnitudes and log weight of each candidate: 16 + 48 + 2 bytes in 4
// sectors for D = 128 and 3 bits. Writes 8 + 4 GROUP bytes per candidate.
// If the list does not contain all of the C best keys, the kernel computes all votes (approximate scores) again
// (exact.cuh).
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const __grid_constant__ Arguments args) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint2 operands[OPERANDS];
    __shared__ Candidate queues[8][QUEUE];
    u32 bg = blockIdx.y, groups = gridDim.y, batch = bg / u32(args.kv_heads);
    int lane = threadIdx.x % 32, target = min(args.wanted[batch], args.counted[batch]);
    // Issue all independent reads before waiting for any of them, so that their latencies overlap. This matters
    // because a thread block may start late.
    float level = threadIdx.x < LEVELS ? args.levels[threadIdx.x] : 0.0f, up[COLUMNS][2];
    uint2 parts[OPERANDS / 256];
#pragma unroll
    for (int i = 0; i < OPERANDS / 256; i++)
        parts[i] = __ldcg(args.operands + bg * OPERANDS + i * 256 + threadIdx.x);
    Work work = {
        args.codes + batch * args.row, args.logs, args.magnitudes, bg % u32(args.kv_heads) * args.head_bytes,
        args.products + bg * args.row * GROUP, args.list + bg * args.capacity,
        args.candidates + bg * args.capacity, args.buckets + bg * (GROUP * BUCKETS), args.edge + bg * EDGE,
        args.estimates + bg * args.capacity * GROUP, args.edge_estimates + bg * (EDGE * GROUP),
        args.candidate_counts + bg * APART, args.edge_counts + bg * APART, args.scale,
        args.softcap,
    };
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; i++) {
        int h = head_of(i / 2, i % 2);
        up[i / 2][i % 2] = h < GROUP ? __ldcg(args.ups + bg * GROUP + h) : 1.0f;
    }
    work.cutoff = {__ldcg(args.bases + bg), __ldcg(args.shifts + bg), -1};
    work.operands = operands;
    work.queue = queues[threadIdx.x / 32];
#if SAMPLING
    work.seed = __ldcg(args.seeds + bg);
    int listed_from = __ldcg(args.thresholds + bg);
#endif
    let_next_begin();
    u32 teams = min(groups, u32(args.scanners));
    await(args.signals + bg * APART, warps_of(bg % teams, teams, u32(args.scanners)));
    auto done = [&]() {
        __syncthreads();
        if (threadIdx.x == 0) signal(args.signals + (groups + bg) * APART);
        after_previous();
    };

    // W warps (`warps`) share the candidate list of one KV head of a sequence. The warp with number `own`
    // processes the entries own, own + W, own + 2 W and so on, 32 of them at a time.
    int warps = gridDim.x * 8, own = blockIdx.x * 8 + threadIdx.x / 32, next = own;
    int n = args.counts[bg * APART];
    auto place_of = [&](int i) { return next + (i * 32 + lane) * warps; };  // of the i-th batch of 32
    u64 entries[HANDS];
    entries[0] = place_of(0) < args.capacity ? work.list[place_of(0)] : 0;
    auto load_hands = [&](int from) {
#pragma unroll
        for (int i = 0; i < HANDS; i++)
            if (i >= from) entries[i] = place_of(i) < n ? work.list[place_of(i)] : 0;
    };
    auto bins = bins_of<false, 256>(args.histogram + bg * BINS);
    if (threadIdx.x < LEVELS) halves[threadIdx.x] = to_float16(level);
#pragma unroll
    for (int i = 0; i < OPERANDS / 256; i++) operands[i * 256 + threadIdx.x] = parts[i];
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; i++) work.down[i / 2][i % 2] = 1 / up[i / 2][i % 2];
    __syncthreads();
    work.levels = levels_of(halves);
    bool alone = n < target || n > args.capacity;
    u64 block = !alone && place_of(0) < n ? work.block_of(entries[0]) : 0;
    if (!alone && own + 32 * warps < n) load_hands(1);
    Cut cut = {-1, 0};
#if SAMPLING
    // The threshold for candidates is the lower bound of the histogram bin that contains the (C + 1)-th best
    // entry. The last bin has no upper bound, and the first bin may have no lower bound. If the entry is in such
    // a bin, the slow path must find the threshold.
    bool all = args.counted[batch] <= args.wanted[batch];
    if (!all && n > target) {
        cut = cut_of(bins, target + 1);
        alone |= cut.bin == BINS - 1 || (cut.bin == 0 && listed_from == LEAST + 1);
    }
    alone |= !all && n <= target;
    int2 cuts = {LEAST, LEAST + 1};
    if (!all) {
        work.cutoff.bin = cut.bin - (cut.above < target);
        cuts = {work.cutoff.base + cut.bin * STEP, work.cutoff.base + (work.cutoff.bin + 1) * STEP};
    }
#else
    int2 cuts = {-1, 0};
#endif
    if (alone) {
        Voters voters = {args.codes + batch * args.row, args.head_bytes, bg, args.kv_heads, args.planes, args.sums,
                         args.queries, args.units, args.factors, args.valid + batch * args.row * 8,
                         args.length[RAGGED * batch],
                         shifts_of(args.weight_scale[bg]), {args.scales, args.seeds}};
        u64 least = 0;
#if SAMPLING
        cuts = thresholds_alone(voters, target, all);
        work.threshold = cuts.x;
        least = entry_of(cuts.y, -1);
#endif
        if (blockIdx.x == 0 && threadIdx.x == 0) args.cuts[bg] = cuts;
        estimate_alone(work, voters, target, least);
        done();
        return;
    }
#if SAMPLING
    work.threshold = cuts.x;
#else
    if (n > target) cut = cut_of(bins, target);
    work.cutoff.bin = cut.bin;
    cuts = {cut.bin, cut.above};
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0) args.cuts[bg] = cuts;
    u32 hits[HANDS];
    auto gather = [&]() {
        int count = 0;
        for (; !count && next < n; next += QUEUE * warps) {
            bool more = next + 32 * warps < n;  // more than one batch of 32 entries
            if (next != own) load_hands(0);
#pragma unroll
            for (int i = 0; i < HANDS; i++) {
                hits[i] = 0;
                if (i == 0 || more)
                    hits[i] = __ballot_sync(ALL, place_of(i) < n && work.takes(entries[i]));
                count += __popc(hits[i]);
            }
            u64 blocks[HANDS];
            int slots[HANDS];
#pragma unroll
            for (int i = 0; i < HANDS; i++) {
                if (i && !more) continue;
                bool inside = hits[i] >> lane & 1, known = i == 0 && next == own;
                blocks[i] = known ? block : inside ? work.block_of(entries[i]) : 0;
                slots[i] = inside ? work.slot_of(entries[i]) : -1;
            }
            int at = 0;
#pragma unroll
            for (int i = 0; i < HANDS; i++) {
                if (i && !more) continue;
                int to = at + __popc(hits[i] & lower_lanes());
                if (hits[i] >> lane & 1) work.put(to, entries[i], blocks[i], slots[i]);
                at += __popc(hits[i]);
            }
        }
        return count;
    };
    estimate<true>(work, gather, [&](int first) {
#pragma unroll
        for (int i = 0; i < HANDS; i++) {
            if (hits[i] >> lane & 1) work.candidates[first + __popc(hits[i] & lower_lanes())] = entries[i];
            first += __popc(hits[i]);
            entries[i] = 0;  // reloaded later: no register is left to keep it
        }
        block = 0;
    });
    done();
}
