// Exact softmax attention of one query per head over given rows (ParisKV paper, equations 1 to 3). Keys and
// values are separate tensors with any strides. (A fused decode step uses step/attend.cu instead.) Reference:
// kvindex.ops.attention.attend.
//
// A team of LANES neighboring lanes processes one row at a time, for up to 8 heads of a group. Each lane loads
// up to 16 bytes per access. Each team keeps a running softmax (Milakov and Gimelshein, 2018). The results of
// teams, of warps and of thread blocks are merged in this order; the last thread block of a group to finish
// merges the splits.
//
// Grid: (BG, splits, heads / HEADS rounded up), 256 threads.
// Reads (D + DV) elements per row for each tile of HEADS heads, and 4 bytes of bias per row and head; writes 4
// (DV + 2) bytes per split and head, and the output. Sums are float32.
// Limited by memory; with few rows, by the latency of two dependent reads.
// Compile-time constants: D, DV, HEADS (heads per thread block), DTYPE, SOFTCAP (1: logits are capped), WIDTH
// (elements per load), LANES.
#include "common/common.cuh"

constexpr int SIZE = DTYPE == 0 ? 4 : 2;
constexpr int KEYS = (D / WIDTH + LANES - 1) / LANES;     // loads of a key per lane
constexpr int VALUES = (DV / WIDTH + LANES - 1) / LANES;  // loads of a value per lane
constexpr int ROWS = 32 / LANES;                          // rows that a warp processes at a time
constexpr int PARTIAL = DV + 2;                           // floats of a split's result per head: maximum, sum, output

__device__ __forceinline__ void chunk_of(float (&x)[WIDTH], const char* row, int chunk) {
    u32 words[4];
    const char* from = row + chunk * (WIDTH * SIZE);
    if constexpr (WIDTH * SIZE == 16) {
        uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (WIDTH * SIZE == 8) {
        uint2 all = *reinterpret_cast<const uint2*>(from);
        words[0] = all.x, words[1] = all.y;
    } else if constexpr (WIDTH * SIZE == 4) {
        words[0] = *reinterpret_cast<const u32*>(from);
    } else {
        words[0] = *reinterpret_cast<const u16*>(from);
    }
#pragma unroll
    for (int e = 0; e < WIDTH; e++) {
#if DTYPE == 0
        x[e] = __uint_as_float(words[e]);
#elif DTYPE == 1
        x[e] = from_float16(u16(words[e / 2] >> e % 2 * 16));
#else
        x[e] = from_bfloat16(u16(words[e / 2] >> e % 2 * 16));
#endif
    }
}

struct Arguments {
    const void* queries;    // DTYPE [BG, heads, D]
    const char* keys;       // DTYPE [B, G, rows, D]
    const char* values;     // DTYPE [B, G, rows, DV]
    const float* bias;      // [B, G heads, rows]: added to the logits, −inf hides a row; or null
    float* partial;         // [BG, tiles, splits, HEADS, PARTIAL]
    void* output;           // DTYPE [BG, heads, DV]
    float* lse;             // [BG, heads]: log Σ exp of the logits, −inf if no row is visible; or null
    int* tickets;           // [BG, tiles]: counts finished splits, cleared before the launch
    i64 keys_batch, keys_head, keys_row, values_batch, values_head, values_row;  // strides in elements
    i64 bias_batch, bias_head, bias_row;
    i64 rows, heads, kv_heads;
    float scale, softcap;
};

extern "C" __global__ void __launch_bounds__(256)
attend(const __grid_constant__ Arguments args) {
    const char* keys = args.keys;
    const char* values = args.values;
    const float* bias = args.bias;
    float* partial = args.partial;
    __shared__ float queries[D * HEADS];
    __shared__ float merged[8][PARTIAL];
    i64 bg = blockIdx.x, batch = bg / args.kv_heads, group = bg % args.kv_heads;
    i64 head = i64(blockIdx.z) * HEADS;
    int many = int(min(i64(HEADS), args.heads - head));
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane / LANES, own = lane % LANES;
    for (int i = threadIdx.x; i < D * HEADS; i += 256)
        queries[i] = i % HEADS < many
                         ? element(args.queries, (bg * args.heads + head + i % HEADS) * D + i / HEADS) : 0.0f;
    __syncthreads();
    keys += (batch * args.keys_batch + group * args.keys_head) * SIZE;
    values += (batch * args.values_batch + group * args.values_head) * SIZE;
    if (bias) bias += batch * args.bias_batch + (group * args.heads + head) * args.bias_head;

    float peak[HEADS], total[HEADS], sum[VALUES][HEADS][WIDTH];
#pragma unroll
    for (int h = 0; h < HEADS; h++) peak[h] = NEVER, total[h] = 0;
#pragma unroll
    for (int i = 0; i < VALUES * HEADS * WIDTH; i++) (&sum[0][0][0])[i] = 0;
    i64 stride = i64(gridDim.y) * 8 * ROWS;
    for (i64 start = (i64(blockIdx.y) * 8 + warp) * ROWS; start < args.rows; start += stride) {
        i64 i = start + part;
        float more[HEADS];  // bias of this row for each head
        bool seen = false;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            more[h] = NEVER;
            if (i < args.rows && h < many) more[h] = bias ? bias[h * args.bias_head + i * args.bias_row] : 0.0f;
            seen |= more[h] > NEVER;
        }
        float k[KEYS][WIDTH] = {}, v[VALUES][WIDTH] = {}, logit[HEADS] = {};
        if (seen) {
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                if (own + j * LANES < D / WIDTH)
                    chunk_of(k[j], keys + i * args.keys_row * SIZE, own + j * LANES);
#pragma unroll
            for (int j = 0; j < VALUES; j++)
                if (own + j * LANES < DV / WIDTH)
                    chunk_of(v[j], values + i * args.values_row * SIZE, own + j * LANES);
        }
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            if (own + j * LANES >= D / WIDTH) continue;
            const float* q = queries + (own + j * LANES) * WIDTH * HEADS;
#pragma unroll
            for (int e = 0; e < WIDTH; e++)
#pragma unroll
                for (int h = 0; h < HEADS; h++) logit[h] += k[j][e] * q[e * HEADS + h];
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float s = logit[h];
#pragma unroll
            for (int step = LANES / 2; step; step /= 2) s += __shfl_xor_sync(ALL, s, step);
            s *= args.scale;
#if SOFTCAP
            s = args.softcap * tanhf(s / args.softcap);
#endif
            s += more[h];
            if (!(more[h] > NEVER)) continue;
            if (s > peak[h]) {
                float shrink = expf(peak[h] - s);
                peak[h] = s;
                total[h] *= shrink;
#pragma unroll
                for (int j = 0; j < VALUES; j++)
#pragma unroll
                    for (int e = 0; e < WIDTH; e++) sum[j][h][e] *= shrink;
            }
            float p = expf(s - peak[h]);
            total[h] += p;
#pragma unroll
            for (int j = 0; j < VALUES; j++)
#pragma unroll
                for (int e = 0; e < WIDTH; e++) sum[j][h][e] += p * v[j][e];
        }
    }

    i64 tile = bg * gridDim.z + blockIdx.z;
    partial += tile * gridDim.y * (HEADS * PARTIAL);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        // merge the teams of lanes of a warp
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            float other = __shfl_xor_sync(ALL, peak[h], step), most = fmaxf(peak[h], other);
            float mine = peak[h] > NEVER ? expf(peak[h] - most) : 0.0f;
            float its = other > NEVER ? expf(other - most) : 0.0f;
            peak[h] = most;
            total[h] = total[h] * mine + __shfl_xor_sync(ALL, total[h], step) * its;
