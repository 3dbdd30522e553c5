// Reranking: estimates from codes of a few bits (paper, B.2.2, equation 10). One log weight of 16
// bits per key.
//
// Codes become float16 in registers, which hold the levels exactly (ops.codes.levels), and the
// matrix unit multiplies 16 candidates with 8 query heads; queries go in as a float16 and what it
// leaves, 22 bits together. Of 3 magnitude bits a byte permutation looks up four levels at once.
// Sums that all candidates enter are kept as integers, so that the order in which the scan wrote
// its list leaves no trace: the same ids from run to run.
// Limited by the latency of scattered reads, with 16 warps on a multiprocessor: where those of a
// warp's first 32 entries lie is asked for while the cut is found. (To ask for their codes as well,
// candidates or not, took 2 to 4 µs longer: the others' sectors come from memory, too.)
// Compile-time: D, BITS (of a magnitude), GROUP, CENTRED, SOFTCAP, and DTYPE, PLANES of votes.cuh.
#include "exact.cuh"
#include "levels.cuh"
#include "shares.cuh"

constexpr int QUEUE = 64;                // entries that a warp holds back: 31 and 32 more
constexpr int HALVES = (GROUP + 7) / 8;  // sets of 8 query heads

// Of 16 entries: those of rows lane / 4 and 8 further.
struct Codes {
    u32 signs[2][QUADS], planes[2][QUADS][BITS > 0 ? BITS : 1];
    int logs[2];
    float products[2][HALVES][2];  // of this lane's columns
};

// Grid: (splits, BG), 256 threads; a warp takes 32 entries of the list as they come, which may be
// all of its share; of the others it puts candidates together, and takes 32 at a time. Reads for each
// its signs, magnitudes and log weight (at D = 128 and 3 bits 16 + 48 + 2 bytes in 4 sectors); writes
// 8 + 4 GROUP bytes of each candidate.
// operands, ups, bases, shifts: of ask.cu; products float32 [BG, row, GROUP]; levels float32
// [LEVELS]; references float32 [BG]; wanted, counted int32 [B]; counts, list, histogram: of scan.cu;
// where the list does not hold the C best, what that one read makes them (exact.cuh).
// kept uint64 [BG, capacity]: entries of candidates and of the edge, in any order, the first
// many int32 [BG]; estimates float32 [BG, capacity, GROUP]: theirs; buckets uint64 [BG, GROUP,
// BUCKETS]: sums over candidates above the edge; edge uint64 [BG, EDGE]: its entries, and places
// int32 [BG, EDGE] in `kept`; edges int32 [BG]; cuts int32 [BG, 2]: the bin of the cut and how many
// are above it, −1 and 0 where all that is kept is a candidate. Buckets, edges and many are cleared before.
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, const uint4* operands,
       const float* ups, const float* products, const float* given_levels, const float* references,
       const int* wanted, const int* counted, const int* bases, const int* shifts,
       const int* counts, const u64* list, const int* histogram, u64* kept, int* many,
       float* estimates, u64* buckets, u64* edge, int* places, int* edges, int2* cuts,
       const u32* planes, const int* sums_of_planes, const void* queries, const float* units,
       const int* factors, const u32* valid, const i64* length, i64 capacity, i64 kv_heads,
       float scale, float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint4 asked[HALVES * QUADS * 256];
    __shared__ u64 queues[8][QUEUE];
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int lane = threadIdx.x % 32, t = lane % 4, step = gridDim.x * 256, held = 0;
    int start = (blockIdx.x * 8 + threadIdx.x / 32) * 32;
    u64* queue = queues[threadIdx.x / 32];
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(given_levels[i]);
    for (int i = threadIdx.x; i < HALVES * QUADS * 256; i += 256)
        asked[i] = __ldcg(operands + bg * (HALVES * QUADS * 256) + i);
    table += batch * row;
    products += bg * row * GROUP;
    list += bg * capacity;
    kept += bg * capacity;
    estimates += bg * capacity * GROUP;
    buckets += bg * GROUP * BUCKETS;
    float reference = references[bg], down[HALVES][2];
