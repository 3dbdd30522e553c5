// Estimate inner products of queries and keys from the codes of the keys (`estimate`), and the standard
// deviations of these estimates (`errors`) (ParisKV paper, B.2.2, equation 10). These kernels accept any number
// of magnitude bits and of coordinates per weight. (A fused decode step uses step/rerank.cu instead.)
// Reference: kvindex.ops.rerank.estimate and errors.
//
// A thread processes one key for up to 8 heads. The bits of the key stay in registers, its coordinates are
// decoded once for all heads, and all lanes read the same queries and levels from shared memory.
// Grid: (BG, splits, heads / HEADS rounded up), 256 threads.
// Reads M (1 + BITS) bytes and W weights per key, writes 4 bytes per key and head. Sums are float32, in the
// order of coordinates.
// Limited by arithmetic: D (HEADS + BITS + 3) operations per key, compared with M (1 + BITS) bytes.
// Compile-time constants: D, BITS (of a magnitude), HEADS (per thread block), BLOCK (coordinates that share a
// weight), DTYPE (of weights).
#include "common/common.cuh"

constexpr int M = D / 8;
constexpr int PIECE = M % 16 == 0 ? 16 : M % 8 == 0 ? 8 : M % 4 == 0 ? 4 : M % 2 == 0 ? 2 : 1;
constexpr int WORDS = (M + 3) / 4;
constexpr int LEVELS = 1 << BITS;
constexpr int W = D / BLOCK;

// Load M bytes into words. The first byte is the lowest byte of words[0].
__device__ __forceinline__ void bytes_of(u32 (&words)[WORDS], const u8* from) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = 0;
#pragma unroll
    for (int b = 0; b < M; b += PIECE) {
        if constexpr (PIECE == 16) {
            uint4 all = *reinterpret_cast<const uint4*>(from + b);
            words[b / 4] = all.x, words[b / 4 + 1] = all.y;
            words[b / 4 + 2] = all.z, words[b / 4 + 3] = all.w;
        } else if constexpr (PIECE == 8) {
            uint2 all = *reinterpret_cast<const uint2*>(from + b);
            words[b / 4] = all.x, words[b / 4 + 1] = all.y;
        } else if constexpr (PIECE == 4) {
            words[b / 4] = *reinterpret_cast<const u32*>(from + b);
        } else if constexpr (PIECE == 2) {
            words[b / 4] |= u32(*reinterpret_cast<const u16*>(from + b)) << b % 4 * 8;
        } else {
            words[b / 4] |= u32(from[b]) << b % 4 * 8;
        }
    }
}

// The code of a key: sign bits and magnitude bits, 32 coordinates per word. The function `coordinate` decodes
// the coordinate at bit b of word w.
struct Key {
    u32 sign[WORDS], plane[BITS > 0 ? BITS : 1][WORDS];

    __device__ __forceinline__ void load(const u8* signs, const u8* magnitudes, i64 key) {
        bytes_of(sign, signs + key * M);
#pragma unroll
        for (int p = 0; p < BITS; p++) bytes_of(plane[p], magnitudes + (key * BITS + p) * M);
    }
    __device__ __forceinline__ float coordinate(const float* levels, int w, int b) const {
        int level = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++) level |= (plane[p][w] >> b & 1) << p;
        // a sign bit of 0 means a negative coordinate
        return __uint_as_float(__float_as_uint(levels[level]) ^ (~sign[w] >> b & 1) << 31);
    }
};

// Copy the queries of up to HEADS heads to shared memory, as [D][HEADS] with zeros for missing heads. Also copy
// the levels, the LEVELS values that the magnitude of a coordinate can have. Return the number of heads.
static __device__ int fill(float* queries, float* levels, const float* given, const float* sizes,
                           i64 heads) {
    i64 head = i64(blockIdx.z) * HEADS;
    int many = int(min(i64(HEADS), heads - head));
    given += (blockIdx.x * heads + head) * D;
    for (int i = threadIdx.x; i < D * HEADS; i += 256)
        queries[i] = i % HEADS < many ? given[i % HEADS * D + i / HEADS] : 0.0f;
    for (int i = threadIdx.x; i < LEVELS; i += 256) levels[i] = sizes[i];
    __syncthreads();
    return many;
}

struct EstimateArguments {
    const float* queries;    // [BG, heads, D]
    const u8* signs;         // [BG, n, M]
    const u8* magnitudes;    // [BG, n, BITS, M]
    const void* weights;     // DTYPE [BG, n, W]
    const float* levels;     // [LEVELS]
    float* estimates;        // [BG, heads, n]
    i64 n, heads;
};

