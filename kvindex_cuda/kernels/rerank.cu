// Reranking: estimates from codes of a few bits (paper, B.2.2, equation 10). One log weight of 16
// bits per key.
//
// Codes become float16 in registers, which hold the levels exactly (ops.codes.levels), and the
// matrix unit multiplies 16 candidates with 8 query heads; queries go in as a float16 and what it
// leaves, 22 bits together. Of 3 magnitude bits a byte permutation looks up four levels at once.
// Sums that all candidates enter are kept as integers, so that the order in which the scan wrote
// its list leaves no trace: the same ids from run to run.
// Limited by the latency of scattered reads, with 16 warps on a multiprocessor.
// Compile-time: D, BITS (of a magnitude), GROUP, CENTRED, SOFTCAP.
#include "shares.cuh"

constexpr int BYTES = D / 8;
constexpr int WORDS = (BYTES + 3) / 4;  // of a key's signs, and of one plane of its magnitudes
constexpr int LEVELS = 1 << BITS;
constexpr int QUEUE = 64;               // entries that a warp holds back: 31 and 32 more
constexpr int QUADS = (WORDS + 3) / 4;
constexpr int SETS = (GROUP + 7) / 8;   // of 8 query heads

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

// Of 16 entries: those of rows lane / 4 and 8 further.
struct Codes {
    u32 signs[2][QUADS], planes[2][QUADS][BITS > 0 ? BITS : 1];
    int logs[2];
    bool is[2];
    float products[2][SETS][2];  // of this lane's columns
};

// Grid: (splits, BG), 256 threads; a warp puts the candidates of its entries of the list together
// and takes 32 at a time. Reads for each its signs, magnitudes and log weight (at D = 128 and 3 bits
// 16 + 48 + 2 bytes in 4 sectors); writes 8 + 4 GROUP bytes.
// operands, ups, bases, shifts: of ask.cu; products float32 [BG, row, GROUP]; levels float32
// [LEVELS]; references float32 [BG]; wanted, counted int32 [B]; counts, list, histogram: of scan.cu.
// kept uint64 [BG, capacity]: entries of candidates and of the edge, in any order, the first
// many int32 [BG]; estimates float32 [BG, capacity, GROUP]: theirs; buckets uint64 [BG, GROUP,
// BUCKETS]: sums over candidates above the edge; edge uint64 [BG, EDGE]: its entries, and places
// int32 [BG, EDGE] in `kept`; edges int32 [BG]; cuts int32 [BG, 2]: the bin of the cut and how many
// are above it, where more than C are listed. Buckets, edges and many are cleared before.
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, const uint4* operands,
       const float* ups, const float* products, const float* given_levels, const float* references,
       const int* wanted, const int* counted, const int* bases, const int* shifts,
       const int* counts, const u64* list, const int* histogram, u64* kept, int* many,
       float* estimates, u64* buckets, u64* edge, int* places, int* edges, int2* cuts,
       i64 capacity, i64 kv_heads, float scale, float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint4 asked[SETS * QUADS * 256];
    __shared__ u64 queues[8][QUEUE];
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int lane = threadIdx.x % 32, t = lane % 4, step = gridDim.x * 256, held = 0;
    int start = (blockIdx.x * 8 + threadIdx.x / 32) * 32;
    u64* queue = queues[threadIdx.x / 32];
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(given_levels[i]);
    for (int i = threadIdx.x; i < SETS * QUADS * 256; i += 256)
        asked[i] = __ldcg(operands + bg * (SETS * QUADS * 256) + i);
    table += batch * row;
    products += bg * row * GROUP;
    list += bg * capacity;
    kept += bg * capacity;
    estimates += bg * capacity * GROUP;
    buckets += bg * GROUP * BUCKETS;
    float reference = references[bg], down[SETS][2];
