// Attention over latents (multi-head latent attention in the absorbed form; DeepSeek-V2, section 2.1). A latent
// is a key whose first DV coordinates are also its value. Each latent is read once for all query heads, up to
// 128. This file has two kernels, attend_latents and merge_latents. Reference: kvindex/ops/attention.py.
//
// attend_latents: a thread block copies ROWS latents at a time to shared memory, first the resident rows (sink
// and window), then selected rows. It processes PART query heads. PART is the number of all heads if the rows
// are on the host. Otherwise it is small enough that every multiprocessor gets a thread block.
// Logits: tensor cores multiply 16 heads by 8 rows; the coordinates are divided among warps.
// Output: tensor cores multiply the attention weights of 16 heads by 8 columns of values. The 32-bit words of
// two rows are recombined into pairs for this, so nothing is transposed. PITCH puts these words in different
// banks.
// Attention weights are rounded to DTYPE for the second product, as in FlashAttention (Dao, 2023); sums are
// float32.
// The work on sink and window, except for writing to global memory, overlaps with the previous kernel, which
// selects rows.
// In the pages of an inference engine (PAGED), sink and window are rows of the same pages as selected rows. A
// sequence that is not searched has only resident rows, so this kernel computes its full attention.
// float32 does not use tensor cores: a thread computes one head and row, then one head and four columns.
//
// Compile-time constants:
//   D, DV (dimensions of a key and of a value), GROUP (query heads of a group)
//   PART (query heads of a thread block: 16, 32, 64 or 128)
//   DTYPE (0 float32, 1 float16, 2 bfloat16), SOFTCAP (1: logits are capped)
//   CODEC (of the selected rows: CODEC_PLAIN, CODEC_INT8 or CODEC_FP8)
//   RAGGED (1: each sequence has its own count of resident rows; always so if PAGED)
//   PAGED (0: resident rows have a buffer of their own. 1: sink and window are in the pages that `rows` points to,
//     and follow the tokens that are searched. A sequence then has `resident_count` resident rows, of which the
//     first `sink` are its first tokens if any of its tokens are searched.)
#include "common/row_codes.cuh"

// Each warp computes the logits of 16 heads, so PART / 16 of the eight warps process all PART heads. The other
// warps would be idle. Therefore the coordinates are divided into SLICES = 8 / (PART / 16) slices, and each warp
// computes one slice. (float32 does not use tensor cores, and needs no slices.)
constexpr int SLICES = DTYPE == 0 ? 1 : 128 / PART;
constexpr int STEPS = ((D + 31) / 32 + SLICES - 1) / SLICES;  // steps of 32 coordinates per slice
constexpr int SIZE = DTYPE == 0 ? 4 : 2;
constexpr int PITCH = (D * SIZE + 127) / 128 * 128 + 32;  // bytes from one row to the next in shared memory
constexpr int OWN = ROWS / 8;                             // rows that each warp copies
constexpr int LOGITS = ROWS + 4;  // floats per head; 4 unused ones keep heads in different banks
constexpr bool BRAIN = DTYPE == 2;
static_assert(ROWS == 16, "a lane of sixteen for each row");
static_assert(PART == 16 || PART == 32 || PART == 64 || PART == 128, "warps come out even");
static_assert(D % 8 == 0 && DV % 8 == 0 && DV < D, "rows are read in pieces of 16 bytes");
static_assert(!PAGED || CODEC == CODEC_PLAIN && RAGGED, "an engine stores rows unchanged, and lengths of sequences");

// Copy a latent (a key of D numbers, of which the first DV are also its value) to shared memory, or write zeros
// if the address `row` is 0.
//   coded: true if each number is stored as one byte: DV bytes, then D - DV bytes, then one scale for each of
//     these two groups.
//   anything: any readable address, used if `row` is 0.
__device__ __forceinline__ void bring(char* to, u64 row, bool coded, const void* anything) {
    int lane = threadIdx.x % 32;
    const char* from = row ? reinterpret_cast<const char*>(row) : static_cast<const char*>(anything);
    if (!ROWS_CODED || !coded || !row) {
        for (int i = lane; i < D * SIZE / 16; i += 32)
            copy_async<16>(shared_place(to) + i * 16, row ? from + i * 16 : from, row != 0);
        return;
    }
    for (int i = lane; i < D / 8; i += 32) {
        uint2 codes = reinterpret_cast<const uint2*>(from)[i];
        float scale = __uint_as_float(reinterpret_cast<const u32*>(from + D)[i >= DV / 8]) * CODED;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float four[4];
            from_codes(four, half ? codes.y : codes.x);
#pragma unroll
            for (int e = 0; e < 4; e++) store(to, i * 8 + half * 4 + e, four[e] * scale);
        }
    }
}

