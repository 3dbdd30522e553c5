// Attention over the rows selected, read where they lie, the sink and the window (paper, B.3).
//
// Rows are read in host memory over unified addresses, or on the device. A row is a token's key and
// value side by side, as they are or as codes (kvindex/storage/codecs.py); its chunks of 8 elements go to the
// lanes of a warp in order, so that one load of each lane is a whole row of 512 bytes (D = Dv = 128,
// 2-byte type), or 256 bytes of codes and a scale for each lane, 264 in all.
// Grid: (splits, BG PARTS), 256 threads. A warp attends to its resident rows while the selection still goes
// on, then to its selected rows, one ahead; the last split of a group merges.
// Where groups are few, each has PARTS blocks for each split, of GROUP heads, and each of them reads its rows, which
// are in L2 for all but the first of them, or come over PCIe again; the first one alone has rows kept in the cache.
// Reads the rows once for all query heads of a part; writes 4 (DV + 2) bytes per head and split.
// Dynamic shared memory: 32 AT_ONCE PARTIAL bytes.
// Longer than most files: it is one kernel, with what reads a row of each codec.
// Codes are of what a key differs from a center by, the same for all of a KV head's: a product with it joins the
// logits of such rows, once it is known.
// Compile-time: D, DV, GROUP (query heads of a part), PARTS (of a KV head's), DTYPE, SOFTCAP, CODEC (of the rows
// selected: 0 plain, 1 int8, 2 fp8),
// GIVEN (0; 1 where the rows are those of a caller's hits: ids below 0 are none, weights on logits; 2 where rows
// were drawn: a weight for all heads), NEAR (whether some blocks of rows are on the device, others on the host:
// the cache keeps rows of the latter; a byte more is read of a row that it lacks, while that row is on its way), PAGED
// (whether sink and window lie in the pages of `rows`, behind the tokens that are searched: a row of the batch has
// `resident_count` of them, of which the first `sink` are the sequence's first, if any token is searched; 2 where
// those pages are on the host: then resident rows are cached, too, a KV head's cache is that of all sequences, and a
// row's name in it is its slot; two sequences that ask for one slot at once may both fetch it, and keep it twice),
// RAGGED (each row of the batch has a count of resident rows, as it always has if PAGED).
#include "common/row_cache.cuh"
#include "common/row_codes.cuh"

constexpr int CHUNKS = ((D + DV) / 8 + 31) / 32;  // per lane
constexpr int KEYS = (D / 8) / 32;                // of them, how many are parts of keys in all lanes
constexpr int PARTIAL = DV + 2;                   // of a split: maximum, sum, output
constexpr bool SLOTS = PAGED == 2;
static_assert(!SLOTS || GIVEN != 1, "ids are those of tokens");
static_assert(!SLOTS || PARTS == 1, "their clock is not told how many parts have read it");
constexpr int AT_ONCE = GROUP < HEADS_AT_ONCE ? GROUP : HEADS_AT_ONCE;  // heads whose warps are merged together
static_assert(DV % 2 == 0, "sums are merged in pairs");

struct Running {
    float peak[GROUP], total[GROUP], sum[CHUNKS - KEYS][GROUP][8];
};

