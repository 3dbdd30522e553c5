// Attention of one decode step over selected rows, the sink and the local window (ParisKV paper, B.3). A row is
// the key and the value of one token in one KV head, stored next to each other. Selected rows are in device
// memory, or in pinned host memory that is read over PCIe. They are stored unchanged or with one byte per
// number (CODEC).
// Reference: attend in kvindex/pariskv/decode_step.py, kvindex/ops/attention.py.
//
// A team of LANES neighboring lanes reads one row at a time, in chunks of 8 elements per lane, and keeps a
// running softmax. The rows of a group are divided among several thread blocks (splits). The last thread block
// of a group to finish merges the results of all splits.
// Rows are copied asynchronously into a ring buffer in shared memory: per team, DEPTH resident rows or two
// selected rows are in flight. (Registers would not do, because moving a register waits for the load that fills
// it.)
// Resident rows (sink and window) are read first, while select_rows.cu still runs.
// With few KV heads, the query heads of a KV head are divided into PARTS parts of GROUP heads, each with its
// own thread blocks. Every part reads all rows, usually from L2. Only part 0 inserts rows into the row cache (a
// cache in device memory for rows that are stored on the host).
// With a CODEC, the key in a row is relative to a center that all rows of a KV head share. The product of query
// and center is computed once and added to the logits.
//
// Grid: (splits, BG PARTS), 256 threads.
// Reads each row once per part of the heads; writes 4 (DV + 2) bytes per head and split.
// If rows are on the host and none is in the cache, limited by PCIe, first its latency and then its bandwidth.
// Dynamic shared memory: 4 WORKERS AT_ONCE PARTIAL bytes, or 8 DEPTH ROW bytes if that is more.
// With MEASURED, a step that has full attention because limits of the error are not known yet also adds up |o|² of each
// query head, and |v|² of the newest token. The limits follow from them (kvindex_cuda/pariskv/steps/page_limits.py).
// This file is longer than most because it is one kernel, with a reader for each codec.
//
// Compile-time constants:
//   D, DV (dimensions of a key and of a value)
//   GROUP (query heads of a part), PARTS (parts of a KV head's query heads)
//   DTYPE (0 float32, 1 float16, 2 bfloat16), SOFTCAP (1: logits are capped)
//   CODEC (of the selected rows: CODEC_PLAIN, CODEC_INT8 or CODEC_FP8)
//   GIVEN (0: no weights. 1: ids and weights come from a caller's search result; an id below 0 means no row,
//     and weights are added to the logits of each head. 2: rows were sampled, and one weight serves all heads.)
//   MIXED_ROWS (1: some blocks of rows are on the device and others on the host. The cache then stores only
//     host rows.)
//   PAGED (0: resident rows have a buffer of their own. 1: sink and window are in the pages that `rows` points
//     to, and follow the tokens that are searched. A sequence then has `resident_count` resident rows, of which
//     the first `sink` are its first tokens if any of its tokens are searched. 2: as 1, with the pages on the
//     host. Then resident rows are cached too, all sequences share one cache per KV head, and the cache
//     identifies a row by its slot number. Two sequences that request one slot at the same moment may both
//     fetch the row and store it twice.)
//   FP8_PAGES (1: the pages contain e4m3 numbers, in rows without scales. One scale multiplies all keys of the
//     layer, and another one all values. Only with PAGED and CODEC_FP8)
//   RAGGED (1: each sequence has its own count of resident rows; always so if PAGED)
//   ONE_SEQUENCE (1: each `consecutive` "sequences" of the batch are consecutive tokens of one sequence. They share
//     its resident rows and its row cache, where two of them may store a row twice, as with PAGED = 2. Always with
//     RAGGED.)
//   MEASURED (1: measures sizes while limits are not known. Only with PAGED)
#include "common/row_cache.cuh"
#include "common/row_codes.cuh"