// Return the position in shared memory at which the attention weight of a row (0 to 15) is stored. Lane t of four
// lanes (0 to 3) needs the weights of rows t, t + 4, t + 8 and t + 12. These four weights are stored side by side,
// so that one access reads them all.
__device__ __forceinline__ int place_of(int row) { return row % 4 * 4 + row / 4; }

// Queries of 16 heads as tensor core fragments. The coordinates are divided among the warps: each warp stores only
// the coordinates that it multiplies.
struct Queries {
    uint4 words[STEPS][2];
};
// Load this warp's fragments of the queries. queries: DTYPE [GROUP, D], aligned to 16 bytes. first: number of
// the first head of the thread block.
__device__ __forceinline__ void load(Queries& part, const void* queries, int first) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
        int h = first + warp / SLICES * 16 + i % 2 * 8 + lane / 4, j = (warp % SLICES + i / 2 * SLICES) * 32 + lane % 4 * 8;
        uint4 none = {0, 0, 0, 0};
        part.words[i / 2][i % 2] =
            h < GROUP && j < D ? *reinterpret_cast<const uint4*>(static_cast<const u16*>(queries) + h * D + j) : none;
    }
}

// Compute the inner products of PART queries with the keys of ROWS rows (keys and values of tokens). The
// coordinates are divided into SLICES slices. Write the partial sums over each slice to `logits`, float32
// [SLICES, PART, LOGITS].
__device__ __forceinline__ void multiply_keys(float* logits, const Queries& part, const void* queries, int first,
                                              const char* rows) {
#if DTYPE == 0
    for (int i = threadIdx.x; i < PART * ROWS; i += 256) {
        int h = i / ROWS, r = i % ROWS;
        if (first + h >= GROUP) break;
        const float4* q = reinterpret_cast<const float4*>(static_cast<const float*>(queries) + (first + h) * D);
        const float4* key = reinterpret_cast<const float4*>(rows + r * PITCH);
        float sum = 0;
        for (int j = 0; j < D / 4; j++) {
            float4 x = q[j], y = key[j];
            sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        logits[h * LOGITS + r] = sum;
    }
#else
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[ROWS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int j = (warp % SLICES + i * SLICES) * 32 + lane % 4 * 8;
        uint4 upper = part.words[i][0], lower = part.words[i][1];
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            uint4 key = {0, 0, 0, 0};
            if (j < D) key = *reinterpret_cast<const uint4*>(rows + (n * 8 + lane / 4) * PITCH + j * 2);
            mma_halves<BRAIN>(sums[n], upper.x, lower.x, upper.y, lower.y, key.x, key.y);
            mma_halves<BRAIN>(sums[n], upper.z, lower.z, upper.w, lower.w, key.z, key.w);
        }
    }
    logits += (warp % SLICES * PART + warp / SLICES * 16 + lane / 4) * LOGITS + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) logits[c / 2 * (8 * LOGITS) + n * 8 + c % 2] = sums[n][c];
#endif
}

// Add `sum` to four columns of a head's attention output, which are at `partial`. Before, multiply `partial` by
// `shrink`. If `first` is true, `partial` has no value yet, and is set to `sum`.
__device__ __forceinline__ void add_to(float* partial, float4 sum, bool first, float shrink) {
    float4* at = reinterpret_cast<float4*>(partial);
    if (!first) {
        float4 old = *at;
        sum = {old.x * shrink + sum.x, old.y * shrink + sum.y, old.z * shrink + sum.z, old.w * shrink + sum.w};
    }
    *at = sum;
}