// A row as it lies: 8 elements in each chunk of a lane, or 8 codes and a scale; what a head's logit
// gains, in the lane of its number; the slot of the cache where it is to be kept, or one of those
// below; and of a row that is CACHED the stamp that was there before, in lane 0.
constexpr int NOWHERE = -1, CACHED = -2, MISSING = -3;
struct Raw {
    uint4 words[CHUNKS][DTYPE == 0 ? 2 : 1];
    float weight;
    int slot, before;
};
__device__ __forceinline__ void write_row(const Raw& raw, char* place) {
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int chunk = threadIdx.x % 32 + 32 * j;
        if (CODEC && chunk < (D + DV) / 8) {
            uint4 word = raw.words[j][0];
            reinterpret_cast<uint2*>(place)[chunk] = {word.x, word.y};
            if (chunk % (D / 8) == 0 && chunk <= D / 8)
                reinterpret_cast<u32*>(place + D + DV)[chunk > 0] = word.z;
            continue;
        }
#pragma unroll
        for (int i = 0; i < (DTYPE == 0 ? 2 : 1); i++)
            if (chunk < (D + DV) / 8)
                reinterpret_cast<uint4*>(place)[chunk * (DTYPE == 0 ? 2 : 1) + i] = raw.words[j][i];
    }
}
// coded: whether it is codes, then two scales.
__device__ __forceinline__ void load(Raw& raw, const char* row, bool coded) {
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int chunk = threadIdx.x % 32 + 32 * j;
#pragma unroll
        for (int i = 0; i < (DTYPE == 0 ? 2 : 1); i++) {
            raw.words[j][i] = {0, 0, 0, 0};
            if (chunk >= (D + DV) / 8) continue;
            if (coded && i == 0) {
                uint2 codes = reinterpret_cast<const uint2*>(row)[chunk];
                u32 scale = reinterpret_cast<const u32*>(row + D + DV)[chunk >= D / 8];
                raw.words[j][0] = {codes.x, codes.y, scale, 0};
            } else if (!coded)
                raw.words[j][i] = reinterpret_cast<const uint4*>(row)[chunk * (DTYPE == 0 ? 2 : 1) + i];
        }
    }
}
__device__ __forceinline__ void unpack(float (&x)[8], const uint4 (&words)[DTYPE == 0 ? 2 : 1],
                                       bool coded) {
    const u32* word = &words[0].x;
    if (coded) {
        float scale = __uint_as_float(word[2]) * CODED;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float four[4];
            from_codes(four, word[half]);
#pragma unroll
            for (int i = 0; i < 4; i++) x[4 * half + i] = four[i] * scale;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#if DTYPE == 0
        x[i] = __uint_as_float(word[i]);
#elif DTYPE == 1
        x[i] = from_float16(u16(word[i / 2] >> (i % 2 * 16)));
#else
        x[i] = from_bfloat16(u16(word[i / 2] >> (i % 2 * 16)));
#endif
    }
}

// One row joins the softmax of all heads of the group. queries float4 [2, GROUP, D / 8]:
// the lower and the upper four of every eight coordinates. centered [GROUP]: what logits of
// such rows gain before they are scaled.
__device__ __forceinline__ void add_row(Running& run, const Raw& raw, bool coded, const float4* queries,
                                        const float* centered, float scale, float softcap) {
    int lane = threadIdx.x % 32;
    float logit[GROUP] = {}, x[CHUNKS][8];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int chunk = lane + 32 * j;
        unpack(x[j], raw.words[j], coded);
        if (chunk < D / 8) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    float4 q = queries[(half * GROUP + h) * (D / 8) + chunk];
                    const float* y = x[j] + 4 * half;
                    logit[h] += y[0] * q.x + y[1] * q.y + y[2] * q.z + y[3] * q.w;
                }
        }
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float s = warp_sum(logit[h]);
#if CODEC
        s += centered[h];
#endif
        s *= scale;
#if SOFTCAP
        s = softcap * tanhf(s / softcap);
#endif
#if GIVEN
        s += __shfl_sync(ALL, raw.weight, h);
        if (s == NEVER) continue;  // hidden from this head
#endif
        if (s > run.peak[h]) {
            float shrink = expf(run.peak[h] - s);
            run.peak[h] = s;
            run.total[h] *= shrink;
#pragma unroll
            for (int j = KEYS; j < CHUNKS; j++)
#pragma unroll
                for (int e = 0; e < 8; e++) run.sum[j - KEYS][h][e] *= shrink;
        }
        float p = expf(s - run.peak[h]);
        run.total[h] += p;
#pragma unroll
        for (int j = KEYS; j < CHUNKS; j++)
#pragma unroll
            for (int e = 0; e < 8; e++) run.sum[j - KEYS][h][e] += p * x[j][e];
    }
}

// The softmax of a block's warps as one, some heads at a time, each on the scale of them all. merged float32
// [8, AT_ONCE, PARTIAL] and peaks float32 [GROUP, 8] in shared memory; partial float32 [GROUP, PARTIAL]: where
// it is written, if it is `wanted`. All threads call it.
__device__ __forceinline__ void merge_warps(const Running& run, float* merged, float (&peaks)[GROUP][8],
                                            float* partial, bool wanted) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0)
#pragma unroll
        for (int h = 0; h < GROUP; h++) peaks[h][warp] = run.peak[h];
    __syncthreads();
