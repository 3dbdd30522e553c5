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
constexpr int QUEUE = 64;               // candidates that a warp holds back: 31 and 32 more
constexpr int BELOW = 28;               // bits of a bucket below its first octave: 2^19 addends fit
constexpr float LOG2E = 1.4426950408889634f;

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

__device__ __forceinline__ float capped(float estimate, float scale, float softcap) {
    float logit = estimate * scale;
#if SOFTCAP
    logit = softcap * tanhf(logit / softcap);
#endif
    return logit;
}

// Sums of exponentials as integers, one for every 16 octaves: a lane holds those of the last even
// and the last odd bucket that it met, the others are in memory.
struct Exponentials {
    int even = -1, odd = -1;  // buckets
    u64 even_sum = 0, odd_sum = 0;

    __device__ __forceinline__ void add(u64* memory, float logit) {
        float x = fminf(fmaxf(logit * LOG2E, -2040.0f), 2040.0f);
        int octaves = int(floorf(x * 0.0625f)), bucket = octaves + BUCKETS / 2;
        u64 value = u64(exp2f(x - 16.0f * octaves) * float(1 << BELOW));
        bool is_odd = bucket & 1;
        int held = is_odd ? odd : even;
        u64 sum = is_odd ? odd_sum : even_sum;
        if (held != bucket) {
            if (held >= 0) atomicAdd(memory + held, sum);
            sum = 0;
        }
        sum += value;
        odd = is_odd ? bucket : odd, even = is_odd ? even : bucket;
        odd_sum = is_odd ? sum : odd_sum, even_sum = is_odd ? even_sum : sum;
    }

    __device__ __forceinline__ void write(u64* memory) {
        if (even >= 0) atomicAdd(memory + even, even_sum);
        if (odd >= 0) atomicAdd(memory + odd, odd_sum);
    }

    // All lanes call it: those of a column (lane % 4) add up what they have of their top bucket.
    __device__ __forceinline__ void flush(u64* memory) {
        flush(memory, even, even_sum);
        flush(memory, odd, odd_sum);
    }
    static __device__ __forceinline__ void flush(u64* memory, int bucket, u64 sum) {
        int top = bucket;
        for (int step = 4; step < 32; step *= 2) top = max(top, __shfl_xor_sync(ALL, top, step));
        if (bucket != top) {
            if (bucket >= 0) atomicAdd(memory + bucket, sum);
            sum = 0;
        }
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
        if (threadIdx.x % 32 < 4 && top >= 0) atomicAdd(memory + top, sum);
    }
};

// Of 16 entries: those of rows lane / 4 and 8 further.
struct Codes {
    u32 signs[2][QUADS], planes[2][QUADS][BITS > 0 ? BITS : 1];
    int places[2], logs[2];
    bool is[2];
    float products[2][SETS][2];  // of this lane's columns
};

// What of the list are candidates: the C best. They lie in bins above that of the cut; those of the
// cut's own bin, the edge, are told apart by their words once all are known.
struct Candidates {
    int base, shift, bin;
    __device__ __forceinline__ int side(u64 entry) const {  // 1 in, 0 edge, −1 out
        int mine = bin_of(vote_of(entry), base, shift);
        return (mine > bin) - (mine < bin);
    }
};