constexpr int WIDER = D < DV ? DV : D;
constexpr int LANES = WIDER <= 64 ? 8 : WIDER <= 128 ? 16 : 32;  // lanes of a team
constexpr int TEAMS = 32 / LANES, WORKERS = 8 * TEAMS;  // teams of a warp, and of a thread block
// chunks of a key, and of a value, per lane
constexpr int KEYS = (D / 8 + LANES - 1) / LANES, VALUES = (DV / 8 + LANES - 1) / LANES;
constexpr int PARTIAL = DV + 2;              // floats of a split's result per head: maximum, sum, output
constexpr int PIECES = DTYPE == 0 ? 2 : 1;   // loads of 16 bytes per chunk
constexpr int ROW = (KEYS + VALUES) * PIECES * 512;  // bytes of a slot in a warp's ring buffer: one row of each team
// Number of rows in the ring buffer of each team of lanes: AHEAD. For wide rows it is 2, so that all ring
// buffers of a thread block together take less than 96 KB of shared memory.
constexpr int DEPTH = (KEYS + VALUES) * PIECES > 6 ? 2 : AHEAD;
constexpr bool SLOTS = PAGED == 2;
constexpr bool ONE_CACHE = SLOTS || ONE_SEQUENCE;  // several "sequences" of the batch share one cache per KV head
static_assert(!SLOTS || GIVEN != 1, "ids are those of tokens");
static_assert(!FP8_PAGES || PAGED && CODEC == CODEC_FP8, "pages of an engine");
static_assert(!MEASURED || PAGED, "sequences have full attention if no tokens are searched");
static_assert(!SLOTS || PARTS == 1, "their clock is not told how many parts have read it");
static_assert(!ONE_SEQUENCE || !PAGED && RAGGED, "tokens of one sequence have a buffer of resident rows");
constexpr int AT_ONCE = GROUP < HEADS_AT_ONCE ? GROUP : HEADS_AT_ONCE;  // heads whose results are merged in one round
static_assert(DV % 2 == 0, "sums are merged in pairs");

struct Running {  // the running softmax of a team; each lane stores its part of the sums
    float peak[GROUP], total[GROUP], sum[VALUES][GROUP][8];
};

// The part of a row (key and value of a token) that one lane reads, in its stored format: KEYS chunks of the key,
// then VALUES chunks of the value. A chunk is 8 elements. If rows are quantized (CODEC), it is 8 bytes and a scale.
typedef uint4 Words[KEYS + VALUES][PIECES];

// A team of lanes reads a row (key and value of a token), which is divided into chunks. Call the function
// use(chunk, value, j) for each chunk that this lane reads.
//   chunk: number of the chunk in the row.
//   value: true if the chunk belongs to the row's value, false if it belongs to the key.
//   j: number of the chunk in this lane's `Words`.
template <class Use>
__device__ __forceinline__ void each_chunk(Use use) {
#pragma unroll
    for (int j = 0; j < KEYS + VALUES; j++) {
        bool value = j >= KEYS;
        int chunk = threadIdx.x % LANES + LANES * (value ? j - KEYS : j);
        if (chunk < (value ? DV : D) / 8) use(chunk + (value ? D / 8 : 0), value, j);
    }
}