#pragma unroll
    for (int from = 0; from < GROUP; from += AT_ONCE) {
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            int h = from + e;
            if (h >= GROUP) continue;
            float* mine = merged + (warp * AT_ONCE + e) * PARTIAL;
            float peak = NEVER;
#pragma unroll
            for (int w = 0; w < 8; w++) peak = fmaxf(peak, peaks[h][w]);
            float shrink = run.peak[h] > NEVER ? expf(run.peak[h] - peak) : 0.0f;
            if (lane == 0) mine[0] = peak, mine[1] = run.total[h] * shrink;
#pragma unroll
            for (int j = KEYS; j < CHUNKS; j++) {
                int chunk = lane + 32 * j - D / 8;
                if (chunk >= 0 && chunk < DV / 8)
                    for (int i = 0; i < 8; i++)
                        mine[2 + chunk * 8 + i] = run.sum[j - KEYS][h][i] * shrink;
            }
        }
        __syncthreads();
        auto merge = [&](int e, int pair) {  // pair 0: maximum and sum
            if (from + e >= GROUP) return;
            float2 sum = {0, 0};
#pragma unroll
            for (int w = 0; w < 8; w++) {
                float2 part = reinterpret_cast<const float2*>(merged + (w * AT_ONCE + e) * PARTIAL)[pair];
                sum = {pair ? sum.x + part.x : part.x, sum.y + part.y};
            }
            if (wanted) reinterpret_cast<float2*>(partial + (from + e) * PARTIAL)[pair] = sum;
        };
        for (int at = threadIdx.x; at < AT_ONCE * (DV / 2); at += 256) merge(at / (DV / 2), at % (DV / 2) + 1);
        if (warp == 7 && lane < AT_ONCE) merge(lane, 0);
        if (from + AT_ONCE < GROUP) __syncthreads();
    }
}

struct Arguments {
    const void* queries;        // DTYPE [BG PARTS, GROUP, D]
    const i64* ids;             // [BG, k]: rows selected
    const int* found;           // [BG]: how many
    const i64* rows;            // [B, row]: addresses of blocks of TOKENS rows, of KV head g at g · head_bytes
    const void* resident;       // DTYPE [BG, room, D + DV]
    const u8* resident_mask;    // [B, room]
    const i64* resident_count;  // [1], or RAGGED: [B]: how many of them are there
    const i64* length;          // [B]: tokens that are searched; only if PAGED
    const int* segments;        // [B, row]: numbers of blocks among all pages; only if PAGED is 2
    char* cache;                // [BG, cached, row_bytes]: of `cached` rows as they are stored (row_cache.py; 0 for none);
                                // if PAGED is 2, this and the next two are of KV heads, and clocks [1], of this step
    int* tags;                  // [BG, cached], aligned to 16 bytes
    int* stamps;                // [BG, cached], likewise
    int* clocks;                // [BG]: steps so far; of this one stamps are twice as many, or one more
    int* lookups;               // [BG, 2]: rows looked up, and found
    const float* weights;       // [BG PARTS, GROUP, k]: added to the logits (−inf hides a row from a head), or null for
                                // zeros; only if GIVEN; where that is 2, [BG, k]
    float* partial;             // [BG PARTS, splits, GROUP, PARTIAL]
    void* output;               // DTYPE [BG PARTS, GROUP, DV]
    float* lse;                 // [BG PARTS, GROUP]: log Σ exp of the logits, −inf where no row is visible
    int* tickets;               // [BG PARTS] APART, 0 before and after
    int* ends;                  // [BG] APART, likewise: how many parts are done, only if PARTS > 1
    const int* signals;         // that a group's rows are selected (common.cuh)
    i64 row, head_bytes, row_bytes, room, cached, sink;
    i64 signaled;               // 1 where select_rows.cu comes right before, else 0
    i64 k, kv_heads;
    float scale, softcap;
    const u8* near;             // [B, row]: whether a block is on the device; only if NEAR
    const float* center;        // [BG, D]: that coded rows are codes from, or null for zeros; only if CODEC
};

