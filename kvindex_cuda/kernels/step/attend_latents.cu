// Attention over latents: rows whose value is the first DV coordinates of their key, read once for all
// query heads of a group, up to 128 of them (multi-head latent attention, DeepSeek-V2, 2.1, absorbed).
//
//   attend_latents -> merge_latents
//
// A block takes 32 rows at a time to shared memory: resident ones, then those selected, by the addresses of
// their pages. Logits of 16 heads and 8 rows are one product of the matrix unit, shares of 16 heads times
// 8 columns of values another, whose words are two columns of a row, put together in pairs of rows: nothing
// is transposed. Rows lie a quarter of a line apart in the banks, so that those words meet no other.
// Shares are rounded to DTYPE for the second product, as flash attention does (Dao, 2023), sums are not.
// float32 has no such unit: a thread has a head and a row, then a head and a column.
// Compile-time: D, DV, GROUP, DTYPE, SOFTCAP, CODEC (of the rows selected: 0 plain, 1 int8, 2 fp8).
#include "common/row_codes.cuh"

constexpr int HEADS = (GROUP + 15) / 16 * 16;
constexpr int SIZE = DTYPE == 0 ? 4 : 2;
constexpr int PITCH = (D * SIZE + 127) / 128 * 128 + 32;  // bytes of a row in shared memory
constexpr int OWN = ROWS / 8;                             // rows that a warp brings
constexpr int LOGITS = ROWS + 4;                          // of a head, and what sets banks apart
constexpr bool BRAIN = DTYPE == 2;
static_assert(ROWS == 32, "a lane for each row");
static_assert(D % 8 == 0 && DV % 8 == 0 && DV < D, "rows are read in pieces of 16 bytes");