// Grid: (splits, BG), 256 threads; a warp puts the candidates of its entries of the list together
// and takes 32 at a time. Reads for each its signs, magnitudes and log weight (at D = 128 and 3 bits
// 16 + 48 + 2 bytes in 4 sectors); writes 4 GROUP bytes.
// operands, ups, bases, shifts: of ask.cu; products float32 [BG, row, GROUP]; levels float32
// [LEVELS]; references float32 [BG]; wanted, counted int32 [B]; counts, list, histogram: of scan.cu.
// estimates float32 [BG, capacity, GROUP]: only of candidates and the edge; buckets uint64 [BG,
// GROUP, BUCKETS]: sums over candidates above the edge; edge uint64 [BG, EDGE]: its entries, and
// places int32 [BG, EDGE] in the list; edges int32 [BG]; cuts int32 [BG, 2]: the bin of the cut and
// how many are above it, where more than C are listed. Buckets and edges are cleared before.
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank(const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, const uint4* operands,
       const float* ups, const float* products, const float* given_levels, const float* references,
       const int* wanted, const int* counted, const int* bases, const int* shifts,
       const int* counts, const u64* list, const int* histogram, float* estimates, u64* buckets,
       u64* edge, int* places, int* edges, int2* cuts, i64 capacity, i64 kv_heads, float scale,
       float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint4 asked[SETS * QUADS * 256];
    __shared__ int2 queues[8][QUEUE];  // ids, and places in the list: ~place of the edge
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int lane = threadIdx.x % 32, t = lane % 4, step = gridDim.x * 256, held = 0;
    int start = (blockIdx.x * 8 + threadIdx.x / 32) * 32;
    int2* queue = queues[threadIdx.x / 32];
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(given_levels[i]);
    for (int i = threadIdx.x; i < SETS * QUADS * 256; i += 256)
        asked[i] = __ldcg(operands + bg * (SETS * QUADS * 256) + i);
    table += batch * row;
    products += bg * row * GROUP;
    list += bg * capacity;
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
        int2 mine = lane < held ? queue[lane] : int2{-1, 0};
        u64 block = mine.x >= 0 ? u64(table[mine.x / TOKENS]) + bg % kv_heads * head : 0;
        Codes codes[2];
#pragma unroll
        for (int pair = 0; pair < 2; pair++)  // of 16
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int from = pair * 16 + half * 8 + lane / 4;
                const char* at = reinterpret_cast<const char*>(__shfl_sync(ALL, block, from));
                int its = __shfl_sync(ALL, mine.x, from), key = its % TOKENS;
                const u32* signs = reinterpret_cast<const u32*>(at) + key * WORDS;
                const u32* planes = reinterpret_cast<const u32*>(at + magnitudes) + key * (BITS * WORDS);
                codes[pair].places[half] = __shfl_sync(ALL, mine.y, from);
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
                    int log = of.logs[half], place = of.places[half];
                    float weight = log ? exp2f(float(log - 65535) * (octaves / 65536)) * reference : 0.0f;
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        int h = set * 8 + 2 * t + side;
                        if (h >= GROUP || !of.is[half]) continue;
                        float found = c[2 * half + side] * down[set][side] * weight;
                        if (CENTRED) found += of.products[half][set][side];
                        estimates[i64(place < 0 ? ~place : place) * GROUP + h] = found;
                        if (place < 0) continue;
                        sums[set][side].add(buckets + h * BUCKETS, capped(found, scale, softcap));
                    }
                }
            }
        }
        int2 rest = held > 32 && lane < held - 32 ? queue[32 + lane] : int2{0, 0};
        __syncwarp();
        if (held > 32 && lane < held - 32) queue[lane] = rest;
        held = max(held - 32, 0);
    };
    while (start < n || held > 0) {
        if (held >= 32 || start >= n) {
            work();
            continue;
        }
        int place = start + lane, side = place < n ? are.side(entry) : -1;
        if (side == 0) {
            int slot = atomicAdd(edges + bg, 1);
            if (slot < EDGE) edge[bg * EDGE + slot] = entry, places[bg * EDGE + slot] = place;
        }
        u32 all = __ballot_sync(ALL, side >= 0);
        if (side >= 0)
            queue[held + __popc(all & ((1u << lane) - 1))] = {id_of(entry), side ? place : ~place};
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

// A lane's part of a head's buckets.
constexpr int OWN = BUCKETS / 32;
__device__ __forceinline__ void load_sums(u64 (&sums)[OWN], const u64* buckets) {
#pragma unroll
    for (int i = 0; i < OWN; i++) sums[i] = __ldcg(buckets + threadIdx.x % 32 * OWN + i);
}

// log Σ exp of a head's buckets and of its edge, in every lane of the warp that asks: the same for
// the same candidates, whatever the order in which they came. places: in the list, of the edge's
// entries in order, the first `many` of which count; estimates: of this head, GROUP apart.
__device__ __forceinline__ float log_sum(const u64 (&mine)[OWN], const int* places, int many,
                                         const float* estimates, float scale, float softcap) {
    int lane = threadIdx.x % 32, top = -1;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (mine[i]) top = lane * OWN + i;
    float peak = NEVER;  // of the edge, in octaves
    for (int i = lane; i < many; i += 32)
        peak = fmaxf(peak, capped(estimates[i64(places[i]) * GROUP], scale, softcap) * LOG2E);
    top = warp_max(top);
    peak = warp_max(peak);
    float octaves = fmaxf(top < 0 ? NEVER : 16.0f * (top - BUCKETS / 2 + 1), peak), sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (mine[i])
            sum += float(mine[i]) * exp2f(16.0f * (lane * OWN + i - BUCKETS / 2) - BELOW - octaves);
    for (int i = lane; i < many; i += 32)
        sum += exp2f(capped(estimates[i64(places[i]) * GROUP], scale, softcap) * LOG2E - octaves);
    sum = warp_sum(sum);
    return (log2f(sum) + octaves) * (1 / LOG2E);
}

// What the group agrees on for a row, whose larger values are better: the estimate of a single head,
// else the logarithm of a share (kvindex/group.py); and its bin, −2 for what is no candidate.
struct Agreed {
    float value;
    int bin;
};
__device__ __forceinline__ Agreed agreed(const float (&estimates)[GROUP], const float* totals,
                                         float scale, float softcap) {
    float each[GROUP], best = NEVER;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        each[h] = capped(estimates[h], scale, softcap) - totals[h];
        best = fmaxf(best, each[h]);
    }
    if (GROUP == 1) return {estimates[0], bin_of(best)};
#if POLICY == 0
    float sum = 0;
#pragma unroll
    for (int h = 0; h < GROUP; h++) sum += exp2f((each[h] - best) * LOG2E);
    best += log2f(sum * (1.0f / GROUP)) * (1 / LOG2E);
#endif
    return {best, bin_of(best)};
}

