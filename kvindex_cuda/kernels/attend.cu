// The k best rows fetched, and attention over them, the sink and the window (paper, B.3).
//
// Rows are read where they lie: in host memory over unified addresses, or on the device. A row is
// a token's key and value side by side; its chunks of 8 elements go to the lanes of a warp in
// order, so that one load of each lane is a whole row of 512 bytes (D = Dv = 128, 2-byte type).
// Grid: (splits, BG), 256 threads. A split attends to the selected ids that are its own, modulo
// the splits, and to its part of the near rows; the last one of a group merges the splits.
// Reads 4 bytes per candidate in every split (from L2), and the rows, once for all query heads.
// Compile-time: D, DV, GROUP, DTYPE, SOFTCAP.
#include "common.cuh"

constexpr int EDGE = 1024;
constexpr int CHUNKS = ((D + DV) / 8 + 31) / 32;  // per lane
constexpr int KEYS = (D / 8) / 32;                // of them, how many are parts of keys in all lanes
constexpr int PARTIAL = DV + 2;                   // of a split: maximum, sum, output

struct Running {
    float peak[GROUP], total[GROUP], sum[CHUNKS - KEYS][GROUP][8];
};

__device__ __forceinline__ void chunk_of(float (&x)[8], const void* row, int chunk) {
#if DTYPE == 0
    const float4* data = reinterpret_cast<const float4*>(row) + chunk * 2;
    float4 a = data[0], b = data[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#else
    uint4 data = reinterpret_cast<const uint4*>(row)[chunk];
    u32 words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE == 1
        x[2 * i] = from_float16(u16(words[i])), x[2 * i + 1] = from_float16(u16(words[i] >> 16));
#else
        x[2 * i] = from_bfloat16(u16(words[i])), x[2 * i + 1] = from_bfloat16(u16(words[i] >> 16));
#endif
    }
#endif
}

// One row joins the softmax of all heads of the group.
__device__ __forceinline__ void take(Running& run, const float (&x)[CHUNKS][8],
                                     const float* queries, float scale, float softcap) {
    int lane = threadIdx.x % 32;
    float logit[GROUP] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int chunk = lane + 32 * j;
        if (chunk < D / 8) {
            const float* q = queries + chunk * 8 * GROUP;
#pragma unroll
            for (int e = 0; e < 8; e++)
#pragma unroll
                for (int h = 0; h < GROUP; h++) logit[h] += x[j][e] * q[e * GROUP + h];
        }
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        float s = warp_sum(logit[h]) * scale;
#if SOFTCAP
        s = softcap * tanhf(s / softcap);
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

__device__ __forceinline__ void load_row(float (&x)[CHUNKS][8], const char* row) {
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        int chunk = threadIdx.x % 32 + 32 * j;
        for (int e = 0; e < 8; e++) x[j][e] = 0;
        if (chunk < (D + DV) / 8) chunk_of(x[j], row, chunk);
    }
}

// queries DTYPE [BG, GROUP, D]; list, counts, shares, histogram: of the scan and of `agree`.
// rows int64 [B, row]: addresses of blocks of TOKENS rows, of KV head g at g · row_head; near DTYPE [BG, room, D + DV]
// and shown uint8 [B, room], of which the first *held count. partial float32
// [BG, splits, GROUP, PARTIAL]; output DTYPE [BG, GROUP, DV]; ids int64 [BG, k] and found int32
// [BG] (cleared before), or null: which rows were selected, in any order.
extern "C" __global__ void __launch_bounds__(256, 2)
attend(const void* queries_in, const u64* list, const int* counts, const float* shares,
       const int* histogram, const i64* rows, i64 row, i64 row_head, i64 row_bytes,
       const void* near,
       const u8* shown, const i64* held, i64 room, float* partial, void* output, i64* ids,
       int* found, int* tickets, i64 k, i64 capacity, i64 kv_heads, float scale, float softcap) {
    DYNAMIC_SHARED(memory);
    int* mine = reinterpret_cast<int*>(memory);  // ids of this split, up to k
    __shared__ float queries[D * GROUP];
    __shared__ float merged[8][PARTIAL];
    __shared__ u64 edge[EDGE];
    __shared__ int bins[256];
    __shared__ int edges, taken;
    constexpr int SIZE = DTYPE == 0 ? 4 : 2;
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int splits = gridDim.x, split = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < D * GROUP; i += 256)
        queries[i] = element(queries_in, (bg * GROUP + i % GROUP) * D + i / GROUP);
    if (threadIdx.x == 0) edges = taken = 0;
    __syncthreads();

    // selection: every split finds all, and keeps its own
    list += bg * capacity;
    shares += bg * capacity;
    int n = counts[bg];
    Cut cut = cut_of(histogram + bg * BINS, int(k));
    auto word = [&](int i) { return u64(ordered(shares[i])) << 32 | u32(list[i]); };
    auto keep = [&](u64 entry) {
        int id = id_of(entry);
        if (ids && split == 0) ids[bg * k + atomicAdd(found + bg, 1)] = id;
        if (id % splits == split) mine[atomicAdd(&taken, 1)] = id;
    };
    for (int i = threadIdx.x; i < n; i += 256) {
        if (!(shares[i] > NEVER)) continue;
        int bin = bin_of(shares[i]);
        if (bin > cut.bin) keep(word(i));
        else if (bin == cut.bin) {
            int slot = atomicAdd(&edges, 1);
            if (slot < EDGE) edge[slot] = word(i);
        }
    }
    __syncthreads();
    int rank = int(k) - cut.above;
    if (edges > EDGE) {
        u64 least = radix_cut(
            [&](auto use) {
                for (int i = threadIdx.x; i < n; i += 256)
                    if (shares[i] > NEVER && bin_of(shares[i]) == cut.bin) use(word(i));
            },
            rank, bins);
        for (int i = threadIdx.x; i < n; i += 256)
            if (shares[i] > NEVER && bin_of(shares[i]) == cut.bin && word(i) >= least) keep(word(i));
    } else {
        for (int i = threadIdx.x; i < edges; i += 256) {
            int better = 0;
            for (int j = 0; j < edges; j++) better += edge[j] > edge[i];
            if (better < rank) keep(edge[i]);
        }
    }
    __syncthreads();

    // attention of each warp over its rows: selected ones first, whose way is the longest
    Running run;
