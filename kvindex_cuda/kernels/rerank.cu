// Reranking: estimates from codes of a few bits (paper, B.2.2, equation 10). One log weight of 16
// bits per key.
//
// A warp multiplies 16 candidates with the heads of its group (product.cuh). Entries of the list are
// dealt to warps like cards, so that each has its share of them and of the candidates among them,
// however the scan wrote them; what a warp's are is put together before codes are read, and those of
// the next 16 are on their way while 16 are multiplied.
// Sums that all candidates enter are kept as integers, so that the order in which the scan wrote
// its list leaves no trace: the same ids from run to run.
// Limited by the latency of scattered reads: counts, list and histogram, asked for at once; addresses
// of blocks while the cut is found; codes. (To ask for codes as well, candidates or not, took 2 to 4 µs
// longer: the others' sectors come from memory, too.)
// Compile-time: D, BITS (of a magnitude), GROUP, CENTRED, SOFTCAP, and DTYPE, PLANES of votes.cuh.
#include "exact.cuh"
#include "product.cuh"
#include "shares.cuh"

constexpr int ONCE = 16;   // candidates of a warp at a time
constexpr int QUEUE = 48;  // entries that a warp holds back: 15 and 32 more

// An entry, and where its block is.
struct __align__(16) Held {
    u64 entry, block;
};

// What the warps of a block work on, of one group: as the kernel gets it, or in shared memory.
struct Work {
    const i64* table;
    i64 logs, magnitudes, head_offset;
    const float* products;
    const u64* list;
    u64 *kept, *buckets, *edge;
    float *estimates, *edge_estimates;
    int *many, *edges;
    float reference, scale, softcap, octaves;
    float down[COLUMNS][2];
    Candidates are;
    Levels levels;
    const uint2* asked;
    Held* queue;

    __device__ __forceinline__ u64 block_of(u64 entry) const {
        return u64(table[id_of(entry) / TOKENS]) + head_offset;
    }
};

// Candidates of a warp: how many there are, the place of the first in `kept`, which of them lie on the
// edge and where among its entries (in the lane of their number), and what a lane multiplies.
struct Batch {
    int many, first, slot;
    u32 edge;
    Tile tile;
    float products[COLUMNS][ROWS][2];
};

// From the queue, whose last they are, and on their way.
__device__ __forceinline__ void begin(Batch& next, int& held, const Work& of) {
    int lane = threadIdx.x % 32;
    next.many = min(held, ONCE);
    held -= next.many;
    const Held* here = of.queue + held;
    u64 entry = here[lane % ONCE].entry;
    bool is = lane < next.many, on_edge = is && of.are.side(entry) == 0;
    next.first = lane == 0 && next.many ? atomicAdd(of.many, next.many) : 0;
    next.slot = on_edge ? atomicAdd(of.edges, 1) : 0;
    next.edge = __ballot_sync(ALL, on_edge);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half * 8 + lane / 4 >= next.many) continue;
        Held one = here[half * 8 + lane / 4];
        const char* block = reinterpret_cast<const char*>(one.block);
        load<false>(next.tile, half, block, id_of(one.entry) % TOKENS, of.logs, of.magnitudes);
    }
#pragma unroll
    for (int half = 0; half < ROWS; half++)
#pragma unroll
        for (int i = 0; i < COLUMNS * 2; i++) {
            int h = head_of(i / 2, i % 2);
            bool has = CENTRED && key_of(half) < next.many && h < GROUP;
            i64 segment = has ? id_of(here[key_of(half)].entry) / TOKENS : 0;
            next.products[i / 2][half][i % 2] = has ? of.products[segment * GROUP + h] : 0.0f;
        }
    next.first = __shfl_sync(ALL, next.first, 0);
    if (is) of.kept[next.first + lane] = entry;
    if (on_edge && next.slot < EDGE) of.edge[next.slot] = entry;
    __syncwarp();
}