__device__ __forceinline__ float from_ordered(u32 bits) {
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

constexpr int THREADS = 1024;  // of `agree`
constexpr int EACH = 4;        // entries of a thread
constexpr int WAYS = 4;        // slots of a set of the cache

// The k best. Grid: (splits, BG), THREADS threads; splits · THREADS · EACH is the list's capacity or
// more, and blocks without entries end at once. Reads 8 bytes per entry of the list and 4 GROUP per
// candidate. Every block passes on what is among the k best of its own, and the last one of a group
// finishes; a block that is alone keeps it.
// finalists uint64 [BG, capacity]; filled, tickets int32 [BG], cleared before. ids int64, scores
// float32 [BG, k]: rows and what the group agrees on, in any order, the first found int32 [BG].
// Of a cache of `cached` rows (row_cache.py; 0 for none): tags, stamps int32 [BG, cached], clocks
// int32 [BG], lookups int32 [BG, 2]; slots int32 [BG, k]: 2 slot + 1 where a row lies, 2 slot where
// it is to lie, −1 for nowhere.
extern "C" __global__ void __launch_bounds__(THREADS)
agree(const float* estimates, const u64* buckets, const int* wanted, const int* counted,
      const int* bases, const int* shifts, const int* counts, const u64* list,
      const int2* cuts, const u64* all_edge, const int* all_places, const int* all_edges,
      u64* finalists, int* filled, int* tickets, i64* ids, float* scores, int* found, int* tags,
      int* stamps, int* clocks, int* lookups, int* slots, i64 cached, i64 k, i64 capacity,
      i64 kv_heads, float scale, float softcap) {
    __shared__ float totals[GROUP];
    __shared__ __align__(8) int histogram[BINS];
    __shared__ u64 edge[EDGE];
    __shared__ int places[EDGE];
    __shared__ u64 least;
    __shared__ int edges, taken;
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int warp = threadIdx.x / 32, target = min(wanted[batch], counted[batch]);
    for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
    if (threadIdx.x == 0) edges = taken = 0, least = 0;
    Candidates are = {__ldcg(bases + bg), __ldcg(shifts + bg), -1};
    estimates += bg * capacity * GROUP;
    buckets += bg * GROUP * BUCKETS;
    list += bg * capacity;
    finalists += bg * capacity;
    ids += bg * k;
    scores += bg * k;
    after_previous();
    let_next_begin();
    int first = blockIdx.x * (THREADS * EACH) + threadIdx.x;
    // all that no other read decides on, at once; what lies beyond `n` or `many` counts for nothing
    int n = counts[bg], many = all_edges[bg];
    int2 cut_at = cuts[bg];
    u64 entries[EACH], my_edge = all_edge[bg * EDGE + threadIdx.x];
    int my_place = all_places[bg * EDGE + threadIdx.x];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        entries[i] = first + i * THREADS < capacity ? list[first + i * THREADS] : 0;
    u64 sums[BUCKETS / 32] = {};
    if (warp < GROUP) load_sums(sums, buckets + warp * BUCKETS);
    int blocks = max(1, (n + THREADS * EACH - 1) / (THREADS * EACH)), rank = target;
    if (int(blockIdx.x) >= blocks) return;
    if (n > target) are.bin = cut_at.x, rank -= cut_at.y;
    float each[EACH][GROUP];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        bool in = first + i * THREADS < n && are.side(entries[i]) >= 0;
#pragma unroll
        for (int h = 0; h < GROUP; h++)
            each[i][h] = in ? estimates[i64(first + i * THREADS) * GROUP + h] : 0.0f;
    }

    // the edge in order, its last candidate's word, and what all candidates' exponentials come to
    if (many <= EDGE) {
        static_assert(EDGE == THREADS && GROUP <= THREADS / 32, "one for each thread, one for each warp");
        int i = threadIdx.x;
        if (i < many) edge[i] = my_edge;
        __syncthreads();
        if (i < many) {
            int better = 0;
            for (int j = 0; j < many; j++) better += edge[j] > my_edge;
            places[better] = my_place;
            if (better == rank - 1) least = my_edge;
        }
        __syncthreads();
        if (warp < GROUP) {
            float total = log_sum(sums, places, min(rank, many), estimates + warp, scale, softcap);
            if (i % 32 == 0) totals[warp] = total;
        }
    } else {  // nearly all keys are equal: slowly
        u64* more = reinterpret_cast<u64*>(histogram);
        constexpr int SOME = BINS / 2 / BUCKETS;  // heads that have room in it
        auto all = [&](auto use) {
            for (int i = threadIdx.x; i < n; i += THREADS) use(list[i]);
        };
        u64 word = radix_cut(all, target, places);
        for (int from = 0; from < GROUP; from += SOME) {
            for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += THREADS)
                if (are.side(list[i]) == 0 && list[i] >= word)
                    for (int h = from; h < min(from + SOME, GROUP); h++) {
                        Exponentials one;
                        one.add(nullptr, capped(estimates[i64(i) * GROUP + h], scale, softcap));
                        one.write(more + (h - from) * BUCKETS);
                    }
            __syncthreads();
            int h = from + warp;
            if (warp < SOME && h < GROUP) {
                load_sums(sums, buckets + h * BUCKETS);
                for (int i = 0; i < BUCKETS / 32; i++)
                    sums[i] += more[warp * BUCKETS + threadIdx.x % 32 * (BUCKETS / 32) + i];
                float total = log_sum(sums, places, 0, estimates, scale, softcap);
                if (threadIdx.x % 32 == 0) totals[h] = total;
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
        if (threadIdx.x == 0) least = word;
    }
    __syncthreads();

    u64 words[EACH];  // 0: none
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int side = first + i * THREADS < n ? are.side(entries[i]) : -1;
        words[i] = 0;
        if (side > 0 || (side == 0 && entries[i] >= least)) {
            Agreed both = agreed(each[i], totals, scale, softcap);
            words[i] = u64(ordered(both.value)) << 32 | u32(entries[i]);
            atomicAdd(histogram + both.bin, 1);
        }
    }
    __syncthreads();
    Cut cut = cut_of<true, THREADS>(histogram, int(k));
    auto value_of = [](u64 word) { return from_ordered(u32(word >> 32)); };
    auto bin_in = [&](u64 word) {
        float value = value_of(word);
        return bin_of(GROUP == 1 ? capped(value, scale, softcap) - totals[0] : value);
    };
    int last_many = 0;
    if (blocks > 1) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (words[i] && bin_in(words[i]) < cut.bin) words[i] = 0;
            count += words[i] != 0;
        }
        int to = room_for<THREADS>(count, filled + bg);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (words[i]) finalists[to++] = words[i];
        for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
        if (!last_block(tickets + bg, blocks)) return;
        last_many = __ldcg(filled + bg);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = i * THREADS + threadIdx.x;
            words[i] = at < last_many ? __ldcg(finalists + at) : 0;
        }
        for (int at = threadIdx.x; at < last_many; at += THREADS)
            atomicAdd(histogram + bin_in(__ldcg(finalists + at)), 1);
        __syncthreads();
        cut = cut_of<true, THREADS>(histogram, int(k));
    }
    auto every = [&](auto use) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (words[i]) use(words[i]);
        for (int at = EACH * THREADS + threadIdx.x; at < last_many; at += THREADS)
            use(__ldcg(finalists + at));
    };
    auto keep = [&](u64 word) {
        int slot = atomicAdd(&taken, 1);
        ids[slot] = id_of(word);
        scores[slot] = value_of(word);
    };
    every([&](u64 word) {
        int bin = bin_in(word);
        if (bin > cut.bin) keep(word);
        if (bin != cut.bin) return;
        int slot = atomicAdd(&edges, 1);
        if (slot < EDGE) edge[slot] = word;
    });
    __syncthreads();
    rank = int(k) - cut.above;
    if (edges > EDGE) {
        u64 word = radix_cut(every, int(k), places);
        every([&](u64 other) {
            if (other >= word && bin_in(other) == cut.bin) keep(other);
        });
    } else {
        for (int i = threadIdx.x; i < edges; i += THREADS) {
            int better = 0;
            for (int j = 0; j < edges; j++) better += edge[j] > edge[i];
            if (better < rank) keep(edge[i]);
        }
    }
    __syncthreads();
    int rows = taken;
    if (threadIdx.x == 0) found[bg] = rows;
    if (!cached) return;

    tags += bg * cached;
    stamps += bg * cached;
    slots += bg * k;
    int now = clocks[bg] + 1, hits = 0;
    auto set_of = [&](int id) { return int(u32(id) * 2654435761u >> 12 & u32(cached / WAYS - 1)) * WAYS; };
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        int id = int(ids[i]), set = set_of(id), slot = -1;
        int4 four = *reinterpret_cast<const int4*>(tags + set);
        slot = four.x == id ? set : four.y == id ? set + 1 : four.z == id ? set + 2 : four.w == id ? set + 3 : -1;
        if (slot >= 0) stamps[slot] = now;
        hits += slot >= 0;
        slots[i] = slot >= 0 ? 2 * slot + 1 : -1;
    }
    if (hits) atomicAdd(lookups + 2 * bg + 1, hits);
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        if (slots[i] >= 0) continue;
        int id = int(ids[i]), set = set_of(id);
        for (int attempt = 0; attempt < WAYS; attempt++) {  // others may be quicker
            int way = 0, oldest = now;
            for (int w = 0; w < WAYS; w++) {
                int stamp = __ldcg(stamps + set + w);
                if (now - stamp > now - oldest) way = w, oldest = stamp;
            }
            if (oldest == now) break;  // all serve this step
            if (atomicCAS(stamps + set + way, oldest, now) != oldest) continue;
            tags[set + way] = id;
            slots[i] = 2 * (set + way);
            break;
        }
    }
    if (threadIdx.x == 0) clocks[bg] = now, lookups[2 * bg] += rows;
}