#pragma unroll
    for (int h = 0; h < GROUP; h++) run.peak[h] = NEVER, run.total[h] = 0;
#pragma unroll
    for (int i = 0; i < (CHUNKS - KEYS) * GROUP * 8; i++) (&run.sum[0][0][0])[i] = 0;
    for (int i = warp; i < taken; i += 8) {
        int id = mine[i];
        const char* block = reinterpret_cast<const char*>(rows[batch * row + id / TOKENS]);
        float x[CHUNKS][8];
        load_row(x, block + bg % kv_heads * row_head + id % TOKENS * row_bytes);
        take(run, x, queries, scale, softcap);
    }
    int near_rows = int(*held);
    for (int i = split * 8 + warp; i < near_rows; i += splits * 8)
        if (shown[batch * room + i]) {
            float x[CHUNKS][8];
            load_row(x, static_cast<const char*>(near) + (bg * room + i) * i64((D + DV) * SIZE));
            take(run, x, queries, scale, softcap);
        }

    // warps, then splits
    partial += bg * splits * GROUP * PARTIAL;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        if (lane == 0) merged[warp][0] = run.peak[h], merged[warp][1] = run.total[h];
#pragma unroll
        for (int j = KEYS; j < CHUNKS; j++) {
            int chunk = lane + 32 * j - D / 8;
            if (chunk >= 0 && chunk < DV / 8)
                for (int e = 0; e < 8; e++) merged[warp][2 + chunk * 8 + e] = run.sum[j - KEYS][h][e];
        }
        __syncthreads();
        float peak = NEVER;
        for (int w = 0; w < 8; w++) peak = fmaxf(peak, merged[w][0]);
        for (int i = 1 + threadIdx.x; i < PARTIAL; i += 256) {
            float sum = 0;
            for (int w = 0; w < 8; w++)
                if (merged[w][0] > NEVER) sum += merged[w][i] * expf(merged[w][0] - peak);
            partial[(i64(split) * GROUP + h) * PARTIAL + i] = sum;
        }
        if (threadIdx.x == 0) partial[(i64(split) * GROUP + h) * PARTIAL] = peak;
        __syncthreads();
    }
    if (!last_block(tickets + bg, splits)) return;
    for (int i = threadIdx.x; i < GROUP * DV; i += 256) {
        const float* parts = partial + i / DV * PARTIAL;
        float peak = NEVER, total = 0, sum = 0;
        for (int s = 0; s < splits; s++) peak = fmaxf(peak, __ldcg(parts + s * GROUP * PARTIAL));
        for (int s = 0; s < splits; s++) {
            const float* part = parts + s * GROUP * PARTIAL;
            if (!(__ldcg(part) > NEVER)) continue;
            float share = expf(__ldcg(part) - peak);
            total += __ldcg(part + 1) * share;
            sum += __ldcg(part + 2 + i % DV) * share;
        }
        store(output, bg * GROUP * DV + i, total > 0 ? sum / total : 0.0f);
    }
}