// A row (key and value of a token) that a team of LANES lanes is loading.
//   weight: numbers to add to the row's logits, one per query head; the number for head h is in lane h % LANES.
//   slot: the slot of the row cache to write the row to, or one of the constants below.
//   before: if `slot` is CACHED, the slot's time stamp before this step (only in the first lane of the team).
constexpr int NOWHERE = -1, CACHED = -2, MISSING = -3;
struct Pending {
    float weight[(GROUP + LANES - 1) / LANES];
    int slot, before;
};
__device__ __forceinline__ void write_row(const Words& words, char* place) {
    each_chunk([&](int chunk, bool value, int j) {
        if (ROWS_CODED) {
            uint4 word = words[j][0];
            reinterpret_cast<uint2*>(place)[chunk] = {word.x, word.y};
            bool first = chunk == (value ? D / 8 : 0);
            if (!FP8_PAGES && first) reinterpret_cast<u32*>(place + D + DV)[value] = word.z;
            return;
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) reinterpret_cast<uint4*>(place)[chunk * PIECES + i] = words[j][i];
    });
}
// Start copying this lane's chunks of a row to the ring buffer in shared memory. coded: true if the row is
// stored with one byte per number.
__device__ __forceinline__ void copy_row(Shared to, const char* row, bool coded) {
    each_chunk([&](int chunk, bool value, int j) {
        Shared place = to + j * PIECES * 512;
        if (coded) {
            copy_async<8>(place, row + chunk * 8);
            if (!FP8_PAGES) copy_async<4>(place + 8, row + D + DV + value * 4);
        } else {
#pragma unroll
            for (int i = 0; i < PIECES; i++) copy_async<16>(place + i * 512, row + (chunk * PIECES + i) * 16);
        }
    });
}
__device__ __forceinline__ void unpack(float (&x)[8], const uint4 (&words)[PIECES], bool coded) {
    const u32* word = &words[0].x;
    if (coded) {
        float scale = FP8_PAGES ? CODED : __uint_as_float(word[2]) * CODED;
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

// Add one row (key and value of a token) to the running softmax of all query heads. Each team of lanes adds its
// own row, and adds nothing if `in` is false. All lanes of the warp call this function.
//   queries: float4 [2, GROUP, D / 8]: first the lower four, then the upper four of every eight coordinates.
//   centered: [GROUP], the inner product of each query with the center (mean key). If a CODEC compresses the
//     rows, their keys are stored relative to the center, so these products are added to the logits.
__device__ __forceinline__ void add_row(Running& run, const Words& words, const Pending& row, bool in, bool coded,
                                        const float4* queries, const float* centered, float scale, float softcap) {
    float logit[GROUP] = {}, x[8];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        int chunk = threadIdx.x % LANES + LANES * j;
        unpack(x, words[j], coded);
        if (chunk < D / 8) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int h = 0; h < GROUP; h++) {
                    float4 q = queries[(half * GROUP + h) * (D / 8) + chunk];
                    const float* y = x + 4 * half;
                    logit[h] += y[0] * q.x + y[1] * q.y + y[2] * q.z + y[3] * q.w;
                }
        }
    }
#pragma unroll
    for (int by = LANES / 2; by; by /= 2)
#pragma unroll
        for (int h = 0; h < GROUP; h++) logit[h] += __shfl_xor_sync(ALL, logit[h], by);
    float shrink[GROUP], p[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float s = logit[h];
#if CODEC != CODEC_PLAIN
        s += centered[h];
#endif
        s *= scale;
#if SOFTCAP
        s = softcap * tanhf(s / softcap);
#endif
        bool seen = in;
#if GIVEN
        s += __shfl_sync(ALL, row.weight[h / LANES], h % LANES, LANES);
        seen = in && s != NEVER;  // else the row is hidden from this head
#endif
        float peak = fmaxf(run.peak[h], s);
        shrink[h] = seen ? expf(run.peak[h] - peak) : 1.0f, p[h] = seen ? expf(s - peak) : 0.0f;
        if (seen) run.peak[h] = peak;
        run.total[h] = run.total[h] * shrink[h] + p[h];
    }
    if (!in) return;  // no row: the ring buffer has stale data in its place
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        unpack(x, words[KEYS + j], coded);
#pragma unroll
        for (int h = 0; h < GROUP; h++)
#pragma unroll
            for (int e = 0; e < 8; e++) run.sum[j][h][e] = run.sum[j][h][e] * shrink[h] + p[h] * x[e];
    }
}