#pragma unroll
            for (int j = 0; j < VALUES; j++)
#pragma unroll
                for (int e = 0; e < WIDTH; e++)
                    sum[j][h][e] = sum[j][h][e] * mine + __shfl_xor_sync(ALL, sum[j][h][e], step) * its;
        }
        // merge the warps
        if (lane == 0) merged[warp][0] = peak[h], merged[warp][1] = total[h];
#pragma unroll
        for (int j = 0; j < VALUES; j++)
            if (part == 0 && own + j * LANES < DV / WIDTH)
#pragma unroll
                for (int e = 0; e < WIDTH; e++)
                    merged[warp][2 + (own + j * LANES) * WIDTH + e] = sum[j][h][e];
        __syncthreads();
        float most = NEVER;
        for (int w = 0; w < 8; w++) most = fmaxf(most, merged[w][0]);
        float* to = partial + (i64(blockIdx.y) * HEADS + h) * PARTIAL;
        for (int i = 1 + threadIdx.x; i < PARTIAL; i += 256) {
            float all = 0;
            for (int w = 0; w < 8; w++)
                if (merged[w][0] > NEVER) all += merged[w][i] * expf(merged[w][0] - most);
            to[i] = all;
        }
        if (threadIdx.x == 0) to[0] = most;
        __syncthreads();
    }
    // merge the splits
    if (!last_block(args.tickets + tile, gridDim.y)) return;
    for (int i = threadIdx.x; i < many * DV; i += 256) {
        const float* parts = partial + i / DV * PARTIAL;
        float most = NEVER, all = 0, out = 0;
        for (int s = 0; s < int(gridDim.y); s++)
            most = fmaxf(most, __ldcg(parts + i64(s) * HEADS * PARTIAL));
        for (int s = 0; s < int(gridDim.y); s++) {
            const float* from = parts + i64(s) * HEADS * PARTIAL;
            if (!(__ldcg(from) > NEVER)) continue;
            float share = expf(__ldcg(from) - most);
            all += __ldcg(from + 1) * share;
            out += __ldcg(from + 2 + i % DV) * share;
        }
        store(args.output, (bg * args.heads + head) * DV + i, all > 0 ? out / all : 0.0f);
        if (args.lse && i % DV == 0) args.lse[bg * args.heads + head + i / DV] = all > 0 ? most + logf(all) : NEVER;
    }
}
