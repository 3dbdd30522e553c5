// Queries made ready for the steps that take no sample: turned, and tables of them.
//
// q̃ = R q/‖q‖ (paper, A.1), ‖q‖ q̃ · up as float16 and what that leaves for the matrix unit, whose
// powers of two follow from norms, so that no block waits for another one. TABLE 1: points of tiers
// (paper, B.2.1; ops.coarse.tier_table): keys in better centroids are summed by comparing all pairs.
// TABLE 2: inner products of the rounded query with sign patterns (ops.coarse.dot_table).
// Grid: (splits, GROUP, BG), 256 threads: a head, and every `splits`-th subspace; of dots, which
// need the largest of all coordinates, splits is 1. Reads 4 D bytes of the rotation per coordinate
// (from L2 after the first) and, for tiers, 2 KB of counts per subspace; writes 4 D bytes per head,
// its tables (M · 256 entries of 1 or 2 bytes), and clears what the step counts.
// Limited by latency: query and rotation, sums over a warp; for tiers by 2^16 comparisons per block,
// which are reads of shared memory (ncu: 61% of what it can do).
// Compile-time: D, GROUP, DTYPE (of queries), TABLE (0 none, 1 tiers, 2 dots).
#include "common/operands.cuh"

constexpr int M = D / 8;
constexpr int EACH = (D + 31) / 32;                  // coordinates of a lane
constexpr int AHEAD = TABLE == 2 ? 4 : 1;            // rows of the rotation that a warp asks for at once
constexpr int STEPS = (M + 1) / 2;                   // as in rerank_blocks.cu
constexpr int SETS = (GROUP + 3) / 4;                // of 4 query heads
constexpr int TIERS = 6;                             // ops.coarse.TIERS
constexpr float SMALLEST = 1.1754943508222875e-38f;
constexpr double LARGEST = 1.8e16;                    // √4096 times check.LARGEST

// Where float16 `part` (0 high, 1 low) of coordinate j of head h goes among a group's operands.
__device__ __forceinline__ int place_of(int h, int j, int part) {
#if TABLE == 0
    return operand_of(h, j, part);
#else
    // rerank_blocks.cu: a lane has two coordinates of each subspace; odd ones are in columns of their own
    int b = j / 8, lane = (h % 4 + 4 * (b % 2)) * 4 + j % 8 / 2;
    return ((h / 4 * STEPS + b / 2) * 32 + lane) * 4 + part * 2 + j % 2;
#endif
}

constexpr int SIZE = TABLE ? SETS * STEPS * 32 * 4 : OPERANDS * 4;  // of a group

struct Centroid {
    double similarity;
    int held;
};

// queries DTYPE [BG, GROUP, D]; rotation float32 [D, D]; weight_scales float32 [BG] of log weights, or
// null; counts int64 [BG, M, 256]: keys per centroid, and limits int64 [B, TIERS], of tiers alone.
// operands uint16 [BG, SIZE], 0 where nothing is written; ups, units float32 [BG, GROUP]: the
// powers of two; of dots votes per unit of q·k. table uint8 or int16 [BG, SETS, M, 256, 4], a head
// beside the other. cleared int32 [words]; wrong int32 [1], set to 1 where a query is out of range, or
// null. largest, level (E|u|), most (codes.FACTOR): of dots.
extern "C" __global__ void __launch_bounds__(256)
query_table(const void* queries, const float* rotation, const float* weight_scales, const i64* counts,
     const i64* limits, u16* operands, float* ups, float* units, void* table, int* cleared, i64 words,
     int* wrong, i64 largest, float level, float most, i64 kv_heads) {
    __shared__ float turned[D];
    i64 h = blockIdx.y, bg = blockIdx.z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 block = (bg * gridDim.y + h) * gridDim.x + blockIdx.x;
    auto load_row = [&](float (&row)[EACH], int j) {
#pragma unroll
        for (int w = 0; w < EACH; w++)
            row[w] = w * 32 + lane < D ? rotation[j * D + w * 32 + lane] : 0.0f;
    };
    float rows[AHEAD][EACH];
    auto load_rows = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * int(gridDim.x) < M) load_row(rows[i], (first + i * gridDim.x) * 8 + warp);
    };
    load_rows(blockIdx.x);
    after_previous();
    let_next_begin();

    float direction[EACH];
    double square = 0;
