// Coarse stage of a decode step: compute the vote of every key, and list the keys whose vote reaches a
// threshold. A vote is an integer estimate of the product of query and key (common/votes.cuh; ParisKV paper,
// B.2.1). Reference: scan in kvindex/pariskv/decode_step.py, kvindex/pariskv/sign_votes.py.
// Compile-time constants: D, GROUP (query heads per KV head), DTYPE (of queries), CENTERED (1: blocks of codes
// have centers), PLANES (bit planes of a rounded query), SAMPLING (1: candidates are sampled), RAGGED (1: each
// sequence has its own length).
#include "common/votes.cuh"

// bytes of shared memory for the codes of a block of 256 keys (signs, weights and center)
constexpr int STAGE = (SCANNED + 127) / 128 * 128;
// number of groups of 32 keys that a warp processes at a time: it first computes the votes (approximate scores)
// of all these keys, and then appends those that reach the threshold to the list
constexpr int AT_ONCE = GROUP <= 4 && D <= 128 ? 4 : SAMPLING ? 1 : 2;
// not unrolled with more heads, to save registers
constexpr int UNROLLED = GROUP <= 4 ? 8 / AT_ONCE : 1;
constexpr int DEPTH = AT_ONCE + 5;                       // entries that each lane buffers

// Bytes of shared memory per thread block. Two thread blocks should use at most 196 KB together, so that enough
// L1 remains for this kernel and for the rerank kernel, which starts on the same multiprocessors. With more
// shared memory, the rerank took 6 µs longer at 1M tokens.
constexpr int SHARED = WARPS * (STAGES * (STAGE + 8) + DEPTH * 256) + 4 * 256 + 2 * BINS;
static_assert(D > 128 || 2 * (SHARED + 1024) <= 196 * 1024, "takes from L1");

// If a key's vote (approximate score) reaches the threshold, append the vote and the token id to this lane's
// buffer at `tail`. Predicated instructions avoid divergence.
__device__ __forceinline__ void append(Shared& tail, int vote, int threshold, u32 id) {
#ifdef EMULATED
    if (vote >= threshold) store_pair(tail, id, u32(vote)), tail += 256;
#else
    asm volatile("{\n\t.reg .pred is;\n\tsetp.ge.s32 is, %1, %2;\n\t@is st.shared.v2.u32 [%0], {%3, %1};\n\t"
                 "@is add.u32 %0, %0, 256;\n\t}" : "+r"(tail) : "r"(vote), "r"(threshold), "r"(id));
#endif
}
// Variant of `append` that is used if candidates are sampled at random (SAMPLING). Then each key has a priority
// that includes random noise, and the keys with the highest priorities become candidates. The argument `bound` is
// an upper bound of a key's priority (`bound_of` in noise.cuh). The argument `size` is the logarithm of the key's
// estimated attention weight. If `bound` reaches the threshold, append the token id and `size` to this lane's
// buffer at `tail`.
__device__ __forceinline__ void append(Shared& tail, float bound, float threshold, float size, u32 id) {
#ifdef EMULATED
    if (bound >= threshold) store_pair(tail, id, __float_as_uint(size)), tail += 256;
#else
    asm volatile("{\n\t.reg .pred is;\n\tsetp.ge.f32 is, %1, %2;\n\t@is st.shared.v2.u32 [%0], {%3, %4};\n\t"
                 "@is add.u32 %0, %0, 256;\n\t}"
                 : "+r"(tail) : "f"(bound), "f"(threshold), "r"(id), "r"(__float_as_uint(size)));
#endif
}