// Multiply the attention weights of ROWS rows by their values, and add the products to `partial`, float32
// [PART, DV], for `heads` heads. If `first` is true, overwrite `partial` instead.
__device__ __forceinline__ void multiply_values(float* partial, int heads, const float* logits, const u16* shares,
                                                const char* rows, const float* shrinks, bool first) {
#if DTYPE == 0
    for (int i = threadIdx.x; i < heads * (DV / 4); i += 256) {
        int h = i / (DV / 4), c = i % (DV / 4) * 4;
        float4 sum = {0, 0, 0, 0};
        for (int r = 0; r < ROWS; r++) {
            float share = logits[h * LOGITS + r];
            float4 x = *reinterpret_cast<const float4*>(rows + r * PITCH + c * 4);
            sum = {sum.x + share * x.x, sum.y + share * x.y, sum.z + share * x.z, sum.w + share * x.w};
        }
        add_to(partial + h * DV + c, sum, first, shrinks[h]);
    }
#else
    int lane = threadIdx.x % 32;
    for (int g = threadIdx.x / 32; g < (DV + 15) / 16; g += 8) {
        u32 even[2], odd[2];  // the lane's two columns, for pairs of rows in the order of place_of
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const char* at = rows + (i * 8 + lane % 4) * PITCH + (g * 16 + lane / 4 * 2) * 2;
            u32 one = *reinterpret_cast<const u32*>(at), other = *reinterpret_cast<const u32*>(at + 4 * PITCH);
            even[i] = __byte_perm(one, other, 0x5410), odd[i] = __byte_perm(one, other, 0x7632);
        }
#pragma unroll 2
        for (int m = 0; m < PART / 16; m++) {
            float evens[4] = {}, odds[4] = {};
            const u16* at = shares + (m * 16 + lane / 4) * ROWS + lane % 4 * 4;
            uint2 upper = *reinterpret_cast<const uint2*>(at), lower = *reinterpret_cast<const uint2*>(at + 8 * ROWS);
            mma_halves<BRAIN>(evens, upper.x, lower.x, upper.y, lower.y, even[0], even[1]);
            mma_halves<BRAIN>(odds, upper.x, lower.x, upper.y, lower.y, odd[0], odd[1]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int h = m * 16 + half * 8 + lane / 4, c = g * 16 + lane % 4 * 4;
                float4 sum = {evens[half * 2], odds[half * 2], evens[half * 2 + 1], odds[half * 2 + 1]};
                if (h < heads && c < DV) add_to(partial + h * DV + c, sum, first, shrinks[h]);
            }
        }
    }
#endif
}

struct AttendArguments {
    const void* queries;        // DTYPE [BG, GROUP, D], aligned to 16 bytes
    const i64* ids;             // [BG, k]: ids of the selected rows, below 0 for none
    const int* found;           // [BG]: number of selected rows, or null for all k
    const i64* rows;            // [B, row]: addresses of blocks of TOKENS rows; the rows of KV head g begin at g ·
                                // head_bytes
    const void* resident;       // DTYPE [BG, room, D + DV]; unused if PAGED, as is resident_mask
    const u8* resident_mask;    // [B, room]: 1 where a resident row is valid
    const i64* resident_count;  // [1], or RAGGED: [B]: number of resident rows
    const i64* length;          // [B]: number of tokens that are searched; only if PAGED
    // Log weights, which are added to the logits of the selected rows: −inf hides a row, and a null pointer means
    // zeros. For KV head bg (counted over all sequences) and its query head h, the log weight of selected row i is
    // at bg · weights_group + h · weights_head + i.
    const float* weights;
    float* partial;             // [BG, splits, GROUP, DV]
    float2* sums;               // [BG, splits, GROUP]: maximum and sum, −inf and 0 if no row is visible
    i64 row, head_bytes, row_bytes, room, sink, k, kv_heads, weights_group, weights_head;
    float scale, softcap;
};

