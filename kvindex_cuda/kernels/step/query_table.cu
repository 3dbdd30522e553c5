// Prepare the queries for tiered votes, which are approximate scores of keys (ParisKV paper, A.1 and B.2.1):
// rotate each query, and compute a table of the scores ("points") of all centroids. A centroid is one of the
// 256 sign patterns of 8 coordinates (a subspace); a key belongs to one centroid per subspace. Reference:
// tiered_votes.query_table in kvindex/pariskv, kvindex.ops.coarse.tier_table.
//
// The rotated query is R q. The kernel writes R q · up as two float16 numbers, the rounded value and the
// remainder (the rounding error), for the tensor cores in rerank_blocks.cu. `up` is a power of two that follows
// from ‖q‖ alone, so that thread blocks need not wait for each other.
// The score of a centroid depends on how many keys belong to a centroid that is more similar to the query. The
// kernel counts these keys by comparing all pairs of centroids.
//
// Grid: (M, GROUP, BG), 256 threads: a thread block processes one subspace of one head.
// Reads 4 D bytes of the rotation per coordinate (from L2 after the first time) and 2 KB of counts per
// subspace; writes 4 D bytes per head and its table (256 M bytes). It also clears the counters that the step's
// later kernels use.
// Limited by latency (reads of query and rotation, sums over a warp) and by 2^16 comparisons per thread block,
// which read shared memory at 61% of its throughput (measured with Nsight Compute).
// Compile-time constants: D, GROUP (query heads per KV head), DTYPE (of queries).
#include "common/common.cuh"

constexpr int M = D / 8;
constexpr int EACH = (D + 31) / 32;     // coordinates per lane
constexpr int STEPS = (M + 1) / 2;      // matrix products over all subspaces, two subspaces each, as in
                                        // rerank_blocks.cu
constexpr int SETS = (GROUP + 3) / 4;   // sets of 4 query heads
constexpr float SMALLEST = 1.1754943508222875e-38f;
constexpr double LARGEST = 1.8e16;      // √4096 times check.LARGEST, the largest allowed norm

// Return where in the array `operands` this kernel writes coordinate j of query head h. rerank_blocks.cu reads the
// array as operands of matrix products. Even and odd subspaces are in different columns of a matrix.
//   part: 0 for the rounded value of the coordinate, 1 for the remainder (the rounding error).
__device__ __forceinline__ int place_of(int h, int j, int part) {
    int b = j / 8, lane = (h % 4 + 4 * (b % 2)) * 4 + j % 8 / 2;
    return ((h / 4 * STEPS + b / 2) * 32 + lane) * 4 + part * 2 + j % 2;
}

constexpr int SIZE = SETS * STEPS * 32 * 4;  // float16 numbers of a group's operands

struct Centroid {
    double similarity;
    int keys;
};

struct Arguments {
    const void* queries;     // DTYPE [BG, GROUP, D]
    const float* rotation;   // [D, D]
    const i64* histogram;    // [BG, M, 256]: number of keys per centroid
    const i64* tiers;        // [B, TIERS]: number of keys that bounds each tier
    u16* operands;           // [BG, SIZE]: the launcher has zeroed the places that this kernel does not write
    float* ups;              // [BG, GROUP]: `up` of each head, a power of two
    u8* table;               // [BG, SETS, M, 256, 4]: scores of centroids, those of four heads next to each other
    int* cleared;            // [words]: counters that are set to 0
    int* wrong;              // [1]: set to 1 if a query is out of range, or null
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
    bool finite = length < LARGEST;  // an infinite or too long query is replaced by zeros
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
    // `up` is a power of two such that every coordinate of the rotated query, multiplied by `up`, is below
    // 2^14.
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
    for (int start = 0; start < 256; start += 32) {  // among equal similarities, the lower id counts as better
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
