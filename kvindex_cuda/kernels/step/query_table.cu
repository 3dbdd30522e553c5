// Query tables for tiers: queries rotated, and their look-up tables (paper, A.1 and B.2.1).
//
// q̃ = R q/‖q‖, ‖q‖ q̃ · up as float16 and what that leaves for the matrix unit, whose powers of two
// follow from norms, so that no block waits for another one; and the points that each centroid earns
// (ops.coarse.tier_table): keys in better centroids are summed by comparing all pairs.
// Grid: (M, GROUP, BG), 256 threads: a subspace of a head. Reads 4 D bytes of the rotation per
// coordinate (from L2 after the first) and 2 KB of counts per subspace; writes 4 D bytes per head, its
// table (M · 256 bytes), and clears what the step counts.
// Limited by latency: query and rotation, sums over a warp; and by 2^16 comparisons per block, which
// are reads of shared memory (ncu: 61% of what it can do).
// Compile-time: D, GROUP, DTYPE (of queries).
#include "common/common.cuh"

constexpr int M = D / 8;
constexpr int EACH = (D + 31) / 32;     // coordinates of a lane
constexpr int STEPS = (M + 1) / 2;      // as in rerank_blocks.cu
constexpr int SETS = (GROUP + 3) / 4;   // of 4 query heads
constexpr float SMALLEST = 1.1754943508222875e-38f;
constexpr double LARGEST = 1.8e16;      // √4096 times check.LARGEST

// Where float16 `part` (0 high, 1 low) of coordinate j of head h goes among a group's operands: in
// rerank_blocks.cu a lane has two coordinates of each subspace; odd ones are in columns of their own.
__device__ __forceinline__ int place_of(int h, int j, int part) {
    int b = j / 8, lane = (h % 4 + 4 * (b % 2)) * 4 + j % 8 / 2;
    return ((h / 4 * STEPS + b / 2) * 32 + lane) * 4 + part * 2 + j % 2;
}

constexpr int SIZE = SETS * STEPS * 32 * 4;  // of a group

struct Centroid {
    double similarity;
    int keys;
};

struct Arguments {
    const void* queries;     // DTYPE [BG, GROUP, D]
    const float* rotation;   // [D, D]
    const i64* histogram;    // [BG, M, 256]: keys per centroid
    const i64* tiers;        // [B, TIERS]: keys that bound each
    u16* operands;           // [BG, SIZE]: 0 where nothing is written
    float* ups;              // [BG, GROUP]: powers of two
    u8* table;               // [BG, SETS, M, 256, 4]: a head beside the other
    int* cleared;            // [words]
    int* wrong;              // [1]: set to 1 where a query is out of range, or null
    i64 words, kv_heads;
};

extern "C" __global__ void __launch_bounds__(256)
query_table(const __grid_constant__ Arguments args) {
    u16* operands = args.operands;
    __shared__ float rotated[8];
    __shared__ Centroid centroids[256];
    i64 h = blockIdx.y, bg = blockIdx.z;
    int b = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 block = (bg * gridDim.y + h) * gridDim.x + b;
    float row[EACH];
#pragma unroll
    for (int w = 0; w < EACH; w++)
        row[w] = w * 32 + lane < D ? args.rotation[(b * 8 + warp) * D + w * 32 + lane] : 0.0f;
    after_previous();
    let_next_begin();

    float direction[EACH];
    double square = 0;
#pragma unroll
    for (int w = 0; w < EACH; w++) {
        int j = w * 32 + lane;
        direction[w] = j < D ? element(args.queries, (bg * GROUP + h) * D + j) : 0.0f;
        square += double(direction[w]) * direction[w];
    }
    for (i64 i = block * 256 + threadIdx.x; i < args.words; i += i64(gridDim.x) * gridDim.y * gridDim.z * 256)
        args.cleared[i] = 0;
    double length = sqrt(warp_sum(square));
    bool finite = length < LARGEST;  // else the query is taken for zeros
    if (!finite && args.wrong && threadIdx.x == 0) *args.wrong = 1;
    if (!finite) length = 0;
    double inverse = 1 / fmax(length, 2.2250738585072014e-308);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < EACH; w++) sum += row[w] * (finite ? float(direction[w] * inverse) : 0.0f);
    sum = warp_sum(sum);
    if (lane == 0) rotated[warp] = sum;
    __syncthreads();

    float norm = float(fmin(length, double(LONGEST)));
    // what brings the norm, and so no coordinate further, to [2^13, 2^14)
    int exponent = min(max(int(__float_as_uint(fmaxf(norm, SMALLEST)) >> 23), 20), 230);
    float up = __uint_as_float(u32(254 + 13 - exponent) << 23);
    if (b == 0 && threadIdx.x == 0) args.ups[bg * GROUP + h] = up;
    if (threadIdx.x < 8) {
        int j = b * 8 + threadIdx.x;
        float x = rotated[threadIdx.x] * norm * up;
        u16 high = to_float16(x);
        operands += bg * SIZE;
        operands[place_of(int(h), j, 0)] = high;
        operands[place_of(int(h), j, 1)] = to_float16(x - from_float16(high));
    }
    int id = threadIdx.x;
    double mine = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        double x = rotated[j];
        mine += id >> j & 1 ? x : -x;
    }
    centroids[id] = {mine, int(args.histogram[(bg * M + b) * 256 + id])};
    __syncthreads();
    int better = 0;
    for (int start = 0; start < 256; start += 32) {  // equal ones by the lower id
        if (start == warp * 32) {
            for (int j = start; j < start + 32; j++)
                if (centroids[j].similarity > mine || (centroids[j].similarity == mine && j < id))
                    better += centroids[j].keys;
        } else if (start < warp * 32) {
#pragma unroll 8
            for (int j = start; j < start + 32; j++)
                if (centroids[j].similarity >= mine) better += centroids[j].keys;
        } else {
#pragma unroll 8
            for (int j = start; j < start + 32; j++)
                if (centroids[j].similarity > mine) better += centroids[j].keys;
        }
    }
    int earned = 0;
    for (int t = 0; t < TIERS; t++) earned += better < args.tiers[bg / args.kv_heads * TIERS + t];
    args.table[(((bg * SETS + h / 4) * M + b) * 256 + id) * 4 + h % 4] = u8(earned);
}