#pragma unroll
    for (int w = 0; w < EACH; w++) {
        int j = w * 32 + lane;
        direction[w] = j < D ? element(queries, (bg * GROUP + h) * D + j) : 0.0f;
        square += double(direction[w]) * direction[w];
    }
    for (i64 i = block * 256 + threadIdx.x; i < words; i += i64(gridDim.x) * gridDim.y * gridDim.z * 256)
        cleared[i] = 0;
    double length = sqrt(warp_sum(square));
    bool finite = length < LARGEST;  // else the query is taken for zeros
    if (!finite && wrong && threadIdx.x == 0) *wrong = 1;
    if (!finite) length = 0;
    double inverse = 1 / fmax(length, 2.2250738585072014e-308);
#pragma unroll
    for (int w = 0; w < EACH; w++) direction[w] = finite ? float(direction[w] * inverse) : 0.0f;
    for (int first = blockIdx.x; first < M; first += AHEAD * gridDim.x) {
        if (first != int(blockIdx.x)) load_rows(first);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int b = first + i * gridDim.x;
            if (b >= M) continue;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < EACH; w++) sum += rows[i][w] * direction[w];
            sum = warp_sum(sum);
            if (lane == 0) turned[b * 8 + warp] = sum;
        }
    }
    __syncthreads();

    float norm = float(fmin(length, 1152921504606846976.0));  // transform.LONGEST
    // what brings the norm, and so no coordinate further, to [2^13, 2^14)
    int exponent = min(max(int(__float_as_uint(fmaxf(norm, SMALLEST)) >> 23), 20), 230);
    float up = __uint_as_float(u32(254 + 13 - exponent) << 23);
    operands += bg * SIZE;
#if TABLE == 2
    float peak = 0;
    for (int j = lane; j < D; j += 32) peak = fmaxf(peak, fabsf(turned[j]));
    peak = warp_max(peak);
    double factor = peak > 0 ? double(largest) / double(peak) : 0.0;
    if (threadIdx.x == 0) {
        double unit = double(peak) * double(norm) * level * weight_scales[bg] / (largest * most);
        units[bg * GROUP + h] = unit > 0 ? float(1 / unit) : 0.0f;
    }
#endif
    if (blockIdx.x == 0 && threadIdx.x == 0) ups[bg * GROUP + h] = up;
    for (int b = blockIdx.x; b < M; b += gridDim.x) {
        if (threadIdx.x < 8) {
            int j = b * 8 + threadIdx.x;
            float x = turned[j] * norm * up;
            u16 high = to_float16(x);
            operands[place_of(int(h), j, 0)] = high;
            operands[place_of(int(h), j, 1)] = to_float16(x - from_float16(high));
        }
#if TABLE == 1
        __shared__ Centroid all[256];
        int id = threadIdx.x;
        double mine = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            double x = turned[b * 8 + j];
            mine += id >> j & 1 ? x : -x;
        }
        __syncthreads();
        all[id] = {mine, int(counts[(bg * M + b) * 256 + id])};
        __syncthreads();
        int better = 0;
        for (int start = 0; start < 256; start += 32) {  // equal ones by the lower id
            if (start == warp * 32) {
                for (int j = start; j < start + 32; j++)
                    if (all[j].similarity > mine || (all[j].similarity == mine && j < id))
                        better += all[j].held;
            } else if (start < warp * 32) {
#pragma unroll 8
                for (int j = start; j < start + 32; j++)
                    if (all[j].similarity >= mine) better += all[j].held;
            } else {
#pragma unroll 8
                for (int j = start; j < start + 32; j++)
                    if (all[j].similarity > mine) better += all[j].held;
            }
        }
        int earned = 0;
        for (int t = 0; t < TIERS; t++) earned += better < limits[bg / kv_heads * TIERS + t];
        static_cast<u8*>(table)[(((bg * SETS + h / 4) * M + b) * 256 + id) * 4 + h % 4] = u8(earned);
#elif TABLE == 2
        int sum = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int r = int(rint(double(turned[b * 8 + j]) * factor));
            sum += threadIdx.x >> j & 1 ? r : -r;
        }
        static_cast<short*>(table)[(((bg * SETS + h / 4) * M + b) * 256 + threadIdx.x) * 4 + h % 4] =
            short(sum);
#endif
    }
}