struct Arguments {
    const i64* codes;         // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                              // head_bytes
    const u32* planes;        // written by prepare_query.cu, as are sums, units, thresholds, bases and shifts
    const int* sums;
    const void* queries;      // DTYPE [BG, GROUP, D]
    const float* units;
    const float* weight_scale;  // [BG]: power of two that log weights are relative to
    const int* factors;       // [256]: from kvindex.ops.codes.log_factors
    const u32* valid;         // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;        // [1], or RAGGED: [B]: number of tokens
    const int* thresholds;
    const int* bases;
    const int* shifts;
    const float2* scales;     // see votes.cuh, as for `seeds`
    const u32* seeds;
    int* counts;              // [BG] APART: number of listed entries
    u64* list;                // [BG, capacity]: entries (`entry_of` in common.cuh)
    int* histogram;           // [BG, BINS]: listed keys by `bin_of` their vote
    float* products;          // [BG, row, GROUP]: ⟨q, μ⟩, the product of each query with each block's center
    int* signals;             // counts finished warps (`signal` in common.cuh)
    i64 row, head_bytes, capacity, groups, kv_heads;
};

// Grid: any number of thread blocks of WARPS warps. Each warp processes blocks of 256 keys, one after another.
// It copies the codes of the next two blocks of keys to shared memory asynchronously. The first two copies begin
// while the previous kernel, prepare_query.cu, still runs.
// The kernel reads D/8 + 1 bytes for each key and 2 D bytes for each block of 256 keys, once. For each key that
// reaches the threshold, it writes 8 bytes and increments a bin of the histogram. If C candidates are needed,
// about 2 C keys reach the threshold. Each lane buffers its own list entries, so lanes need not communicate.
// The histogram of a thread block's first group is in shared memory. When it was in global memory, incrementing
// it for each key took 8 to 9 of 53 µs at 1M tokens.
// Limited by memory at 1M tokens: the copies alone take 39 µs, the whole kernel 43 to 45 µs.
// Dynamic shared memory: WARPS STAGES STAGE bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32, D <= 128 ? 2 : 1)
scan(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ FACTORS int factors[256];
    __shared__ u64 buffers[WARPS][DEPTH][32];
    __shared__ u64 barriers[WARPS][STAGES];
    __shared__ u32 bins[BINS / 2];  // histogram of the first warp's first group, two bins per word
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Shared stages = shared_place(memory) + warp * (STAGES * STAGE), factor_places = shared_place(factors);
    Shared barrier = shared_place(barriers[warp]), buffer = shared_place(&buffers[warp][0][lane]);
    int factor = threadIdx.x < 256 ? args.factors[threadIdx.x] : 0;
    i64 tokens = __ldcg(args.length);  // if RAGGED, `tokens` and `blocks` change with the group
    u32 blocks = u32((tokens + TOKENS - 1) / TOKENS), warps = gridDim.x * WARPS;
    // Divide the warps into teams, one team per group of query heads if there are enough warps. Of n warps in a
    // team, each takes every n-th block of keys. Keys with high votes (approximate scores) tend to be in
    // neighboring blocks, so this spreads them over the warps.
    u32 teams = min(u32(args.groups), warps), team = (blockIdx.x * WARPS + warp) * teams / warps;
    u32 low = first_of(team, teams, warps), members = warps_of(team, teams, warps);
    u32 own = blockIdx.x * WARPS + warp - low, home = blockIdx.x * WARPS * teams / warps;
#if RAGGED
    auto tokens_of = [&](u32 bg) { return i64(__ldcg(args.length + bg / u32(args.kv_heads))); };
    auto each_of = [&](u32 bg) {  // number of blocks of a group that belong to this warp
        u32 blocks = u32((tokens_of(bg) + TOKENS - 1) / TOKENS);
        return blocks > own ? (blocks - own + members - 1) / members : 0;
    };
    u32 work = 0;
    for (u32 bg = team; bg < u32(args.groups); bg += teams) work += each_of(bg);
#else
    u32 each = blocks > own ? (blocks - own + members - 1) / members : 0;  // this warp's blocks in each group
    u32 work = each * ((u32(args.groups) - team + teams - 1) / teams);
#endif

    if (lane == 0)
        for (int i = 0; i < STAGES; i++) begin_barrier(barrier + 8 * i);
    __syncwarp();
    u32 next = 0;    // the work item whose copy begins next
    u64 source = 0;  // of work item next / 32 · 32 + lane: the address of its codes
    u32 place = 0;   // of the same work item: the position of its block in the table
    u32 valid_of[STAGES] = {};  // of the current and the next work items: valid bits of 32 keys, numbers
                                // 32 (lane % 8) to 32 (lane % 8) + 31 of the block
    auto fetch = [&]() {
#pragma unroll
        for (int i = 0; i + 1 < STAGES; i++) valid_of[i] = valid_of[i + 1];
        if (next >= work) return;
        int at = next % 32, stage = next % STAGES;
        if (at == 0 && next + lane < work) {
#if RAGGED
            u32 bg = team, rest = next + lane;
            for (u32 each; rest >= (each = each_of(bg)); bg += teams) rest -= each;
            u32 s = own + rest * members;
#else
            u32 bg = team + (next + lane) / each * teams, s = own + (next + lane) % each * members;
#endif
            i64 entry = i64(bg / u32(args.kv_heads)) * args.row + s;
            place = u32(entry);
            source = u64(__ldcg(args.codes + entry)) + bg % u32(args.kv_heads) * args.head_bytes;
        }
        const char* from = reinterpret_cast<const char*>(__shfl_sync(ALL, source, at));
        valid_of[STAGES - 1] = args.valid[i64(__shfl_sync(ALL, place, at)) * 8 + lane % 8];
        if (lane == 0) expect(barrier + 8 * stage, SCANNED);
        copy(stages + stage * STAGE, from, SCANNED, barrier + 8 * stage);
        next++;
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();
    if (threadIdx.x < 256) factors[threadIdx.x] = factor;
    for (int i = threadIdx.x; i < BINS / 2; i += WARPS * 32) bins[i] = 0;
    __syncthreads();
    after_previous();
    let_next_begin();

    Group group;
    u32 bg = team, s = own;
    u32 shifts = 0;
    int binned = 0;
#if SAMPLING
    float threshold = 0;
#else
    int threshold = 0;
#endif
    Shared tail = buffer;  // where the lane's next entry is stored
    auto enter = [&]() {
#if RAGGED
        while (!each_of(bg)) bg += teams;  // this loop ends, because there is work left
        tokens = tokens_of(bg), blocks = u32((tokens + TOKENS - 1) / TOKENS);
#endif
        load(group, args.queries, args.planes, args.sums, args.units, {args.scales, args.seeds}, bg);
        shifts = shifts_of(args.weight_scale[bg]);
#if SAMPLING
        threshold = lowered(args.thresholds[bg]);
#else
        threshold = args.thresholds[bg];
#endif
    };
    auto flush = [&]() {
        int mine = int(tail - buffer) / 256;
#if SAMPLING
        int listed = mine;
        mine = 0;
#pragma unroll 1
        for (int i = 0; i < listed; i++) {  // keep the keys whose priority, noise included, reaches the threshold
            u64 pair = load_pair(buffer + i * 256);
            int found = priority_of(__uint_as_float(u32(pair >> 32)), u32(pair), group.seed);
            if (found >= args.thresholds[bg]) store_pair(buffer + mine++ * 256, u32(pair), u32(found));
        }
#endif
        int all = warp_sum(mine);
        int start = lane == 0 ? atomicAdd(args.counts + bg * APART, all) : 0;
        // load `base` and `shift` here, at each use, instead of keeping them in registers
        int base = args.bases[bg], shift = args.shifts[bg];
        bool at_home = bg == home && binned + all <= BINNED / WARPS;
        if (at_home) binned += all;
        start = __shfl_sync(ALL, start, 0);
#pragma unroll 1
        for (int i = 0; u32 more = __ballot_sync(ALL, i < mine); i++) {
            int to = start + __popc(more & ((1u << lane) - 1));
            u64 pair = load_pair(buffer + i * 256);
            int vote = int(pair >> 32), id = int(pair);
            if (i < mine && to < args.capacity) args.list[bg * args.capacity + to] = entry_of(vote, id);
            if (i < mine) {
                int bin = bin_of(vote, base, shift);
                if (at_home) atomicAdd(bins + bin / 2, 1u << bin % 2 * 16);
                else atomicAdd(args.histogram + bg * BINS + bin, 1);
            }
            start += __popc(more);
        }
        tail = buffer;
    };
    if (work) enter();
    for (u32 item = 0; item < work; item++) {
        int stage = item % STAGES;
        Shared codes = stages + stage * STAGE;
        u32 bits = valid_of[0];
        if (s + 1 == blocks) {
            int left = int(tokens - i64(s) * TOKENS) - lane % 8 * 32;  // tokens left from this lane's 32 keys on
            bits &= left >= 32 ? ALL : left <= 0 ? 0 : (1u << left) - 1;
        }
        bool whole = __all_sync(ALL, bits == ALL);
        wait(barrier + 8 * stage, item / STAGES % 2);
        Mean mean;
        int offsets[SETS][2];
        load(mean, codes + CENTER);
        float* products = args.products + (i64(bg) * args.row + s) * GROUP + 2 * lane % 4;
        offsets_of<true>(offsets, mean, group, products);
        u32 id = s * TOKENS + own_key();
#pragma unroll UNROLLED
        for (int first_part = 0; first_part < 8; first_part += AT_ONCE) {
#if SAMPLING
            float sizes[AT_ONCE], votes[AT_ONCE];  // votes holds upper bounds of the priorities, before the exact noise
                                                   // is known
            const float NO_VOTE = NEVER;
#else
            constexpr int NO_VOTE = LEAST;
            int votes[AT_ONCE];
#endif
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                Signs signs;
                load(signs, codes, first_part + i);
                u32 weights = load_weights(codes + WEIGHTS, first_part + i);
#if SAMPLING
                sizes[i] = size_of(signs, weights, shifts, group, offsets, factor_places);
                votes[i] = bound_of(sizes[i], id + (first_part + i) * 32, group.seed);
#else
                votes[i] = vote_of(signs, weights, shifts, group, offsets, factor_places, 0);
#endif
            }
            if (!whole)
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (!(__shfl_sync(ALL, bits, first_part + i) >> own_key() & 1)) votes[i] = NO_VOTE;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#if SAMPLING
                append(tail, votes[i], threshold, sizes[i], id + (first_part + i) * 32);
#else
                append(tail, votes[i], threshold, id + (first_part + i) * 32);
#endif
            if (__any_sync(ALL, tail > buffer + (DEPTH - AT_ONCE) * 256)) flush();
        }
        __syncwarp();
        fetch();
        s += members;
        if (s >= blocks) {
            if (__any_sync(ALL, tail > buffer)) flush();
            s = own, bg += teams;
            if (item + 1 < work) enter();
        }
    }
    __syncthreads();
    // Add the counts of two histogram bins to global memory with one 64-bit atomic addition. A count always
    // fits into 32 bits, so there is no carry from the lower half to the upper half.
    u64* pairs = reinterpret_cast<u64*>(args.histogram + home * BINS);
    for (int i = threadIdx.x; i < BINS / 2; i += WARPS * 32)
        if (u32 two = bins[i]) atomicAdd(pairs + i, u64(two & 65535) | u64(two >> 16) << 32);
    __syncthreads();  // so that the signaling warp has waited for the writes of all warps
    if (threadIdx.x < WARPS)
        for (team = (blockIdx.x * WARPS + threadIdx.x) * teams / warps; team < u32(args.groups); team += teams)
            signal(args.signals + team * APART);
}