__device__ __forceinline__ void finish(const Batch& now, Exponentials (&sums)[COLUMNS][2], const Work& of) {
#pragma unroll
    for (int set = 0; set < COLUMNS; set++) {
        float both[ROWS][2];
        multiply(both, now.tile, of.asked, set, of.levels);
#pragma unroll
        for (int half = 0; half < ROWS; half++) {
            int key = key_of(half), log = log_of(now.tile, half), slot = __shfl_sync(ALL, now.slot, key);
            bool on_edge = now.edge >> key & 1;
            float weight = log ? exp2f(float(log - 65535) * (of.octaves / 65536)) * of.reference : 0.0f;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int h = head_of(set, side);
                if (h >= GROUP || key >= now.many) continue;
                float found = both[half][side] * of.down[set][side] * weight;
                if (CENTRED) found += now.products[set][half][side];
                of.estimates[i64(now.first + key) * GROUP + h] = found;
                if (!on_edge)
                    sums[set][side].add(of.buckets + h * BUCKETS, capped(found, of.scale, of.softcap));
                else if (slot < EDGE)
                    of.edge_estimates[slot * GROUP + h] = found;
            }
        }
    }
}

// Batch after batch: gather(held) puts entries into the queue until there are ONCE or no more. AHEAD:
// whether one is on its way while another is multiplied.
template <bool AHEAD, class Gather>
__device__ __forceinline__ void estimate(const Work& of, Gather gather) {
    Exponentials sums[COLUMNS][2];
    int held = 0;
    auto turn = [&](Batch& next, const Batch& now) {
        gather(held);
        __syncwarp();
        begin(next, held, of);
        if (now.many) finish(now, sums, of);
        return next.many;
    };
    Batch even, odd;  // two, for to copy one is to wait for it
    even.many = odd.many = 0;
    if (AHEAD)
        while (turn(even, odd) && turn(odd, even)) {
        }
    else
        while (turn(odd, even)) finish(odd, sums, of);
#pragma unroll
    for (int set = 0; set < COLUMNS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++)
            sums[set][side].flush<FOLDED ? 2 : 4>(of.buckets + head_of(set, side) * BUCKETS);
}

// What a lane has of 32 entries goes to the queue, if it `is` wanted.
__device__ __forceinline__ void put(int& held, bool is, u64 entry, u64 block, const Work& of) {
    u32 they = __ballot_sync(ALL, is);
    if (is) of.queue[held + __popc(they & ((1u << threadIdx.x % 32) - 1))] = {entry, block};
    held += __popc(they);
}

// The C best without the scan's list (exact.cuh): all entries from the C-th on.
__device__ __noinline__ void estimate_alone(const Work& of, const Voters& voters, int target) {
    u64 least = target ? last_of_the_best(voters, target) : ~0ull;
    u32 first = (blockIdx.x * 8 + threadIdx.x / 32) * 32;
    estimate<false>(of, [&](int& held) {
        for (; held < ONCE && first < voters.tokens; first += gridDim.x * 256) {
            u64 entry = entry_alone(voters, first);
            bool is = entry && entry >= least;
            put(held, is, entry, is ? of.block_of(entry) : 0, of);
        }
    });
}

// Grid: (splits, BG), 256 threads. Reads the list, and of each candidate its signs, magnitudes and log
// weight (at D = 128 and 3 bits 16 + 48 + 2 bytes in 4 sectors); writes 8 + 4 GROUP bytes of each.
// operands, ups, bases, shifts: of ask.cu; products float32 [BG, row, GROUP]; levels float32
// [LEVELS]; references float32 [BG]; wanted, counted int32 [B]; counts, list, histogram: of scan.cu.
// From planes to length: what scan.cu reads, of which the C best are found where its list does not
// hold them (exact.cuh).
// kept uint64 [BG, capacity]: entries of candidates and of the edge, in any order, the first
// many int32 [BG] APART; estimates float32 [BG, capacity, GROUP]: theirs; buckets uint64 [BG, GROUP,
// BUCKETS]: sums over candidates above the edge; edge uint64 [BG, EDGE]: its entries, and
// edge_estimates float32 [BG, EDGE, GROUP]: theirs; edges int32 [BG] APART; cuts int32 [BG, 2]: the bin of
// the cut and how many are above it, −1 and 0 where all that is kept is a candidate. Buckets, edges
// and many are cleared before. told: of scan.cu, whose `scanners` warps it counts, and of this kernel's
// blocks that are done (common.cuh).
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, const uint2* operands,
       const float* ups, const float* products, const float* given_levels, const float* references,
       const int* wanted, const int* counted, const int* bases, const int* shifts,
       const int* counts, const u64* list, const int* histogram, u64* kept, int* many,
       float* estimates, u64* buckets, u64* edge, float* edge_estimates, int* edges, int2* cuts,
       const u32* planes, const int* sums_of_planes, const void* queries, const float* units,
       const int* factors, const u32* valid, const i64* length, int* told, i64 scanners, i64 capacity,
       i64 kv_heads, float scale, float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint2 asked[OPERANDS];
    __shared__ Held queues[8][QUEUE];
    u32 bg = blockIdx.y, groups = gridDim.y, batch = bg / u32(kv_heads);
    int lane = threadIdx.x % 32, target = min(wanted[batch], counted[batch]);
    // a block may begin late: all reads are begun before one is waited for
    float level = threadIdx.x < LEVELS ? given_levels[threadIdx.x] : 0.0f, up[COLUMNS][2];
    uint2 parts[OPERANDS / 256];