// Compute attention over the latents (rows). Each thread block computes it for PART query heads, over a subset of
// the rows (a split). The rows are divided into tiles of ROWS rows; split s processes the tiles s, s + splits, ….
// Grid: (splits, GROUP / PART, BG), 256 threads. GROUP is the number of query heads per KV head, and BG is the
// batch size times the number of KV heads.
// Reads each row (D numbers) GROUP / PART times, and the queries once per split; if PAGED, also 8 bytes per row for
// the address of its block. Writes 4 DV + 8 bytes per head and split, where DV is the dimension of a value.
// Dynamic shared memory: ROWS · PITCH + 4 · SLICES · PART · LOGITS + 2 · PART · ROWS bytes.
extern "C" __global__ void __launch_bounds__(256, 1)
attend_latents(const __grid_constant__ AttendArguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ float peaks[PART], totals[PART], shrinks[PART];
    __shared__ bool there[ROWS];
    char* rows = memory;
    float* logits = reinterpret_cast<float*>(memory + ROWS * PITCH);
    u16* shares = reinterpret_cast<u16*>(logits + SLICES * PART * LOGITS);
    i64 bg = blockIdx.z, batch = bg / args.kv_heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = blockIdx.x, splits = gridDim.x;
    int head = blockIdx.y * PART, heads = min(PART, GROUP - head);
    const char* queries = static_cast<const char*>(args.queries) + bg * (GROUP * D * SIZE);
    float* partial = args.partial + ((bg * splits + split) * GROUP + head) * DV;
    Queries part;
    if (DTYPE != 0) load(part, queries, head);
    for (int h = threadIdx.x; h < PART; h += 256) peaks[h] = NEVER, totals[h] = 0;
    int count = int(__ldcg(args.resident_count + RAGGED * batch)), resident_tiles = (count + ROWS - 1) / ROWS, found = 0;
    auto stored = [&](i64 id) {
        return u64(args.rows[batch * args.row + id / TOKENS]) + bg % args.kv_heads * args.head_bytes +
               id % TOKENS * args.row_bytes;
    };
#if PAGED
    // Row i of the sink belongs to token i. Row i of the window belongs to token i + later.
    i64 later = __ldcg(args.length + batch), sinks = later ? args.sink : 0;
    later -= sinks;
    auto resident = [&](i64 i) { return stored(i < sinks ? i : later + i); };
#else
    auto resident = [&](i64 i) {
        return reinterpret_cast<u64>(args.resident) + (bg * args.room + i) * i64((D + DV) * SIZE);
    };
#endif
    bool waited = false;
    auto wait_for_rows = [&] {
        if (waited) return;
        after_previous();
        let_next_begin();
        found = args.found ? __ldcg(args.found + bg) : int(args.k);
        waited = true;
    };
#pragma unroll 1
    for (int tile = split;; tile += splits) {
        bool selected = tile >= resident_tiles;
        if (selected) {
            wait_for_rows();
            if ((tile - resident_tiles) * ROWS >= found) break;
        }
        int first = (selected ? tile - resident_tiles : tile) * ROWS;
        u64 row = 0;
        if (lane < OWN) {
            int i = first + warp * OWN + lane;
            if (!selected && i < count && (PAGED || args.resident_mask[batch * args.room + i])) {
                row = resident(i);
            } else if (selected && i < found) {
                i64 id = __ldcg(args.ids + bg * args.k + i);
                if (id >= 0) row = stored(id);
            }
        }
        __syncthreads();  // all threads have read the previous rows
        if (lane < OWN) there[warp * OWN + lane] = row != 0;
#pragma unroll
        for (int i = 0; i < OWN; i++)
            bring(rows + (warp * OWN + i) * PITCH, __shfl_sync(ALL, row, i), selected, args.queries);
        async_wait();
        __syncthreads();
        multiply_keys(logits, part, queries, head, rows);
        __syncthreads();
#pragma unroll
        for (int h = threadIdx.x / ROWS; h < PART; h += 256 / ROWS) {  // sixteen lanes per head
            int r = lane % ROWS;
            float s = NEVER;
            if (h < heads && there[r]) {
                float sum = logits[h * LOGITS + r];
#pragma unroll
                for (int i = 1; i < SLICES; i++) sum += logits[(i * PART + h) * LOGITS + r];
                s = sum * args.scale;
#if SOFTCAP
                s = args.softcap * tanhf(s / args.softcap);
#endif
                if (selected && args.weights)
                    s += __ldcg(args.weights + bg * args.weights_group + (head + h) * args.weights_head + first + r);
            }
            float before = peaks[h], peak = s;
#pragma unroll
            for (int step = ROWS / 2; step; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, step));
            peak = fmaxf(peak, before);
            float share = s > NEVER ? expf(s - peak) : 0.0f, total = share;
#pragma unroll
            for (int step = ROWS / 2; step; step /= 2) total += __shfl_xor_sync(ALL, total, step);
            __syncwarp();  // all lanes have read what the first lane now writes
            if (r == 0) {
                float shrink = before > NEVER ? expf(before - peak) : 0.0f;
                peaks[h] = peak, totals[h] = totals[h] * shrink + total, shrinks[h] = shrink;
            }
#if DTYPE == 0
            logits[h * LOGITS + r] = share;
#else
            store(shares, h * ROWS + place_of(r), share);
#endif
        }
        __syncthreads();
        wait_for_rows();  // nothing may be written to global memory before the previous kernel has ended
        multiply_values(partial, heads, logits, shares, rows, shrinks, tile == split);
    }
    __syncthreads();
    for (int h = threadIdx.x; h < heads; h += 256)
        args.sums[(bg * splits + split) * GROUP + head + h] = {peaks[h], totals[h]};
}

