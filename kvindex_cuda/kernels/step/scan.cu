// Coarse stage: which keys' votes are high (votes.cuh; paper, B.2.1).
// Compile-time: D, GROUP, DTYPE (of queries), CENTERED, PLANES, DRAWN, RAGGED (each row of the batch has a length).
#include "common/votes.cuh"

constexpr int STAGE = (SCANNED + 127) / 128 * 128;       // bytes
constexpr int AT_ONCE = GROUP <= 4 && D <= 128 ? 4 : DRAWN ? 1 : 2;  // times 32 keys whose votes are made together
constexpr int UNROLLED = GROUP <= 4 ? 8 / AT_ONCE : 1;   // with more heads no registers are left
constexpr int DEPTH = AT_ONCE + 5;                       // entries that a lane buffers

// Bytes of a block. Where two take more than 196 KB, less is left for L1, for the rerank too, which follows on
// the same multiprocessors: it took 6 µs longer at 1M tokens.
constexpr int SHARED = WARPS * (STAGES * (STAGE + 8) + DEPTH * 256) + 4 * 256 + 2 * BINS;
static_assert(D > 128 || 2 * (SHARED + 1024) <= 196 * 1024, "takes from L1");

// Where it reaches the threshold, a vote and its id go to `tail`, and the next ones behind it; no branch.
__device__ __forceinline__ void append(Shared& tail, int vote, int threshold, u32 id) {
#ifdef EMULATED
    if (vote >= threshold) store_pair(tail, id, u32(vote)), tail += 256;
#else
    asm volatile("{\n\t.reg .pred is;\n\tsetp.ge.s32 is, %1, %2;\n\t@is st.shared.v2.u32 [%0], {%3, %1};\n\t"
                 "@is add.u32 %0, %0, 256;\n\t}" : "+r"(tail) : "r"(vote), "r"(threshold), "r"(id));
#endif
}
// Where a bound does (noise.cuh), a size and its id.
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
    const i64* codes;         // [B, row]: addresses of blocks, of KV head g at g · head_bytes
    const u32* planes;        // of prepare_query.cu, as are sums, units, thresholds, bases and shifts
    const int* sums;
    const void* queries;      // DTYPE [BG, GROUP, D]
    const float* units;
    const float* weight_scale;  // [BG]
    const int* factors;       // [256]
    const u32* valid;         // [B, row, 8]: a bit per token
    const i64* length;        // [1], or RAGGED: [B]
    const int* thresholds;
    const int* bases;
    const int* shifts;
    const float2* scales;     // of votes.cuh, as are seeds
    const u32* seeds;
    int* counts;              // [BG] APART: entries listed
    u64* list;                // [BG, capacity]
    int* histogram;           // [BG, BINS]: of `bin_of`
    float* products;          // [BG, row, GROUP]: ⟨q, μ⟩ of each block
    int* signals;             // warps that are done (common.cuh)
    i64 row, head_bytes, capacity, groups, kv_heads;
};