#pragma unroll
    for (int i = 0; i < SETS * 2; i++)
        down[i / 2][i % 2] = 1 / __ldcg(ups + bg * SETS * 8 + i / 2 * 8 + 2 * t + i % 2);
    int target = min(wanted[batch], counted[batch]);
    Candidates are = {__ldcg(bases + bg), __ldcg(shifts + bg), -1};
    __syncthreads();
    Levels levels = {{0, 0}, {0, 0}, halves};
    if (BITS == 3)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            levels.low[i / 4] |= u32(halves[i % LEVELS] & 255) << (i % 4 * 8);
            levels.high[i / 4] |= u32(halves[i % LEVELS] >> 8) << (i % 4 * 8);
        }
    after_previous();
    let_next_begin();
    int n = counts[bg];
    auto entry_at = [&](int first) { return first + lane < capacity ? list[first + lane] : 0; };
    u64 entry = entry_at(start);
    if (n > target) {
        Cut cut = cut_of(histogram + bg * BINS, target);
        are.bin = cut.bin;
        if (blockIdx.x == 0 && threadIdx.x == 0) cuts[bg] = {cut.bin, cut.above};
    }
    Exponentials sums[SETS][2];

    // the first 32 of the queue, or what there is
    auto work = [&]() {
        __syncwarp();
        int count = min(held, 32), base = lane == 0 ? atomicAdd(many + bg, count) : 0;
        u64 mine = lane < count ? queue[lane] : 0;
        int id = lane < count ? id_of(mine) : -1;
        u64 block = id >= 0 ? u64(table[id / TOKENS]) + bg % kv_heads * head : 0;
        Codes codes[2];
#pragma unroll
        for (int pair = 0; pair < 2; pair++)  // of 16
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int from = pair * 16 + half * 8 + lane / 4;
                const char* at = reinterpret_cast<const char*>(__shfl_sync(ALL, block, from));
                int its = __shfl_sync(ALL, id, from), key = its % TOKENS;
                const u32* signs = reinterpret_cast<const u32*>(at) + key * WORDS;
                const u32* planes = reinterpret_cast<const u32*>(at + magnitudes) + key * (BITS * WORDS);
                codes[pair].is[half] = its >= 0;
#pragma unroll
                for (int quad = 0; quad < QUADS; quad++) {
                    int w = quad * 4 + t;
                    bool has = its >= 0 && w < WORDS;
                    codes[pair].signs[half][quad] = has ? __ldg(signs + w) : 0;
                    codes[pair].planes[half][quad][0] = 0;
#pragma unroll
                    for (int p = 0; p < BITS; p++)
                        codes[pair].planes[half][quad][p] = has ? __ldg(planes + p * WORDS + w) : 0;
                }
                codes[pair].logs[half] = its >= 0 ? reinterpret_cast<const u16*>(at + logs)[key] : 0;
#pragma unroll
                for (int i = 0; i < SETS * 2; i++) {
                    int h = i / 2 * 8 + 2 * t + i % 2;
                    bool has = CENTRED && its >= 0 && h < GROUP;
                    codes[pair].products[half][i / 2][i % 2] =
                        has ? products[i64(its / TOKENS) * GROUP + h] : 0.0f;
                }
            }
        base = __shfl_sync(ALL, base, 0);
        bool on_edge = id >= 0 && are.side(mine) == 0;
        u32 edge_of_them = __ballot_sync(ALL, on_edge);
        if (id >= 0) kept[base + lane] = mine;
        if (on_edge) {
            int slot = atomicAdd(edges + bg, 1);
            if (slot < EDGE) edge[bg * EDGE + slot] = mine, places[bg * EDGE + slot] = base + lane;
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const Codes& of = codes[pair];
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                float c[4] = {0, 0, 0, 0};
#pragma unroll
                for (int quad = 0; quad < QUADS; quad++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        u32 upper[2], lower[2];
                        uint4 b = asked[((set * QUADS + quad) * 8 + i) * 32 + lane];
                        decode(upper, of.signs[0][quad], of.planes[0][quad], i / 2, i % 2, levels);
                        decode(lower, of.signs[1][quad], of.planes[1][quad], i / 2, i % 2, levels);
                        mma_halves(c, upper[0], lower[0], upper[1], lower[1], b.x, b.y);
                        mma_halves(c, upper[0], lower[0], upper[1], lower[1], b.z, b.w);
                    }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int log = of.logs[half], from = pair * 16 + half * 8 + lane / 4;
                    float weight = log ? exp2f(float(log - 65535) * (octaves / 65536)) * reference : 0.0f;
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        int h = set * 8 + 2 * t + side;
                        if (h >= GROUP || !of.is[half]) continue;
                        float found = c[2 * half + side] * down[set][side] * weight;
                        if (CENTRED) found += of.products[half][set][side];
                        estimates[i64(base + from) * GROUP + h] = found;
                        if (edge_of_them >> from & 1) continue;
                        sums[set][side].add(buckets + h * BUCKETS, capped(found, scale, softcap));
                    }
                }
            }
        }
        u64 rest = held > 32 && lane < held - 32 ? queue[32 + lane] : 0;
        __syncwarp();
        if (held > 32 && lane < held - 32) queue[lane] = rest;
        held = max(held - 32, 0);
    };
    while (start < n || held > 0) {
        if (held >= 32 || start >= n) {
            work();
            continue;
        }
        bool wanted_here = start + lane < n && are.side(entry) >= 0;
        u32 all = __ballot_sync(ALL, wanted_here);
        if (wanted_here) queue[held + __popc(all & ((1u << lane) - 1))] = entry;
        held += __popc(all);
        start += step;
        entry = entry_at(start);
    }
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++)
            sums[set][side].flush(buckets + (set * 8 + 2 * t + side) * BUCKETS);
}
