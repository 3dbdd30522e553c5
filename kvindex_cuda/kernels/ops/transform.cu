// Normalize and rotate (paper, A.1): k̃ = R k/‖k‖, in two kernels (`encode.cu` does both in one).
//
// Vectors are numbered through their three outer dimensions, which may have any strides.
// Compile-time: DTYPE (of the vectors).
#include "common/common.cuh"

// Where vector i of [.., second, third, D] begins.
__device__ __forceinline__ i64 start_of(i64 i, i64 second, i64 third, i64 s1, i64 s2, i64 s3) {
    return i / third / second * s1 + i / third % second * s2 + i % third * s3;
}

// From and to double, subnormal numbers too, which the compiler's own conversions flush (CuPy says so).
__device__ __forceinline__ double widened(float x) {
#ifdef EMULATED
    return x;
#else
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
#endif
}
__device__ __forceinline__ float narrowed(double x) {
#ifdef EMULATED
    return float(x);
#else
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
#endif
}

// Norms are summed in double, which no finite float overflows; lanes in a fixed order.
// Grid: a warp per vector, 8 warps a block. Reads a vector (the second time from L1), writes 4 D
// bytes of direction and 4 of norm.
// vectors DTYPE, strides s1, s2, s3 of its outer dimensions; directions float32 [count, D]; norms
// float32 [count].
extern "C" __global__ void __launch_bounds__(256)
normalize(const void* vectors, float* directions, float* norms, i64 count, i64 dim, i64 second,
          i64 third, i64 s1, i64 s2, i64 s3) {
    i64 vector = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (vector >= count) return;
    i64 first = start_of(vector, second, third, s1, s2, s3);
    double sum = 0;
    for (i64 j = lane; j < dim; j += 32) {
        double x = widened(element(vectors, first + j));
        sum += x * x;
    }
    double norm = sqrt(warp_sum(sum)), divisor = fmax(norm, 2.2250738585072014e-308);
    for (i64 j = lane; j < dim; j += 32)
        directions[vector * dim + j] = narrowed(widened(element(vectors, first + j)) / divisor);
    if (lane == 0) norms[vector] = narrowed(fmin(norm, 1152921504606846976.0));  // LONGEST
}

constexpr int TALL = 32, BROAD = 64, DEEP = 32;  // vectors and outputs of a block, inputs at a time

// Any matrix: a block multiplies 32 vectors by 64 rows of it, both in shared memory by 32 columns;
// a thread has 2 x 4 sums, each in the order of the columns, so that a batch equals its rows.
// Grid: (count / 32, D / 64), 256 threads. Reads 4 D / 64 times the vectors and D² / 8 bytes of
// the matrix per vector (from L2); writes 4 D bytes per vector; D² products of 1.5 loads from
// shared memory to 8 products.
// vectors as above; matrix float32 [D, D]; rotated float32 [count, D].
extern "C" __global__ void __launch_bounds__(256)
rotate(const void* vectors, const float* matrix, float* rotated, i64 count, i64 dim, i64 second,
       i64 third, i64 s1, i64 s2, i64 s3) {
    __shared__ float mine[TALL][DEEP + 1];
    __shared__ float rows[BROAD][DEEP + 1];
    __shared__ i64 starts[TALL];
    i64 vector = i64(blockIdx.x) * TALL, output = i64(blockIdx.y) * BROAD;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < TALL)
        starts[threadIdx.x] = start_of(vector + threadIdx.x, second, third, s1, s2, s3);
    float sums[2][4] = {};
    for (i64 from = 0; from < dim; from += DEEP) {
        __syncthreads();
        bool in = from + lane < dim;
        for (int v = warp; v < TALL; v += 8)
            mine[v][lane] =
                in && vector + v < count ? element(vectors, starts[v] + from + lane) : 0.0f;
        for (int o = warp; o < BROAD; o += 8)
            rows[o][lane] =
                in && output + o < dim ? matrix[(output + o) * dim + from + lane] : 0.0f;
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < DEEP; i++)
#pragma unroll
            for (int a = 0; a < 2; a++)
#pragma unroll
                for (int b = 0; b < 4; b++)
                    sums[a][b] = fmaf(mine[y * 2 + a][i], rows[x + 16 * b][i], sums[a][b]);
    }
    for (int a = 0; a < 2; a++)
        for (int b = 0; b < 4; b++)
            if (vector + y * 2 + a < count && output + x + 16 * b < dim)
                rotated[(vector + y * 2 + a) * dim + output + x + 16 * b] = sums[a][b];
}