// Merge the running softmax of all teams in a thread block, where a team is the LANES lanes that read a row
// together. Each round merges AT_ONCE heads. All threads call this function.
//   merged: float32 [WORKERS, AT_ONCE, PARTIAL] in shared memory, for WORKERS teams and PARTIAL = DV + 2.
//   peaks: float32 [GROUP, WORKERS] in shared memory: the largest logit of each head and team.
//   partial: float32 [GROUP, PARTIAL], receives the result if `wanted` is true.
__device__ __forceinline__ void merge_teams(const Running& run, float* merged, float (&peaks)[GROUP][WORKERS],
                                            float* partial, bool wanted) {
    int lane = threadIdx.x % LANES, worker = threadIdx.x / LANES;
    if (lane == 0)
#pragma unroll
        for (int h = 0; h < GROUP; h++) peaks[h][worker] = run.peak[h];
    __syncthreads();
#pragma unroll
    for (int from = 0; from < GROUP; from += AT_ONCE) {
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++) {
            int h = from + e;
            if (h >= GROUP) continue;
            float* mine = merged + (worker * AT_ONCE + e) * PARTIAL;
            float peak = NEVER;
#pragma unroll
            for (int w = 0; w < WORKERS; w++) peak = fmaxf(peak, peaks[h][w]);
            float shrink = run.peak[h] > NEVER ? expf(run.peak[h] - peak) : 0.0f;
            if (lane == 0) mine[0] = peak, mine[1] = run.total[h] * shrink;
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                int chunk = lane + LANES * j;
                if (chunk < DV / 8)
#pragma unroll
                    for (int i = 0; i < 8; i += 2)
                        reinterpret_cast<float2*>(mine)[1 + chunk * 4 + i / 2] = {run.sum[j][h][i] * shrink,
                                                                                run.sum[j][h][i + 1] * shrink};
            }
        }
        __syncthreads();
        auto merge = [&](int e, int pair) {  // pair 0 is maximum and sum
            if (from + e >= GROUP) return;
            float2 sum = {0, 0};
#pragma unroll
            for (int w = 0; w < WORKERS; w++) {
                float2 part = reinterpret_cast<const float2*>(merged + (w * AT_ONCE + e) * PARTIAL)[pair];
                sum = {pair ? sum.x + part.x : part.x, sum.y + part.y};
            }
            if (wanted) reinterpret_cast<float2*>(partial + (from + e) * PARTIAL)[pair] = sum;
        };
        for (int at = threadIdx.x; at < AT_ONCE * (DV / 2); at += 256) merge(at / (DV / 2), at % (DV / 2) + 1);
        if (threadIdx.x >= 224 && threadIdx.x - 224 < AT_ONCE) merge(threadIdx.x - 224, 0);
        if (from + AT_ONCE < GROUP) __syncthreads();
    }
}