extern "C" __global__ void __launch_bounds__(256)
estimate(const __grid_constant__ EstimateArguments args) {
    __shared__ float queries[D * HEADS];
    __shared__ float levels[LEVELS];
    i64 bg = blockIdx.x;
    int many = fill(queries, levels, args.queries, args.levels, args.heads);
    for (i64 i = i64(blockIdx.y) * 256 + threadIdx.x; i < args.n; i += i64(gridDim.y) * 256) {
        Key key;
        key.load(args.signs, args.magnitudes, bg * args.n + i);
        i64 row = (bg * args.n + i) * W;
        float found[HEADS] = {}, weight = element(args.weights, row);
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll 8
            for (int b = 0; b < 32; b++) {
                int j = w * 32 + b;
                if (j >= D) break;
                if (W > 1 && j % BLOCK == 0) weight = element(args.weights, row + j / BLOCK);
                float v = key.coordinate(levels, w, b) * weight;
                const float* q = queries + j * HEADS;
#pragma unroll
                for (int h = 0; h < HEADS; h++) found[h] += v * q[h];
            }
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            if (h < many) args.estimates[(bg * args.heads + i64(blockIdx.z) * HEADS + h) * args.n + i] = found[h];
    }
}

struct ErrorArguments {
    const float* queries;    // as for `estimate`
    const u8* signs;
    const u8* magnitudes;
    const void* weights;
    const float* levels;
    float* errors;           // [BG, heads, n]
    i64 n, heads;
    float share;             // 1 + τ
    float spread;            // τ / (BLOCK − 1)
};

// Compute the standard deviation σ of each estimated inner product of a query with a key:
//     σ² = Σ_b ‖k_b‖² · max(0, ‖q_b‖² − ⟨v_b, q_b⟩² / ‖v_b‖²) · τ / (BLOCK − 1), with
//     ‖k_b‖² = w_b² ‖v_b‖² / (1 + τ).
// Query and key are divided into blocks of BLOCK coordinates, which b numbers:
//   q_b: coordinates of the query in block b.
//   v_b: decoded coordinates of the key in block b, without their weight.
//   w_b: stored weight of block b.
//   τ: mean squared tangent of the angle between v_b and the key's block b (docs/symbols.md).
extern "C" __global__ void __launch_bounds__(256)
errors(const __grid_constant__ ErrorArguments args) {
    const void* weights = args.weights;
    i64 n = args.n, heads = args.heads;
    float share = args.share, spread = args.spread;
    __shared__ float queries[D * HEADS];
    __shared__ float levels[LEVELS];
    __shared__ float squares[W * HEADS];  // ‖q_b‖²
    i64 bg = blockIdx.x;
    int many = fill(queries, levels, args.queries, args.levels, heads);
    for (int i = threadIdx.x; i < W * HEADS; i += 256) {
        float sum = 0;
        for (int j = 0; j < BLOCK; j++) {
            float q = queries[(i / HEADS * BLOCK + j) * HEADS + i % HEADS];
            sum += q * q;
        }
        squares[i] = sum;
    }
    __syncthreads();
    for (i64 i = i64(blockIdx.y) * 256 + threadIdx.x; i < n; i += i64(gridDim.y) * 256) {
        Key key;
        key.load(args.signs, args.magnitudes, bg * n + i);
        float found[HEADS] = {}, along[HEADS] = {}, size = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll 8
            for (int b = 0; b < 32; b++) {
                int j = w * 32 + b;
                if (j >= D) break;
                float v = key.coordinate(levels, w, b);
                const float* q = queries + j * HEADS;
                size += v * v;
#pragma unroll
                for (int h = 0; h < HEADS; h++) along[h] += v * q[h];
                if (j % BLOCK != BLOCK - 1) continue;
                float weight = element(weights, (bg * n + i) * W + j / BLOCK);
                float length = weight * weight * size / share;  // ‖k_b‖²
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    float across = squares[j / BLOCK * HEADS + h] - along[h] * along[h] / size;
                    found[h] += length * fmaxf(across, 0.0f);
                    along[h] = 0;
                }
                size = 0;
            }
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            if (h < many)
                args.errors[(bg * heads + i64(blockIdx.z) * HEADS + h) * n + i] = sqrtf(found[h] * spread);
    }
}