#pragma unroll
    for (int i = 0; i < HALVES * 2; i++)
        down[i / 2][i % 2] = 1 / __ldcg(ups + bg * HALVES * 8 + i / 2 * 8 + 2 * t + i % 2);
    int target = min(wanted[batch], counted[batch]);
    Candidates are = {__ldcg(bases + bg), __ldcg(shifts + bg), -1};
    __syncthreads();
    Levels levels = levels_of(halves);
    after_previous();
    let_next_begin();
    int n = counts[bg], first = start;
    auto listed = [&](int i) { return i + lane < capacity ? list[i + lane] : 0; };
    u64 mine = listed(start), entry = listed(start += step), least = 0;
    bool good = n >= target && n <= capacity, is = good && first + lane < n;
    auto voters = [&]() {
        return Voters{table, head, bg, kv_heads, planes, sums_of_planes, queries, units, factors,
                      valid + batch * row * 8, *length};
    };
    if (!good) {
        least = target ? last_of_the_best(voters(), target) : ~0ull;
        n = int(*length), start = first;
    }
    Exponentials sums[HALVES][2];

    // a list that is one batch for each warp is taken as it lies; of a longer one, and where there is
    // none, a warp puts candidates together
    bool several = !good || n > step;
    int id = is ? id_of(mine) : -1;
    u64 block = is ? u64(table[id / TOKENS]) : 0;  // on its way while the cut is found
    Cut cut = {-1, 0};
    if (good && n > target) cut = cut_of(histogram + bg * BINS, target);
    are.bin = cut.bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) cuts[bg] = good ? int2{cut.bin, cut.above} : int2{-1, 0};
    is = is && are.side(mine) >= 0;
    if (several) {
        u32 they = __ballot_sync(ALL, is);
        if (is) queue[__popc(they & ((1u << lane) - 1))] = mine;
        held = __popc(they);
    }
    for (bool begins = true;; begins = false) {
        if (!begins || several) {
            while (held < 32 && start < n) {
                if (!good) entry = entry_alone(voters(), u32(start));
                bool wanted_here = good ? start + lane < n && are.side(entry) >= 0 : entry >= least && entry;
                u32 they = __ballot_sync(ALL, wanted_here);
                if (wanted_here) queue[held + __popc(they & ((1u << lane) - 1))] = entry;
                held += __popc(they);
                start += step;
                entry = listed(start);
            }
            if (held == 0) break;
            __syncwarp();
            is = lane < held;
            mine = queue[lane];
            u64 rest = queue[32 + lane];
            __syncwarp();
            queue[lane] = rest;
            __syncwarp();
            held = max(held - 32, 0);
            block = is ? u64(table[id_of(mine) / TOKENS]) : 0;
        }
        id = is ? id_of(mine) : -1;
        block = is ? block + bg % kv_heads * head : 0;
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
                for (int i = 0; i < HALVES * 2; i++) {
                    int h = i / 2 * 8 + 2 * t + i % 2;
                    bool has = CENTRED && its >= 0 && h < GROUP;
                    codes[pair].products[half][i / 2][i % 2] =
                        has ? products[i64(its / TOKENS) * GROUP + h] : 0.0f;
                }
            }
        u32 all = __ballot_sync(ALL, is);  // whose places follow each other
        auto place = [&](int of) { return __popc(all & ((1u << of) - 1)); };
        int base = lane == 0 && all ? atomicAdd(many + bg, __popc(all)) : 0;
        base = __shfl_sync(ALL, base, 0);
        bool on_edge = is && are.side(mine) == 0;
        u32 edge_of_them = __ballot_sync(ALL, on_edge);
        if (is) kept[base + place(lane)] = mine;
        if (on_edge) {
            int slot = atomicAdd(edges + bg, 1);
            if (slot < EDGE) edge[bg * EDGE + slot] = mine, places[bg * EDGE + slot] = base + place(lane);
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const Codes& of = codes[pair];
#pragma unroll
            for (int set = 0; set < HALVES; set++) {
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
                        if (h >= GROUP || !(all >> from & 1)) continue;
                        float found = c[2 * half + side] * down[set][side] * weight;
                        if (CENTRED) found += of.products[half][set][side];
                        estimates[i64(base + place(from)) * GROUP + h] = found;
                        if (edge_of_them >> from & 1) continue;
                        sums[set][side].add(buckets + h * BUCKETS, capped(found, scale, softcap));
                    }
                }
            }
        }
    }
#pragma unroll
    for (int set = 0; set < HALVES; set++)
#pragma unroll
        for (int side = 0; side < 2; side++)
            sums[set][side].flush(buckets + (set * 8 + 2 * t + side) * BUCKETS);
}