extern "C" __global__ void __launch_bounds__(256, GROUP * (CHUNKS - KEYS) <= 8 ? 2 : 1)
attend(const __grid_constant__ Arguments args) {
    char* cache = args.cache;
    int* tags = args.tags;
    int* stamps = args.stamps;
    float* partial = args.partial;
    DYNAMIC_SHARED(memory);
    float* merged = reinterpret_cast<float*>(memory);  // [8][AT_ONCE][PARTIAL]
    __shared__ float4 queries[2 * GROUP * (D / 8)];
    __shared__ float weights[MOST_SPLITS * GROUP];
    __shared__ __align__(16) float peaks[GROUP][8];
    __shared__ int looked_up[2];  // rows that the cache lacked, and had
    constexpr int SIZE = DTYPE == 0 ? 4 : 2;
    i64 part = blockIdx.y, bg = part / PARTS, batch = bg / args.kv_heads;
    int splits = gridDim.x, split = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int own = split * 8 + warp, step = splits * 8, now = 0;
    i64 k = args.k, kv_heads = args.kv_heads;
    i64 held = SLOTS ? bg % kv_heads : bg;  // whose cache
    cache += held * args.cached * args.row_bytes, tags += held * args.cached, stamps += held * args.cached;
    if (threadIdx.x < 2) looked_up[threadIdx.x] = 0;
    Running run;
#pragma unroll
    for (int h = 0; h < GROUP; h++) run.peak[h] = NEVER, run.total[h] = 0;
#pragma unroll
    for (int i = 0; i < (CHUNKS - KEYS) * GROUP * 8; i++) (&run.sum[0][0][0])[i] = 0;
    for (int i = threadIdx.x; i < D * GROUP; i += 256) {
        int h = i / D, j = i % D;
        float* to = reinterpret_cast<float*>(queries + (j / 4 % 2 * GROUP + h) * (D / 8) + j / 8);
        to[j % 4] = element(args.queries, (part * GROUP + h) * D + j);
    }
    const float* centered = nullptr;
#if CODEC
    __shared__ float products[2][GROUP];  // with the center, of rows as they are and of coded ones
    centered = products[0];
#pragma unroll 1
    for (int h = warp; h < GROUP; h += 8) {
        const float* center = args.center + bg * D;
        float sum = 0;
#pragma unroll 1
        for (int j = lane; j < D && args.center; j += 32) sum += element(args.queries, (part * GROUP + h) * D + j) * center[j];
        sum = warp_sum(sum);
        if (lane == 0) products[0][h] = 0, products[1][h] = sum;
    }
#endif
    __syncthreads();

    partial += part * splits * GROUP * PARTIAL;
#if PAGED
    int later = int(args.length[batch]), sinks = later ? int(args.sink) : 0;  // first rows, and how far others are
    later -= sinks;
#endif
    // resident rows, while the others are still being selected; then those
#pragma unroll 1
    for (int phase = 0; phase < 2; phase++) {
        if (phase) {
            if (args.signaled)
                await(args.signals + (2 * (gridDim.y / PARTS) + bg) * APART, int(args.signaled));
            else
                after_previous();
            let_next_begin();
        }
        // what does not wait for their number: the first, and which ones the next are
        auto selected = [&](int i) {
#if PAGED == 2
            if (!phase) return i < sinks ? i : later + i;
#endif
            return phase && i < k ? int(args.ids[bg * k + i]) : 0;
        };
        auto name_of = [&](int id) {  // in the cache; beyond the rows that were found an id is anything
            if (!SLOTS) return id;
            u32 segment = min(u32(id) / TOKENS, u32(args.row) - 1);
            return args.segments[batch * args.row + segment] * TOKENS + int(u32(id) % TOKENS);
        };
        bool caches = args.cached && (phase || SLOTS);
        auto tag_of = [&](int id) { return caches ? ::tag_of(name_of(id), tags, args.cached) : 0; };
        int first = selected(own), second = selected(own + step);
        int third = selected(own + 2 * step), fourth = selected(own + 3 * step);
        int rows_here = phase ? args.found[bg] : int(__ldcg(args.resident_count + RAGGED * batch));
        if (caches) now = now_of(SLOTS ? __ldcg(args.clocks) : __ldcg(args.clocks + bg) + 1);
        int first_tag = tag_of(first), second_tag = tag_of(second), third_tag = tag_of(third);
        auto stored = [&](int id) {
            return reinterpret_cast<const char*>(args.rows[batch * args.row + id / TOKENS]) +
                   bg % kv_heads * args.head_bytes + id % TOKENS * args.row_bytes;
        };
#if PAGED
        auto resident = [&](int i) { return stored(i < sinks ? i : later + i); };
#else
        auto resident = [&](int i) {
            return static_cast<const char*>(args.resident) + (bg * args.room + i) * i64((D + DV) * SIZE);
        };
#endif
        auto kept = [&](int id) { return args.cached && !(NEAR && args.near[batch * args.row + id / TOKENS]); };
        auto begin = [&](Raw& raw, int i, int id, int tag) {
            if (i >= rows_here) return;
            const char* from = nullptr;
            raw.slot = NOWHERE;
            raw.weight = 0;
            if (!phase && !SLOTS) from = resident(i);
            else {
#if GIVEN == 2
                if (phase) raw.weight = args.weights[bg * k + i];
#elif GIVEN
                if (id < 0) {
                    raw = Raw{};
                    raw.slot = NOWHERE;
                    raw.weight = NEVER;
                    return;
                }
                if (args.weights && lane < GROUP) raw.weight = args.weights[(part * GROUP + lane) * k + i];
#endif
                int slot = args.cached ? slot_of(name_of(id), tag, args.cached) : NOWHERE;
                if (slot >= 0) {
                    if (lane == 0) raw.before = use_slot<(PARTS > 1 || SLOTS)>(stamps + slot, now);
                    from = cache + slot * args.row_bytes;
                    raw.slot = CACHED;
                } else {
                    from = stored(id);
                    if (part % PARTS == 0 && kept(id)) raw.slot = MISSING;
                }
            }
            load(raw, from, CODEC && phase);
        };
        // while a row is on its way: whether it is the right one, or where it is to be kept
        auto settle = [&](Raw& raw, int i) {
            if (raw.slot == NOWHERE) return;
            int id = SLOTS ? selected(i) : int(args.ids[bg * k + i]);
            bool hit = raw.slot == CACHED && !is_taken(__shfl_sync(ALL, raw.before, 0), now);
            int slot = NOWHERE;
            if (lane == 0) {
                atomicAdd(looked_up + hit, 1);
                if (raw.slot == MISSING) slot = take_slot(name_of(id), now, tags, stamps, args.cached);
            }
            if (raw.slot == CACHED && !hit) load(raw, stored(id), CODEC);
            raw.slot = __shfl_sync(ALL, slot, 0);
        };
        Raw next, after;
        begin(next, own, first, first_tag);
        begin(after, own + step, second, second_tag);
        for (int i = own; i < rows_here; i += step) {
            if (caches) settle(next, i);
            Raw one = next;
            if ((phase || SLOTS) && one.slot >= 0) write_row(one, cache + one.slot * args.row_bytes);
            next = after;
            begin(after, i + 2 * step, third, third_tag);
            third = fourth, third_tag = tag_of(third);
            fourth = selected(i + 4 * step);
            if (PAGED || phase || args.resident_mask[batch * args.room + i])
                add_row(run, one, CODEC && phase, queries, CODEC ? centered + phase * GROUP : nullptr, args.scale, args.softcap);
        }
        // as long as others select nobody waits for this one: it brings the merge's instructions here
        if (phase || args.signaled) merge_warps(run, merged, peaks, partial + split * (GROUP * PARTIAL), phase);
    }

    bool last = last_block(args.tickets + part * APART, splits);
    if (args.cached && part % PARTS == 0 && threadIdx.x < 2)
        atomicAdd(args.lookups + 2 * held + threadIdx.x, looked_up[1] + (threadIdx.x ? 0 : looked_up[0]));
    after_previous();
    if (!last) return;
    if (threadIdx.x == 0) {
        args.tickets[part * APART] = 0;
        bool all = PARTS == 1 || atomicAdd(args.ends + bg * APART, 1) == PARTS - 1;
        if (PARTS > 1 && all) args.ends[bg * APART] = 0;
        if (args.cached && !SLOTS && all) args.clocks[bg] = now / 2;  // which all blocks have read
    }
    auto part_of = [&](int s, int h, int pair) {
        return s < splits ? __ldcg(reinterpret_cast<const float2*>(partial + (i64(s) * GROUP + h) * PARTIAL) + pair)
                          : float2{NEVER, 0};
    };
    // a pair of the output's elements for each thread, on their way while weights are found: a warp
    // per head, a lane per split
    float2 parts[MOST_SPLITS];
    auto prefetch = [&](int i) {
#pragma unroll
        for (int s = 0; s < MOST_SPLITS; s++) parts[s] = part_of(s, i / (DV / 2), i % (DV / 2) + 1);
    };
    if (threadIdx.x < GROUP * (DV / 2)) prefetch(threadIdx.x);
    for (int h = warp; h < GROUP; h += 8) {
        float2 own = part_of(lane, h, 0);
        float peak = warp_max(own.x), shrink = own.x > NEVER ? expf(own.x - peak) : 0.0f;
        float total = warp_sum(own.y * shrink);
        if (lane < splits) weights[lane * GROUP + h] = total > 0 ? shrink / total : 0.0f;
        if (lane == 0) args.lse[part * GROUP + h] = total > 0 ? peak + logf(total) : NEVER;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * (DV / 2); i += 256) {
        if (i != int(threadIdx.x)) prefetch(i);
        float2 sum = {0, 0};
#pragma unroll
        for (int s = 0; s < MOST_SPLITS; s++) {
            float weight = s < splits ? weights[s * GROUP + i / (DV / 2)] : 0.0f;
            if (s < splits) sum.x += weight * parts[s].x, sum.y += weight * parts[s].y;
        }
        store(args.output, part * GROUP * DV + 2 * i, sum.x);
        store(args.output, part * GROUP * DV + 2 * i + 1, sum.y);
    }
}