struct MergeArguments {
    const float* partial;  // written by attend_latents, as is `sums`
    const float2* sums;
    void* output;          // DTYPE [BG, GROUP, DV]
    float* lse;            // [BG, GROUP]: log Σ exp of the logits, −inf if no row is visible
    i64 splits;
};

// Merge the attention results of all splits, which are subsets of the rows.
// Grid: (GROUP, DV / 128, BG), 128 threads. A warp processes a quarter of the splits, and a lane processes four
// columns.
// Reads 4 DV + 8 bytes of each split that has rows.
extern "C" __global__ void __launch_bounds__(128)
merge_latents(const __grid_constant__ MergeArguments args) {
    constexpr int OWN_SPLITS = MOST_SPLITS / 32;
    __shared__ float weights[MOST_SPLITS];
    __shared__ float4 parts[4][32];
    int h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, splits = int(args.splits);
    int c = blockIdx.y * 128 + lane * 4;
    i64 bg = blockIdx.z;
    after_previous();
    let_next_begin();
    const float2* sums = args.sums + bg * splits * GROUP + h;
    float2 own[OWN_SPLITS];
    float peak = NEVER, total = 0;
#pragma unroll
    for (int i = 0; i < OWN_SPLITS; i++) {
        int s = i * 32 + lane;
        own[i] = s < splits ? __ldcg(sums + s * GROUP) : float2{NEVER, 0};
        peak = fmaxf(peak, own[i].x);
    }
    peak = warp_max(peak);
#pragma unroll
    for (int i = 0; i < OWN_SPLITS; i++)
        if (own[i].x > NEVER) total += own[i].y * expf(own[i].x - peak);
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < OWN_SPLITS; i++)
        if (warp == 0) weights[i * 32 + lane] = own[i].x > NEVER ? expf(own[i].x - peak) / total : 0.0f;
    if (threadIdx.x == 0 && blockIdx.y == 0) args.lse[bg * GROUP + h] = total > 0 ? peak + logf(total) : NEVER;
    __syncthreads();
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int s = warp; s < splits; s += 4) {
        float weight = weights[s];
        if (weight == 0 || c >= DV) continue;  // a split without rows may not have written its part
        float4 part = __ldcg(reinterpret_cast<const float4*>(args.partial + ((bg * splits + s) * GROUP + h) * DV + c));
        sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z, sum.w + weight * part.w};
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= DV) return;
#pragma unroll
    for (int w = 1; w < 4; w++) {
        float4 part = parts[w][lane];
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    i64 to = (bg * GROUP + h) * DV + c;
    store(args.output, to, sum.x), store(args.output, to + 1, sum.y);
    store(args.output, to + 2, sum.z), store(args.output, to + 3, sum.w);
}