#pragma unroll
    for (int i = 0; i < OPERANDS / 256; i++)
        parts[i] = __ldcg(operands + bg * OPERANDS + i * 256 + threadIdx.x);
    Work work = {
        table + batch * row, logs, magnitudes, bg % u32(kv_heads) * head,
        products + bg * row * GROUP, list + bg * capacity,
        kept + bg * capacity, buckets + bg * (GROUP * BUCKETS), edge + bg * EDGE,
        estimates + bg * capacity * GROUP, edge_estimates + bg * (EDGE * GROUP),
        many + bg * APART, edges + bg * APART, references[bg], scale, softcap, octaves,
    };
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; i++) {
        int h = head_of(i / 2, i % 2);
        up[i / 2][i % 2] = h < GROUP ? __ldcg(ups + bg * GROUP + h) : 1.0f;
    }
    work.are = {__ldcg(bases + bg), __ldcg(shifts + bg), -1};
    work.asked = asked;
    work.queue = queues[threadIdx.x / 32];
    let_next_begin();
    u32 teams = min(groups, u32(scanners));
    await(told + bg * APART, warps_of(bg % teams, teams, u32(scanners)));
    auto done = [&]() {
        __syncthreads();
        if (threadIdx.x == 0) tell(told + (groups + bg) * APART);
        after_previous();
    };

    // a warp's entries: of the first 32 · warps every warps-th, and so on
    int warps = gridDim.x * 8, own = blockIdx.x * 8 + threadIdx.x / 32, first = own;
    int n = counts[bg * APART];
    auto listed = [&]() {
        int at = first + lane * warps;
        return at < capacity ? work.list[at] : 0;
    };
    auto is_listed = [&]() { return first + lane * warps < n; };
    u64 entry = listed();
    auto bins = bins_of<false, 256>(histogram + bg * BINS);
    if (threadIdx.x < LEVELS) halves[threadIdx.x] = to_float16(level);
#pragma unroll
    for (int i = 0; i < OPERANDS / 256; i++) asked[i * 256 + threadIdx.x] = parts[i];
#pragma unroll
    for (int i = 0; i < COLUMNS * 2; i++) work.down[i / 2][i % 2] = 1 / up[i / 2][i % 2];
    __syncthreads();
    work.levels = levels_of(halves);
    if (n < target || n > capacity) {
        if (blockIdx.x == 0 && threadIdx.x == 0) cuts[bg] = {-1, 0};
        Voters voters = {table + batch * row, head, bg, kv_heads, planes, sums_of_planes, queries, units,
                         factors, valid + batch * row * 8, *length};
        estimate_alone(work, voters, target);
        done();
        return;
    }
    u64 block = is_listed() ? work.block_of(entry) : 0;
    Cut cut = {-1, 0};
    if (n > target) cut = cut_of(bins, target);
    work.are.bin = cut.bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) cuts[bg] = {cut.bin, cut.above};
    estimate<true>(work, [&](int& held) {
        while (held < ONCE && first < n) {
            bool is = is_listed() && work.are.side(entry) >= 0;
            if (is && first != own) block = work.block_of(entry);
            put(held, is, entry, block, work);
            first += 32 * warps;
            if (first < n) entry = listed();
        }
    });
    done();
}