struct Arguments {
    const void* queries;        // DTYPE [BG PARTS, GROUP, D]
    const i64* ids;             // [BG, k]: ids of the selected rows
    const int* found;           // [BG]: number of selected rows
    const i64* rows;            // [B, row]: addresses of blocks of TOKENS rows; the rows of KV head g begin at g ·
                                // head_bytes
    // With ONE_SEQUENCE, `resident` and `resident_mask` have an entry for each real sequence, not for each token.
    const void* resident;       // DTYPE [BG, room, D + DV]
    const u8* resident_mask;    // [B, room]: 1 where a resident row is valid
    const i64* resident_count;  // [1], or RAGGED: [B]: number of resident rows
    const i64* length;          // [B]: number of tokens that are searched; only if PAGED
    const int* segments;        // [B, row]: number of each block among all pages; only if PAGED is 2
    // The row cache (row_cache.py) is a cache in device memory for rows that are stored on the host. It has
    // `cached` slots per KV head of a sequence, 0 without a cache. With PAGED = 2 (pages in host memory), all
    // sequences share one cache per KV head. The first dimension of `cache`, `tags` and `stamps` is then the number of
    // KV heads, and `clocks`, which counts decode steps, has one element. With ONE_SEQUENCE, the tokens of a sequence
    // share its cache.
    char* cache;                // [BG, cached, row_bytes]: rows in the stored format
    int* tags;                  // [BG, cached], aligned to 16 bytes: the row in each slot
    int* stamps;                // [BG, cached], aligned to 16 bytes: the step that last used each slot
    int* clocks;                // [BG]: steps so far. Stamps of this step are twice that number, or one more
                                // (row_cache.cuh).
    int* lookups;               // [BG, 2]: number of rows looked up, and of rows found
    const float* weights;       // [BG PARTS, GROUP, k], or [BG, k] if GIVEN is 2: added to the logits (−inf hides a row
                                // from a head); null for zeros; only if GIVEN
    float* partial;             // [BG PARTS, splits, GROUP, PARTIAL]
    void* output;               // DTYPE [BG PARTS, GROUP, DV]
    float* lse;                 // [BG PARTS, GROUP]: log Σ exp of the logits, −inf if no row is visible
    int* tickets;               // [BG PARTS] APART: counts finished splits, 0 before and after the launch
    int* ends;                  // [BG] APART: counts finished parts, 0 before and after the launch; only if PARTS > 1
                                // or ONE_SEQUENCE
    const int* signals;         // set once the rows of a group are selected (`signal` in common.cuh)
    i64 row, head_bytes, row_bytes, room, cached, sink;
    i64 signaled;               // 1 if select_rows.cu is the kernel launched directly before, else 0
    i64 k, kv_heads;
    i64 consecutive;            // tokens of each sequence; only if ONE_SEQUENCE
    float scale, softcap;
    const u8* on_device;        // [B, row]: 1 where a block is on the device; only if MIXED_ROWS
    const float* center;        // [BG, D]: center that coded rows are relative to, or null for zeros; only if rows are
                                // coded
    const float* key_scale;     // [1]: scale of the keys in pages; only if FP8_PAGES
    const float* value_scale;   // [1]: scale of the values; only if FP8_PAGES
    const bool* known;          // [1]: whether limits are known; only if MEASURED, as is `squares`
    float* squares;             // [B, KV heads + query heads]: |v|² of the newest token of each sequence, then |o|²
    const float* limit_lse;     // [B, query heads]: logits of learned sinks, which are not in `output` yet, or null;
                                // only if MEASURED
};

