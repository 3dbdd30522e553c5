// Coarse stage: which keys' votes are high (votes.cuh; paper, B.2.1).
// Compile-time: D, GROUP, DTYPE (of queries), CENTRED, PLANES.
#include "votes.cuh"

constexpr int BUFFER = 128;                                   // entries that a warp holds back
constexpr int STAGES = 2;                                     // blocks on their way to a warp
constexpr int STAGE = (SCANNED + 32 + 127) / 128 * 128;       // bytes: codes and valid bits
constexpr int AT_ONCE = GROUP <= 8 && D <= 128 ? 4 : 2;       // times 32 keys whose votes are made together

// Grid: any; each warp walks over blocks of 256 keys, which come to shared memory by asynchronous
// copies, two ahead, the first two while `ask` still runs. Reads D/8 + 1 bytes per key and 2 D per
// block, once; writes 8 bytes and adds to a histogram for each key at or above the threshold of
// ask.cu, some 2 C.
// Dynamic shared memory: 8 STAGES STAGE bytes.
// planes, sums, units, thresholds, bases, shifts: of ask.cu; queries DTYPE [BG, GROUP, D]; factors
// int32 [256]; valid uint32 [B, row, 8], a bit per token; length int64 [1]. counts int32 [BG] APART; list
// uint64 [BG, capacity]; histogram int32 [BG, BINS]: of `bin_of`; products float32 [BG, row,
// GROUP]: ⟨q, μ⟩ of each block. told: warps that are done (common.cuh).
extern "C" __global__ void __launch_bounds__(256, D <= 128 ? 2 : 1)
scan(const i64* table, i64 row, i64 head, const u32* planes, const int* sums, const void* queries,
     const float* units, const int* given_factors, const u32* valid, const i64* length,
     const int* thresholds, const int* bases, const int* shifts, int* counts, u64* list,
     int* histogram, float* products, int* told, i64 capacity, i64 groups, i64 kv_heads) {
    DYNAMIC_SHARED(memory);
    __shared__ int factors[256];
    __shared__ u64 buffers[8][BUFFER];
    __shared__ u64 barriers[8][STAGES];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, held = 0;
    u64* buffer = buffers[warp];
    char* stages = memory + warp * (STAGES * STAGE);
    int factor = given_factors[threadIdx.x];
    i64 tokens = __ldcg(length);
    u32 blocks = u32((tokens + TOKENS - 1) / TOKENS), warps = gridDim.x * 8;
    // warps in as many teams as there are groups; in a team every warp takes each so-many-th block,
    // for keys with high votes lie together
    u32 teams = min(u32(groups), warps), team = (blockIdx.x * 8 + warp) * teams / warps;
    u32 low = first_of(team, teams, warps), members = warps_of(team, teams, warps);
    u32 own = blockIdx.x * 8 + warp - low;
    u32 each = blocks > own ? (blocks - own + members - 1) / members : 0;  // blocks of a group
    u32 work = each * ((u32(groups) - team + teams - 1) / teams);

    if (lane == 0)
        for (int i = 0; i < STAGES; i++) begin_barrier(&barriers[warp][i]);
    __syncwarp();
    u32 next = 0;    // the item whose copy begins next
    u64 source = 0;  // of items next / 32 · 32 + lane: where codes are
    i64 place = 0;   // and their block in the table
    auto fetch = [&]() {
        if (next >= work) return;
        int at = next % 32, stage = next % STAGES;
        if (at == 0 && next + lane < work) {
            u32 bg = team + (next + lane) / each * teams, s = own + (next + lane) % each * members;
            place = i64(bg / u32(kv_heads)) * row + s;
            source = u64(__ldcg(table + place)) + bg % u32(kv_heads) * head;
        }
        const char* from = reinterpret_cast<const char*>(__shfl_sync(ALL, source, at));
        const u32* bits = valid + __shfl_sync(ALL, place, at) * 8;
        if (lane == 0) expect(&barriers[warp][stage], SCANNED + 32);
        copy(stages + stage * STAGE, from, SCANNED, &barriers[warp][stage]);
        copy(stages + stage * STAGE + SCANNED, bits, 32, &barriers[warp][stage]);
        next++;
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();
    factors[threadIdx.x] = factor;
    __syncthreads();
    after_previous();
    let_next_begin();

    Group group;
    u32 bg = team, s = own;
    int threshold = 0;
    auto enter = [&]() {
        load(group, queries, planes, sums, units, bg);
        threshold = thresholds[bg];
    };
    auto flush = [&]() {
        __syncwarp();
        int start = lane == 0 ? atomicAdd(counts + bg * APART, held) : 0;
        int base = bases[bg], shift = shifts[bg];
        start = __shfl_sync(ALL, start, 0);
#pragma unroll 1
        for (int i = lane; i < held; i += 32) {
            u64 entry = buffer[i];
            if (start + i < capacity) list[bg * capacity + start + i] = entry;
            atomicAdd(histogram + bg * BINS + bin_of(vote_of(entry), base, shift), 1);
        }
        held = 0;
        __syncwarp();
    };
    if (work) enter();
    for (u32 item = 0; item < work; item++) {
        int stage = item % STAGES;
        const char* codes = stages + stage * STAGE;
        const u32* bits = reinterpret_cast<const u32*>(codes + SCANNED);
        wait(&barriers[warp][stage], item / STAGES % 2);
        Mean mean;
        int offsets[SETS][2];
        load(mean, codes + CENTRE);
        offsets_of(offsets, mean, group, products + (i64(bg) * row + s) * GROUP);
#pragma unroll 1
        for (int first_part = 0; first_part < 8; first_part += AT_ONCE) {
            int votes[AT_ONCE];
            u32 hits = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                Signs signs;
                load<true>(signs, codes, first_part + i);
                u32 weights = load_weights(codes + WEIGHTS, first_part + i);
                votes[i] = vote_of(signs, weights, group, offsets, factors);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) hits |= u32(votes[i] >= threshold) << i;
            while (__any_sync(ALL, hits)) {  // one of each lane
                int vote = votes[0], i = hits ? __ffs(hits) - 1 : 0;
#pragma unroll
                for (int other = 1; other < AT_ONCE; other++)
                    if (i == other) vote = votes[other];
                i64 id = i64(s) * TOKENS + (first_part + i) * 32 + own_key();
                bool in = hits && id < tokens && bits[first_part + i] >> own_key() & 1;
                u32 all = __ballot_sync(ALL, in);
                if (in) buffer[held + __popc(all & ((1u << lane) - 1))] = entry_of(vote, int(id));
                held += __popc(all);
                hits &= hits - 1;
                if (held > BUFFER - 32) flush();
            }
        }
        __syncwarp();
        fetch();
        s += members;
        if (s >= blocks) {
            if (held) flush();
            s = own, bg += teams;
            if (item + 1 < work) enter();
        }
    }
    __syncthreads();  // so that one warp waits for the writes of all
    if (threadIdx.x < 8)
        for (team = (blockIdx.x * 8 + threadIdx.x) * teams / warps; team < u32(groups); team += teams)
            tell(told + team * APART);
}