// To shared memory, zeros where there is no row. coded: DV codes, D - DV more, and a scale of either.
__device__ __forceinline__ void bring(char* to, u64 row, bool coded, const void* anything) {
    int lane = threadIdx.x % 32;
    const char* from = row ? reinterpret_cast<const char*>(row) : static_cast<const char*>(anything);
    if (!CODEC || !coded || !row) {
        for (int i = lane; i < D * SIZE / 16; i += 32)
            copy_piece<16>(shared_place(to) + i * 16, row ? from + i * 16 : from, row != 0);
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

// Where a row's share is among those of its head: lane t of four takes rows t, t + 4, t + 8, t + 12 at once.
__device__ __forceinline__ int place_of(int row) { return row / 16 * 16 + row % 4 * 4 + row % 16 / 4; }

// queries · rows, to logits float32 [HEADS, LOGITS]. queries: DTYPE [GROUP, D], aligned to 16 bytes.
__device__ __forceinline__ void multiply_keys(float* logits, const void* queries, const char* rows) {
#if DTYPE == 0
    for (int i = threadIdx.x; i < GROUP * ROWS; i += 256) {
        int h = i / ROWS, r = i % ROWS;
        const float4* q = reinterpret_cast<const float4*>(static_cast<const float*>(queries) + h * D);
        const float4* key = reinterpret_cast<const float4*>(rows + r * PITCH);
        float sum = 0;
        for (int j = 0; j < D / 4; j++) {
            float4 x = q[j], y = key[j];
            sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
        logits[h * LOGITS + r] = sum;
    }
#else
    constexpr int EACH = HEADS >= 128 ? 4 : HEADS >= 64 ? 2 : 1;  // eights of rows of a warp at a time
    constexpr int TURNS = ROWS / 8 / EACH;
    int lane = threadIdx.x % 32;
    for (int unit = threadIdx.x / 32; unit < HEADS / 16 * TURNS; unit += 8) {
        int h = unit / TURNS * 16 + lane / 4, n = unit % TURNS * EACH;
        float sums[EACH][4] = {};
        const u16* q = static_cast<const u16*>(queries);
#pragma unroll 2
        for (int i = 0; i < (D + 31) / 32; i++) {
            int j = i * 32 + lane % 4 * 8;
            uint4 none = {0, 0, 0, 0};
            uint4 upper = j < D && h < GROUP ? *reinterpret_cast<const uint4*>(q + h * D + j) : none;
            uint4 lower = j < D && h + 8 < GROUP ? *reinterpret_cast<const uint4*>(q + (h + 8) * D + j) : none;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const char* at = rows + ((n + e) * 8 + lane / 4) * PITCH + j * 2;
                uint4 key = j < D ? *reinterpret_cast<const uint4*>(at) : none;
                mma_halves<BRAIN>(sums[e], upper.x, lower.x, upper.y, lower.y, key.x, key.y);
                mma_halves<BRAIN>(sums[e], upper.z, lower.z, upper.w, lower.w, key.z, key.w);
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                logits[(h + c / 2 * 8) * LOGITS + (n + e) * 8 + lane % 4 * 2 + c % 2] = sums[e][c];
    }
#endif
}

// Four columns of a head's sums, on the scale of the rows that come after.
__device__ __forceinline__ void add_to(float* partial, float4 sum, bool first, float shrink) {
    float4* at = reinterpret_cast<float4*>(partial);
    if (!first) {
        float4 old = *at;
        sum = {old.x * shrink + sum.x, old.y * shrink + sum.y, old.z * shrink + sum.z, old.w * shrink + sum.w};
    }
    *at = sum;
}

// shares · values, to partial float32 [GROUP, DV]: instead of what is there if they are the `first`, else beside it.
__device__ __forceinline__ void multiply_values(float* partial, const float* logits, const u16* shares,
                                                const char* rows, const float* shrinks, bool first) {
#if DTYPE == 0
    for (int i = threadIdx.x; i < GROUP * (DV / 4); i += 256) {
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
        u32 even[ROWS / 16][2], odd[ROWS / 16][2];  // of a lane's two columns, of rows place_of has side by side
#pragma unroll
        for (int s = 0; s < ROWS / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const char* at = rows + (s * 16 + i * 8 + lane % 4) * PITCH + (g * 16 + lane / 4 * 2) * 2;
                u32 one = *reinterpret_cast<const u32*>(at), other = *reinterpret_cast<const u32*>(at + 4 * PITCH);
                even[s][i] = __byte_perm(one, other, 0x5410), odd[s][i] = __byte_perm(one, other, 0x7632);
            }
#pragma unroll 1
        for (int m = 0; m < HEADS / 16; m++) {
            float evens[4] = {}, odds[4] = {};
#pragma unroll
            for (int s = 0; s < ROWS / 16; s++) {
                const u16* at = shares + (m * 16 + lane / 4) * ROWS + s * 16 + lane % 4 * 4;
                uint2 upper = *reinterpret_cast<const uint2*>(at);
                uint2 lower = *reinterpret_cast<const uint2*>(at + 8 * ROWS);
                mma_halves<BRAIN>(evens, upper.x, lower.x, upper.y, lower.y, even[s][0], even[s][1]);
                mma_halves<BRAIN>(odds, upper.x, lower.x, upper.y, lower.y, odd[s][0], odd[s][1]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int h = m * 16 + half * 8 + lane / 4, c = g * 16 + lane % 4 * 4;
                float4 sum = {evens[half * 2], odds[half * 2], evens[half * 2 + 1], odds[half * 2 + 1]};
                if (h < GROUP && c < DV) add_to(partial + h * DV + c, sum, first, shrinks[h]);
            }
        }
    }
#endif
}

struct AttendArguments {
    const void* queries;        // DTYPE [BG, GROUP, D], aligned to 16 bytes
    const i64* ids;             // [BG, k]: rows selected, below 0 for none
    const int* found;           // [BG]: how many, or null for all
    const i64* rows;            // [B, row]: addresses of blocks of TOKENS rows, of KV head g at g · head_bytes
    const void* resident;       // DTYPE [BG, room, D + DV]
    const u8* resident_mask;    // [B, room]
    const i64* resident_count;  // [1]: how many of them are there
    const float* weights;       // added to the logits of rows selected (−inf hides one), or null for zeros: of
                                // group bg, head h and row i at (bg · weights_group + h · weights_head) + i
    float* partial;             // [BG, splits, GROUP, DV]
    float2* sums;               // [BG, splits, GROUP]: maximum and sum, −inf and 0 where no row is visible
    i64 row, head_bytes, row_bytes, room, k, kv_heads, weights_group, weights_head;
    float scale, softcap;
};

// Grid: (splits, BG), 256 threads. Reads each row once, and the queries once a split; writes 4 DV + 8 bytes per head
// and split. A split takes 32 rows of every 32 splits.
// Dynamic shared memory: ROWS PITCH + HEADS (4 LOGITS + 2 ROWS) bytes.
extern "C" __global__ void __launch_bounds__(256, 1)
attend_latents(const __grid_constant__ AttendArguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ float peaks[HEADS], totals[HEADS], shrinks[HEADS];
    __shared__ bool there[ROWS];
    char* rows = memory;
    float* logits = reinterpret_cast<float*>(memory + ROWS * PITCH);
    u16* shares = reinterpret_cast<u16*>(logits + HEADS * LOGITS);
    i64 bg = blockIdx.y, batch = bg / args.kv_heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = blockIdx.x, splits = gridDim.x;
    const char* queries = static_cast<const char*>(args.queries) + bg * (GROUP * D * SIZE);
    float* partial = args.partial + (bg * splits + split) * (GROUP * DV);
    for (int h = threadIdx.x; h < HEADS; h += 256) peaks[h] = NEVER, totals[h] = 0;
    after_previous();
    let_next_begin();
    int count = int(__ldcg(args.resident_count)), found = args.found ? __ldcg(args.found + bg) : int(args.k);
    int near = (count + ROWS - 1) / ROWS, tiles = near + (found + ROWS - 1) / ROWS;
#pragma unroll 1
    for (int tile = split; tile < tiles; tile += splits) {
        bool selected = tile >= near;
        int first = (selected ? tile - near : tile) * ROWS;
        u64 row = 0;
        if (lane < OWN) {
            int i = first + warp * OWN + lane;
            if (!selected && i < count && args.resident_mask[batch * args.room + i]) {
                row = reinterpret_cast<u64>(args.resident) + (bg * args.room + i) * i64((D + DV) * SIZE);
            } else if (selected && i < found) {
                i64 id = __ldcg(args.ids + bg * args.k + i);
                if (id >= 0)
                    row = u64(args.rows[batch * args.row + id / TOKENS]) + bg % args.kv_heads * args.head_bytes +
                          id % TOKENS * args.row_bytes;
            }
        }
        __syncthreads();  // what is there was read
        if (lane < OWN) there[warp * OWN + lane] = row != 0;
#pragma unroll
        for (int i = 0; i < OWN; i++)
            bring(rows + (warp * OWN + i) * PITCH, __shfl_sync(ALL, row, i), selected, args.queries);
        pieces_wait();
        __syncthreads();
        multiply_keys(logits, queries, rows);
        __syncthreads();
        for (int h = warp; h < HEADS; h += 8) {
            float s = NEVER;
            if (h < GROUP && there[lane]) {
                s = logits[h * LOGITS + lane] * args.scale;
#if SOFTCAP
                s = args.softcap * tanhf(s / args.softcap);
#endif
                if (selected && args.weights)
                    s += __ldcg(args.weights + bg * args.weights_group + h * args.weights_head + first + lane);
            }
            float before = peaks[h], peak = fmaxf(before, warp_max(s));
            float share = s > NEVER ? expf(s - peak) : 0.0f, total = warp_sum(share);
            __syncwarp();  // all have read what the first lane writes
            if (lane == 0) {
                float shrink = before > NEVER ? expf(before - peak) : 0.0f;
                peaks[h] = peak, totals[h] = totals[h] * shrink + total, shrinks[h] = shrink;
            }
#if DTYPE == 0
            logits[h * LOGITS + lane] = share;
#else
            store(shares, h * ROWS + place_of(lane), share);
#endif
        }
        __syncthreads();
        multiply_values(partial, logits, shares, rows, shrinks, tile == split);
    }
    __syncthreads();
    for (int h = threadIdx.x; h < GROUP; h += 256)
        args.sums[(bg * splits + split) * GROUP + h] = {peaks[h], totals[h]};
}

struct MergeArguments {
    const float* partial;  // of attend_latents, as are sums
    const float2* sums;
    void* output;          // DTYPE [BG, GROUP, DV]
    float* lse;            // [BG, GROUP]: log Σ exp of the logits, −inf where no row is visible
    i64 splits;
};

// All splits on the scale of their largest logit. Grid: (GROUP, BG), 128 threads. Reads 4 DV + 8 bytes of each split
// that has rows. Dynamic shared memory: 4 bytes a split.
extern "C" __global__ void __launch_bounds__(128)
merge_latents(const __grid_constant__ MergeArguments args) {
    DYNAMIC_SHARED(memory);
    float* weights = reinterpret_cast<float*>(memory);
    int h = blockIdx.x, lane = threadIdx.x % 32, splits = int(args.splits);
    i64 bg = blockIdx.y;
    after_previous();
    let_next_begin();
    const float2* sums = args.sums + bg * splits * GROUP + h;
    float peak = NEVER, total = 0;
    for (int s = lane; s < splits; s += 32) peak = fmaxf(peak, __ldcg(sums + s * GROUP).x);
    peak = warp_max(peak);
    for (int s = lane; s < splits; s += 32) {
        float2 own = __ldcg(sums + s * GROUP);
        if (own.x > NEVER) total += own.y * expf(own.x - peak);
    }
    total = warp_sum(total);
    for (int s = threadIdx.x; s < splits; s += 128) {
        float own = __ldcg(sums + s * GROUP).x;
        weights[s] = own > NEVER ? expf(own - peak) / total : 0.0f;
    }
    if (threadIdx.x == 0) args.lse[bg * GROUP + h] = total > 0 ? peak + logf(total) : NEVER;
    __syncthreads();
    for (int c = threadIdx.x * 4; c < DV; c += 512) {
        float4 sum = {0, 0, 0, 0};
#pragma unroll 4
        for (int s = 0; s < splits; s++) {
            float weight = weights[s];
            if (weight == 0) continue;  // it may have written nothing
            const float* from = args.partial + ((bg * splits + s) * GROUP + h) * DV + c;
            float4 part = __ldcg(reinterpret_cast<const float4*>(from));
            sum = {sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z, sum.w + weight * part.w};
        }
        i64 to = (bg * GROUP + h) * DV + c;
        store(args.output, to, sum.x), store(args.output, to + 1, sum.y);
        store(args.output, to + 2, sum.z), store(args.output, to + 3, sum.w);
    }
}