// Grid: any; each warp walks over blocks of 256 keys, which come to shared memory by asynchronous
// copies, two ahead, the first two while prepare_query.cu still runs. Reads D/8 + 1 bytes per key and 2 D per
// block, once; writes 8 bytes and adds to a histogram for each key at or above the threshold of
// prepare_query.cu, some 2 C. These each lane buffers for itself, so that 32 keys need no exchange; the
// histogram of a block's first group is in shared memory (adding each to memory's took 8 to 9 of 53 µs at 1M
// tokens).
// Limited by memory at 1M tokens: its copies alone take 39 µs, all of it 43 to 45.
// Dynamic shared memory: WARPS STAGES STAGE bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32, D <= 128 ? 2 : 1)
scan(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ FACTORS int factors[256];
    __shared__ u64 buffers[WARPS][DEPTH][32];
    __shared__ u64 barriers[WARPS][STAGES];
    __shared__ u32 bins[BINS / 2];  // of the first warp's first group, two in a word
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Shared stages = shared_place(memory) + warp * (STAGES * STAGE), factor_places = shared_place(factors);
    Shared barrier = shared_place(barriers[warp]), buffer = shared_place(&buffers[warp][0][lane]);
    int factor = threadIdx.x < 256 ? args.factors[threadIdx.x] : 0;
    i64 tokens = __ldcg(args.length);  // RAGGED: of the group that a warp is at, as are blocks
    u32 blocks = u32((tokens + TOKENS - 1) / TOKENS), warps = gridDim.x * WARPS;
    // warps in as many teams as there are groups; in a team every warp takes each so-many-th block,
    // for keys with high votes lie together
    u32 teams = min(u32(args.groups), warps), team = (blockIdx.x * WARPS + warp) * teams / warps;
    u32 low = first_of(team, teams, warps), members = warps_of(team, teams, warps);
    u32 own = blockIdx.x * WARPS + warp - low, home = blockIdx.x * WARPS * teams / warps;
#if RAGGED
    auto tokens_of = [&](u32 bg) { return i64(__ldcg(args.length + bg / u32(args.kv_heads))); };
    auto each_of = [&](u32 bg) {  // blocks of a group that are the warp's
        u32 blocks = u32((tokens_of(bg) + TOKENS - 1) / TOKENS);
        return blocks > own ? (blocks - own + members - 1) / members : 0;
    };
    u32 work = 0;
    for (u32 bg = team; bg < u32(args.groups); bg += teams) work += each_of(bg);
#else
    u32 each = blocks > own ? (blocks - own + members - 1) / members : 0;  // blocks of a group
    u32 work = each * ((u32(args.groups) - team + teams - 1) / teams);
#endif

    if (lane == 0)
        for (int i = 0; i < STAGES; i++) begin_barrier(barrier + 8 * i);
    __syncwarp();
    u32 next = 0;    // the item whose copy begins next
    u64 source = 0;  // of items next / 32 · 32 + lane: where codes are
    u32 place = 0;   // and their block in the table
    u32 valid_of[STAGES] = {};  // of items item, item + 1, …: bits of 32 keys, lanes' remainders by 8
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
#if DRAWN
    float threshold = 0;
#else
    int threshold = 0;
#endif
    Shared tail = buffer;  // where the lane's next entry goes
    auto enter = [&]() {
#if RAGGED
        while (!each_of(bg)) bg += teams;  // there is work left
        tokens = tokens_of(bg), blocks = u32((tokens + TOKENS - 1) / TOKENS);
#endif
        load(group, args.queries, args.planes, args.sums, args.units, {args.scales, args.seeds}, bg);
        shifts = shifts_of(args.weight_scale[bg]);
#if DRAWN
        threshold = lowered(args.thresholds[bg]);
#else
        threshold = args.thresholds[bg];
#endif
    };
    auto flush = [&]() {
        int mine = int(tail - buffer) / 256;
#if DRAWN
        int listed = mine;
        mine = 0;
#pragma unroll 1
        for (int i = 0; i < listed; i++) {  // those whose noise is enough
            u64 pair = load_pair(buffer + i * 256);
            int found = priority_of(__uint_as_float(u32(pair >> 32)), u32(pair), group.seed);
            if (found >= args.thresholds[bg]) store_pair(buffer + mine++ * 256, u32(pair), u32(found));
        }
#endif
        int all = warp_sum(mine);
        int start = lane == 0 ? atomicAdd(args.counts + bg * APART, all) : 0;
        int base = args.bases[bg], shift = args.shifts[bg];  // no registers are left for them
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
            int left = int(tokens - i64(s) * TOKENS) - lane % 8 * 32;  // from the lane's 32 on
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
#if DRAWN
            float sizes[AT_ONCE], votes[AT_ONCE];  // bounds, before noise is known to the bit
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
#if DRAWN
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
#if DRAWN
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
    // two bins at once; others may add to one of them: either way memory adds 32 bits to 32
    u64* pairs = reinterpret_cast<u64*>(args.histogram + home * BINS);
    for (int i = threadIdx.x; i < BINS / 2; i += WARPS * 32)
        if (u32 two = bins[i]) atomicAdd(pairs + i, u64(two & 65535) | u64(two >> 16) << 32);
    __syncthreads();  // so that one warp waits for the writes of all
    if (threadIdx.x < WARPS)
        for (team = (blockIdx.x * WARPS + threadIdx.x) * teams / warps; team < u32(args.groups); team += teams)
            signal(args.signals + team * APART);
}
