// Normalize vectors and rotate them, in two kernels (ParisKV paper, A.1): `normalize` computes k/‖k‖, `rotate`
// multiplies by a matrix R. (append/encode.cu does both in one kernel.) Reference:
// kvindex.ops.transform.normalize and rotate.
//
// The vectors are the last dimension of a tensor with four dimensions. They are numbered in row-major order; the
// outer three dimensions may have any strides. Compile-time constants: DTYPE (of the vectors).
#include "common/common.cuh"

// Return the offset of vector number i in a tensor [.., second, third, D] with strides s1, s2 and s3.
__device__ __forceinline__ i64 start_of(i64 i, i64 second, i64 third, i64 s1, i64 s2, i64 s3) {
    return i / third / second * s1 + i / third % second * s2 + i % third * s3;
}

// Convert float32 to double and back, preserving subnormal numbers. (When CuPy calls NVRTC, ordinary
// conversions flush them to zero.)
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

struct NormalizeArguments {
    const void* vectors;   // DTYPE [.., second, third, D]
    float* directions;     // [count, D]
    float* norms;          // [count]
    i64 count, dim, second, third;
    i64 outer_first, outer_second, outer_third;  // strides of the outer dimensions
};

// Normalize vectors. Squares are summed in double precision, where they do not overflow, in a fixed order.
// Grid: one warp per vector, 8 warps per thread block.
// Reads each vector twice (the second time from L1); writes 4 D bytes of direction and 4 bytes of norm.
extern "C" __global__ void __launch_bounds__(256)
normalize(const __grid_constant__ NormalizeArguments args) {
    i64 vector = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (vector >= args.count) return;
    i64 first = start_of(vector, args.second, args.third, args.outer_first, args.outer_second, args.outer_third);
    double sum = 0;
    for (i64 j = lane; j < args.dim; j += 32) {
        double x = widened(element(args.vectors, first + j));
        sum += x * x;
    }
    double norm = sqrt(warp_sum(sum)), divisor = fmax(norm, 2.2250738585072014e-308);
    for (i64 j = lane; j < args.dim; j += 32)
        args.directions[vector * args.dim + j] = narrowed(widened(element(args.vectors, first + j)) / divisor);
    if (lane == 0) args.norms[vector] = narrowed(fmin(norm, double(LONGEST)));
}

constexpr int DEEP = 32;  // coordinates that are processed at a time

struct RotateArguments {
    const void* vectors;   // as for `normalize`
    const float* matrix;   // [D, D]
    float* rotated;        // [count, D]
    i64 count, dim, second, third;
    i64 outer_first, outer_second, outer_third;
};

// Multiply vectors by a matrix. A thread block multiplies 32 vectors by 64 matrix rows, 32 columns at a time
// from shared memory. Each thread computes 2 x 4 sums in the order of columns, so that the result for a vector
// does not depend on the other vectors of the batch.
// Grid: (count / 32, D / 64), 256 threads.
// Reads each vector D / 64 times, and D² / 8 bytes of the matrix per vector (from L2); writes 4 D bytes per
// vector.
// Computes D² products per vector; 8 products take 1.5 loads from shared memory.
extern "C" __global__ void __launch_bounds__(256)
rotate(const __grid_constant__ RotateArguments args) {
    __shared__ float mine[TALL][DEEP + 1];
    __shared__ float rows[BROAD][DEEP + 1];
    __shared__ i64 starts[TALL];
    i64 vector = i64(blockIdx.x) * TALL, output = i64(blockIdx.y) * BROAD;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < TALL)
        starts[threadIdx.x] = start_of(vector + threadIdx.x, args.second, args.third, args.outer_first,
                                       args.outer_second, args.outer_third);
    float sums[2][4] = {};
    for (i64 from = 0; from < args.dim; from += DEEP) {
        __syncthreads();
        bool in = from + lane < args.dim;
        for (int v = warp; v < TALL; v += 8)
            mine[v][lane] =
                in && vector + v < args.count ? element(args.vectors, starts[v] + from + lane) : 0.0f;
        for (int o = warp; o < BROAD; o += 8)
            rows[o][lane] =
                in && output + o < args.dim ? args.matrix[(output + o) * args.dim + from + lane] : 0.0f;
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
            if (vector + y * 2 + a < args.count && output + x + 16 * b < args.dim)
                args.rotated[(vector + y * 2 + a) * args.dim + output + x + 16 * b] = sums[a][b];
}
