// Encode rotated keys as signs, magnitudes and weights (ParisKV paper, A.2 and A.3), and convert weights to and
// from log codes. A log code is the logarithm of a weight as an integer. Reference: kvindex.ops.codes.encode,
// log_codes and log_weights.
//
// Signs and magnitudes equal the reference bit by bit. For this, the kernel sums squares in double precision,
// divides in float32, and compares with the boundaries between levels in float32.
// Compile-time constants: only those of kvindex_cuda/runtime/constants.py.
#include "common/common.cuh"

constexpr int LEVELS = 1 << MOST_BITS;

struct EncodeArguments {
    const float* rotated;   // [count, 8 M]
    const float* norms;     // [count]
    const float* levels;    // [2^bits]: magnitude levels, ascending
    u8* signs;              // [count, M]
    u8* magnitudes;         // [count, bits, M]
    float* weights;         // [count, M / share]
    i64 count, M, bits, share;
};

// Encode rotated keys. A thread encodes 8 coordinates: one byte of signs, and one byte of each magnitude plane.
// The coordinates of several threads may belong to one subvector, which has one weight. Then each of these threads
// computes the norm of the subvector. They all add the same numbers in the same order, so that their results are
// equal. The first of these threads writes the weight.
// Grid: any number of thread blocks, THREADS threads. A thread block encodes THREADS / M vectors at a time.
// Reads 4 D + 4 bytes per vector; writes (1 + bits) D / 8 bytes per vector and 4 bytes per weight.
extern "C" __global__ void __launch_bounds__(THREADS)
encode(const __grid_constant__ EncodeArguments args) {
    __shared__ double squares[THREADS], products[THREADS];
    __shared__ float level[LEVELS], edges[LEVELS];
    int last = (1 << args.bits) - 1;
    for (int i = threadIdx.x; i <= last; i += THREADS) level[i] = args.levels[i];
    __syncthreads();
    for (int i = threadIdx.x; i < last; i += THREADS)
        edges[i] = __fmul_rn(__fadd_rn(level[i + 1], level[i]), 0.5f);
    int vectors = THREADS / int(args.M), byte = threadIdx.x % int(args.M), local = threadIdx.x / int(args.M);
    int first = threadIdx.x - byte % int(args.share);  // thread with the first byte of this thread's weight
    for (i64 base = i64(blockIdx.x) * vectors; base < args.count; base += i64(gridDim.x) * vectors) {
        i64 vector = base + local;
        bool in = local < vectors && vector < args.count;
        float x[8];
        double sum = 0;
        for (int j = 0; j < 8; j++) {
            x[j] = in ? args.rotated[(vector * args.M + byte) * 8 + j] : 0.0f;
            sum += double(x[j]) * double(x[j]);
        }
        __syncthreads();
        squares[threadIdx.x] = sum;
        __syncthreads();
        sum = 0;
        for (int i = 0; in && i < args.share; i++) sum += squares[first + i];
        float radius = float(sqrt(sum)), divisor = fmaxf(radius, 1.17549435e-38f);
        u32 sign = 0;
        u64 planes = 0;  // one byte per plane
        sum = 0;
        for (int j = 0; j < 8; j++) {
            float size = fabsf(__fdiv_rn(x[j], divisor));
            int index = 0;  // number of edges below the size
            for (int p = int(args.bits) - 1; p >= 0; p--)
                if (!(edges[(index | 1 << p) - 1] >= size)) index |= 1 << p;
            sign |= u32(x[j] >= 0) << j;
            for (int p = 0; p < args.bits; p++) planes |= u64(index >> p & 1) << (8 * p + j);
            sum += double(__fmul_rn(level[index], size));
        }
        products[threadIdx.x] = sum;
        __syncthreads();
        if (!in) continue;
        args.signs[vector * args.M + byte] = u8(sign);
        for (int p = 0; p < args.bits; p++)
            args.magnitudes[(vector * args.bits + p) * args.M + byte] = u8(planes >> (8 * p));
        if (byte % args.share) continue;
        sum = 0;
        for (int i = 0; i < args.share; i++) sum += products[first + i];
        float weight = __fdiv_rn(__fmul_rn(args.norms[vector], radius), float(sum));
        args.weights[vector * (args.M / args.share) + byte / args.share] = radius > 0 ? weight : 0.0f;
    }
}

struct LogArguments {
    const float* weights;  // [count]
    int* codes;            // [count]
    i64 count, bits;
};

// Convert weights to log codes: integers that encode the logarithm of a weight.
// Grid: one thread per weight. Reads 4 bytes and writes 4 bytes per weight.
extern "C" __global__ void __launch_bounds__(THREADS)
log_codes(const __grid_constant__ LogArguments args) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= args.count) return;
    double top = double((1 << args.bits) - 1), steps = double(1 << args.bits) / OCTAVES;
    double code = log2(double(args.weights[i])) * steps + double(1 << (args.bits - 1));
    bool some = int(__float_as_uint(args.weights[i])) > 0;  // true also for a subnormal weight
    args.codes[i] = some ? int(fmin(fmax(rint(code), 1.0), top)) : 0;
}

struct WeightArguments {
    float* weights;     // [count]
    const int* codes;   // [count]
    i64 count, bits;
};

// Convert log codes, which are integers that encode the logarithm of a weight, to weights.
// Grid: one thread per weight. Reads 4 bytes and writes 4 bytes per weight.
extern "C" __global__ void __launch_bounds__(THREADS)
log_weights(const __grid_constant__ WeightArguments args) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= args.count) return;
    float steps = float(1 << args.bits) / OCTAVES;  // both are powers of two
    float octaves = __fdiv_rn(float(args.codes[i] - (1 << (args.bits - 1))), steps);
    args.weights[i] = args.codes[i] ? exp2f(octaves) : 0.0f;
}