extern "C" __global__ void __launch_bounds__(256, GROUP * VALUES <= 8 ? 2 : 1)
attend(const __grid_constant__ Arguments args) {
    char* cache = args.cache;
    int* tags = args.tags;
    int* stamps = args.stamps;
    float* partial = args.partial;
    DYNAMIC_SHARED(memory);
    float* merged = reinterpret_cast<float*>(memory);  // [WORKERS][AT_ONCE][PARTIAL]
    __shared__ float4 queries[2 * GROUP * (D / 8)];
    __shared__ float weights[MOST_SPLITS * GROUP];
    __shared__ __align__(16) float peaks[GROUP][WORKERS];
    __shared__ int looked_up[2];  // rows that the cache did not contain, and rows that it did
    Shared ring = shared_place(memory) + threadIdx.x / 32 * (DEPTH * ROW) + threadIdx.x % 32 * 16;
    auto place_of = [&](int n) { return ring + n % DEPTH * ROW; };  // place of the warp's n-th row
    constexpr int SIZE = DTYPE == 0 ? 4 : 2;
    int part = blockIdx.y, bg = part / PARTS, batch = u32(bg) / u32(args.kv_heads);
    int head = u32(bg) % u32(args.kv_heads);
    i64 head_offset = head * args.head_bytes;
    int splits = gridDim.x, split = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int member = lane % LANES;  // lane number in its team. The first teams of all warps take the first rows.
    int own = (lane / LANES * splits + split) * 8 + warp, step = splits * WORKERS, now = 0;
    i64 k = args.k;
    float scale = FP8_PAGES ? args.scale * *args.key_scale : args.scale;
    float value_scale = FP8_PAGES ? *args.value_scale : 1.0f;
    int sequence = ONE_SEQUENCE ? u32(batch) / u32(args.consecutive) : batch;  // whose resident rows it reads
    int shown = ONE_SEQUENCE ? sequence * int(args.kv_heads) + head : bg;
    int held = SLOTS ? head : shown;          // whose cache it uses
    cache += held * args.cached * args.row_bytes, tags += held * args.cached, stamps += held * args.cached;
    if (threadIdx.x < 2) looked_up[threadIdx.x] = 0;
    Running run;
#pragma unroll
    for (int h = 0; h < GROUP; h++) run.peak[h] = NEVER, run.total[h] = 0;
#pragma unroll
    for (int i = 0; i < VALUES * GROUP * 8; i++) (&run.sum[0][0][0])[i] = 0;
    for (int i = threadIdx.x; i < D * GROUP; i += 256) {
        int h = i / D, j = i % D;
        float* to = reinterpret_cast<float*>(queries + (j / 4 % 2 * GROUP + h) * (D / 8) + j / 8);
        to[j % 4] = element(args.queries, (part * GROUP + h) * D + j);
    }
    const float* centered = nullptr;
#if CODEC != CODEC_PLAIN
    __shared__ float products[2][GROUP];  // product of query and center: [0] is 0, for plain rows; [1] is for rows
                                          // stored with a CODEC
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

    partial += i64(part) * splits * GROUP * PARTIAL;
#if PAGED
    // Sink and window are numbered together: the rows 0 to sinks - 1 are the sink, and the rows from `sinks` on are
    // the window. Row i of the sink belongs to token i. Row i of the window belongs to token i + later.
    int later = int(args.length[batch]), sinks = later ? int(args.sink) : 0;
    later -= sinks;
#endif
    // phase 0 reads the rows of sink and window while select_rows.cu still runs; phase 1 reads selected rows
#pragma unroll 1
    for (int phase = 0; phase < 2; phase++) {
        if (phase) {
            if (args.signaled)
                await(args.signals + (2 * (gridDim.y / PARTS) + bg) * APART, int(args.signaled));
            else
                after_previous();
            let_next_begin();
        }
        // Load the ids of the first four rows of this team of lanes before the number of rows is known, to hide
        // the latency.
        auto selected = [&](int i) {
#if PAGED == 2
            if (!phase) return i < sinks ? i : later + i;
#endif
            return phase && i < k ? int(args.ids[bg * k + i]) : 0;
        };
        auto name_of = [&](int id) {  // identifies a row in the cache; past the number of rows found, an id is
                                      // arbitrary
            if (!SLOTS) return id;
            u32 segment = min(u32(id) / TOKENS, u32(args.row) - 1);
            return args.segments[batch * args.row + segment] * TOKENS + int(u32(id) % TOKENS);
        };
        bool caches = args.cached && (phase || SLOTS);
        auto tag_of = [&](int id) { return caches ? ::tag_of(name_of(id), tags, args.cached) : 0; };
        int first = selected(own), second = selected(own + step);
        int third = selected(own + 2 * step), fourth = selected(own + 3 * step);
        int rows_here = phase ? args.found[bg] : int(__ldcg(args.resident_count + RAGGED * batch));
        if (caches) now = now_of(SLOTS ? __ldcg(args.clocks) : __ldcg(args.clocks + held) + 1);
        int first_tag = tag_of(first), second_tag = tag_of(second), third_tag = tag_of(third);
        auto stored = [&](int id) {
            return reinterpret_cast<const char*>(args.rows[batch * args.row + id / TOKENS]) +
                   head_offset + id % TOKENS * args.row_bytes;
        };
#if PAGED
        auto resident = [&](int i) { return stored(i < sinks ? i : later + i); };
#else
        auto resident = [&](int i) {
            return static_cast<const char*>(args.resident) + (shown * args.room + i) * i64((D + DV) * SIZE);
        };
#endif
        auto kept = [&](int id) { return args.cached && !(MIXED_ROWS && args.on_device[batch * args.row + id / TOKENS]); };
        auto find = [&](Pending& row, int i, int n, int id, int slot) {
            if (i >= rows_here) return;
            const char* from = nullptr;
            row = {{}, NOWHERE, 0};
            if (!phase && !SLOTS) from = resident(i);
            else {
#if GIVEN == 2
                for (float& weight : row.weight)
                    if (phase) weight = args.weights[bg * k + i];
#elif GIVEN
                for (int j = 0; j * LANES < GROUP; j++) {
                    if (id < 0) row.weight[j] = NEVER;
                    else if (args.weights && j * LANES + member < GROUP)
                        row.weight[j] = args.weights[(part * GROUP + j * LANES + member) * k + i];
                }
                if (id < 0) {
                    for (int at = 0; at < ROW; at += 512)
                        store_pair(place_of(n) + at, 0, 0), store_pair(place_of(n) + at + 8, 0, 0);
                    return;
                }
#endif
                if (slot >= 0) {
                    if (member == 0) row.before = use_slot<(PARTS > 1 || ONE_CACHE)>(stamps + slot, now);
                    from = cache + slot * args.row_bytes;
                    row.slot = CACHED;
                } else {
                    from = stored(id);
                    if (part % PARTS == 0 && kept(id)) row.slot = MISSING;
                }
            }
            copy_row(place_of(n), from, ROWS_CODED && (phase || FP8_PAGES));
        };
        auto begin = [&](Pending& row, int i, int n, int id, int tag) {
            int slot = caches ? slot_of<LANES>(name_of(id), tag, args.cached) : NOWHERE;
            find(row, i, n, id, slot);
            async_commit();
        };
        // Call this function while a row is being copied to shared memory. If the row is copied from a slot
        // of the row cache, another row may overwrite this slot in the same decode step. The function detects
        // this, and then copies the row from the host instead. If the row is copied from the host anyway, the
        // function chooses a cache slot for it.
        auto settle = [&](Pending& row, int i, int n) {
            bool looks = i < rows_here && row.slot != NOWHERE;
            if (!__any_sync(ALL, looks)) return;
            int before = __shfl_sync(ALL, row.before, 0, LANES), slot = NOWHERE;
            bool hit = row.slot == CACHED && !is_taken(before, now);
            int id = !looks ? 0 : SLOTS ? selected(i) : int(args.ids[bg * k + i]);
            if (looks && member == 0) {
                atomicAdd(looked_up + hit, 1);
                if (row.slot == MISSING) slot = take_slot(name_of(id), now, tags, stamps, args.cached);
            }
            if (looks && row.slot == CACHED && !hit) {
                async_wait();
                copy_row(place_of(n), stored(id), ROWS_CODED);
                async_wait();
            }
            slot = __shfl_sync(ALL, slot, 0, LANES);
            if (looks) row.slot = slot;
        };
        bool few = phase || SLOTS;  // two rows in flight, because selected rows need more registers
        int ahead = few ? 2 : DEPTH;
        Pending next, after;
        begin(next, own, 0, first, first_tag);
        begin(after, own + step, 1, second, second_tag);
        for (int n = 2; n < ahead; n++) begin(after, own + n * step, n, 0, 0);
        u32 visible = ALL;
        // A warp is divided into teams of lanes, each of which processes one row at a time. All teams iterate as
        // often as the first team, which has the most rows.
        int longest = rows_here - own + lane / LANES * (splits * 8);
        for (int i = own, n = 0; n * step < longest; i += step, n++) {
            if (!PAGED && !phase && n % LANES == 0) {
                int at = i + member * step;
                bool one = at < rows_here && args.resident_mask[sequence * args.room + at];
                visible = __ballot_sync(ALL, one) >> lane / LANES * LANES;
            }
            if (caches) settle(next, i, n);
            if (few) async_wait_but<1>();
            else async_wait_but<DEPTH - 1>();
            Words words;
#pragma unroll
            for (int at = 0; at < (KEYS + VALUES) * PIECES; at++)
                words[at / PIECES][at % PIECES] = load_from<uint4>(place_of(n) + at * 512);
            Pending one = next;
            bool in = i < rows_here;
            if (few && in && one.slot >= 0) write_row(words, cache + one.slot * args.row_bytes);
            next = after;
            begin(after, i + ahead * step, n + ahead, third, third_tag);
            third = fourth, third_tag = tag_of(third);
            fourth = selected(i + 4 * step);
            add_row(run, words, one, in && visible >> n % LANES & 1, ROWS_CODED && (phase || FP8_PAGES), queries,
                    ROWS_CODED ? centered + phase * GROUP : nullptr, scale, args.softcap);
        }
        // A thread block reads the rows of sink and window in phase 0, and the selected rows in phase 1. The result
        // of the merge in phase 0 is not used. The merge runs there only to load its instructions into the
        // instruction cache, while other thread blocks still select rows.
        if (phase || args.signaled) merge_teams(run, merged, peaks, partial + split * (GROUP * PARTIAL), phase);
    }

    bool last = last_block(args.tickets + part * APART, splits);
    if (args.cached && part % PARTS == 0 && threadIdx.x < 2)
        atomicAdd(args.lookups + 2 * held + threadIdx.x, looked_up[1] + (threadIdx.x ? 0 : looked_up[0]));
    after_previous();
    if (!last) return;
    if (threadIdx.x == 0) {
        args.tickets[part * APART] = 0;
        int readers = ONE_SEQUENCE ? int(args.consecutive) * PARTS : PARTS;  // of the clock, each with its splits
        bool all = readers == 1 || atomicAdd(args.ends + shown * APART, 1) == readers - 1;
        if (readers > 1 && all) args.ends[shown * APART] = 0;
        if (args.cached && !SLOTS && all) args.clocks[held] = now / 2;  // all thread blocks have read the old value
    }
    auto part_of = [&](int s, int h, int pair) {
        return s < splits ? __ldcg(reinterpret_cast<const float2*>(partial + (i64(s) * GROUP + h) * PARTIAL) + pair)
                          : float2{NEVER, 0};
    };
    // Several thread blocks, the splits, have each attended to a part of the rows. To merge their outputs, each
    // thread loads two elements of the output of each split. Meanwhile, one warp per head computes the weights of
    // the splits, one lane per split.
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
#if MEASURED
        // fraction of the attention weight that the learned sink does not have
        if (lane == 0)
            peaks[h][0] = args.limit_lse ? total / (total + expf(args.limit_lse[part * GROUP + h] - peak)) : 1;
#endif
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
        if (FP8_PAGES) sum.x *= value_scale, sum.y *= value_scale;
        store(args.output, part * GROUP * DV + 2 * i, sum.x);
        store(args.output, part * GROUP * DV + 2 * i + 1, sum.y);
    }
