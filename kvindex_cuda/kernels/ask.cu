// Queries of a group, made ready: rotated, rounded, laid out for the matrix instruction.
//
// q̃ = R q/‖q‖ (paper, A.1), r = round(q̃ · largest / max|q̃|) (ops.coarse.rounded).
// Grid: one block of D threads (rounded up to a warp) per row of the batch and KV head.
// Reads  4 D² bytes of the rotation (from L2 after the first block) and the queries;
// writes 4 g D bytes rotated, D bytes per head as 8 bit planes, and clears what the step counts.
// Compile-time: D, GROUP (query heads per KV head), DTYPE.
#include "common.cuh"

constexpr int WORDS = (D / 8 + 3) / 4;        // of sign bits of a key
constexpr int QUADS = (WORDS + 3) / 4;        // groups of 4 words: one lane of a quad each
constexpr int SETS = (GROUP + 3) / 4;         // of 4 query heads
constexpr int WARPS = (D + 31) / 32;

template <class T, class F>
__device__ T over_block(T x, F combine, T* space) {
    for (int step = 16; step; step /= 2) x = combine(x, __shfl_xor_sync(ALL, x, step));
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
    x = space[0];
    for (int i = 1; i < WARPS; i++) x = combine(x, space[i]);
    __syncthreads();
    return x;
}

// queries DTYPE [B, H, D]; turn float32 [D, D], the rotation transposed; reference float32 [BG] of
// the weights or null; turned float32 [BG, GROUP, D]; fragments uint32 [BG, SETS, QUADS, 4, 32]:
// bit planes of r in two's complement; sums int32 [BG, 4 SETS]; units float32 [BG, GROUP]: votes per
// unit of q·k; cleared int32 [BG, words]: what the step counts.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
ask(const void* queries, const float* turn, const float* reference, float* turned,
    u32* fragments, int* sums, float* units, int* cleared, long long words, long long largest,
    float level, float factor, long long heads, long long kv_heads) {
    __shared__ float direction[GROUP][D];
    __shared__ i8 rounded[SETS * 4][QUADS * 128];
    __shared__ double wide[WARPS];
    __shared__ int whole[WARPS];
    i64 bg = blockIdx.x;
    i64 first = (bg / kv_heads * heads + bg % kv_heads * GROUP) * D;
    int j = threadIdx.x;
    for (i64 i = j; i < words; i += WARPS * 32) cleared[bg * words + i] = 0;
    for (int i = j; i < SETS * 4 * QUADS * 128; i += WARPS * 32) (&rounded[0][0])[i] = 0;

    double norms[GROUP];
    for (int h = 0; h < GROUP; h++) {
        double x = j < D ? double(element(queries, first + h * D + j)) : 0.0;
        norms[h] = sqrt(over_block(x * x, [](double a, double b) { return a + b; }, wide));
        if (j < D) direction[h][j] = float(x / fmax(norms[h], 2.2250738585072014e-308));
    }
    __syncthreads();
    float rotated[GROUP] = {};
    if (j < D)
        for (int i = 0; i < D; i++) {
            float entry = turn[i * D + j];
            for (int h = 0; h < GROUP; h++) rotated[h] += direction[h][i] * entry;
        }
    for (int h = 0; h < GROUP; h++) {
        float norm = float(fmin(norms[h], 1152921504606846976.0));  // transform.LONGEST
        auto larger = [](double a, double b) { return a > b ? a : b; };
        double peak = over_block(j < D ? double(fabsf(rotated[h])) : 0.0, larger, wide);
        int r = j < D && peak > 0 ? int(rint(double(rotated[h]) * (double(largest) / peak))) : 0;
        int sum = over_block(r, [](int a, int b) { return a + b; }, whole);
        if (j < D) {
            turned[(bg * GROUP + h) * D + j] = rotated[h] * norm;
            rounded[h][j] = i8(r);
        }
        if (j == 0) {
            sums[bg * SETS * 4 + h] = sum;
            double unit = reference ? peak * norm * level * reference[bg] / (largest * factor) : 0;
            units[bg * GROUP + h] = unit > 0 ? float(1 / unit) : 0.0f;
        }
    }
    if (j >= GROUP && j < SETS * 4) sums[bg * SETS * 4 + j] = 0;
    __syncthreads();
    // column n of part p is plane 2 p + n % 2 of head n / 2: a lane of c then has two planes of one
    for (int i = j; i < SETS * QUADS * 128; i += WARPS * 32) {
        int lane = i % 32, part = i / 32 % 4, quad = i / 128 % QUADS, n = lane / 4;
        int head = i / 128 / QUADS * 4 + n / 2, plane = 2 * part + n % 2;
        u32 packed = 0;
        for (int b = 0; b < 32; b++) {
            int r = rounded[head][(quad * 4 + lane % 4) * 32 + b];
            packed |= u32(r >> plane & 1) << b;
        }
        fragments[bg * SETS * QUADS * 128 + i] = packed;
    }
}