#if MEASURED
    if (*args.known) return;
    __syncthreads();  // the outputs of this part are written
    float* squares = args.squares + i64(batch) * args.kv_heads * (GROUP * PARTS + 1);
    i64 newest = __ldcg(args.resident_count + batch) - 1;  // all tokens are resident
    if (newest < 0) return;
    const char* row = reinterpret_cast<const char*>(args.rows[batch * args.row + newest / TOKENS]) + head_offset +
                      newest % TOKENS * args.row_bytes;
    for (int h = warp; h < GROUP + (part % PARTS == 0); h += 8) {  // the last one is the value
        float sum = 0;
        for (int j = lane; j < DV; j += 32) {
            float x = 0;
            if (h < GROUP) x = element(args.output, (i64(part) * GROUP + h) * DV + j);
#if FP8_PAGES
            float four[4];
            from_fp8(four, u8(row[D + j]));
            if (h == GROUP) x = four[0] * FP8_UNIT * value_scale;
#else
            if (h == GROUP) x = element(row, D + j);
#endif
            sum += x * x;
        }
        sum = warp_sum(sum);
        if (h < GROUP) sum *= peaks[h][0] * peaks[h][0];
        i64 to = h == GROUP ? head : args.kv_heads + (head * PARTS + part % PARTS) * GROUP + h;
        if (lane == 0) squares[to] = sum;
    }
#endif
}
