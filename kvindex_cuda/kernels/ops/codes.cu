// Sign and magnitude codes of rotated keys, and log weights (paper, A.2 and A.3; ops/codes.py).
//
// Everything that decides a bit is computed as the reference does: radii from squares summed in
// double, a float32 division, comparisons with float32 edges.
// Compile-time: nothing.
#include "common/common.cuh"

constexpr int THREADS = 256;
constexpr int LEVELS = 128;  // at most: 7 bits

// A thread takes 8 coordinates, a byte of signs and of each plane; THREADS / M vectors a block. A
// weight's block of `share` bytes is summed by each of its threads, in the order of the bytes: the
// same in all.
// Grid: any, blocks of THREADS; vectors = THREADS / M of a block. Reads 4 D + 4 bytes per vector,
// writes (1 + bits) D / 8 + 4 D / block.
// rotated float32 [count, 8 M]; norms float32 [count]; levels float32 [2^bits], ascending; signs
// uint8 [count, M]; magnitudes uint8 [count, bits, M]; weights float32 [count, M / share].
extern "C" __global__ void __launch_bounds__(THREADS)
encode(const float* rotated, const float* norms, const float* levels, u8* signs, u8* magnitudes,
       float* weights, i64 count, i64 M, i64 bits, i64 share) {
    __shared__ double squares[THREADS], products[THREADS];
    __shared__ float level[LEVELS], edges[LEVELS];
    int last = (1 << bits) - 1;
    for (int i = threadIdx.x; i <= last; i += THREADS) level[i] = levels[i];
    __syncthreads();
    for (int i = threadIdx.x; i < last; i += THREADS)
        edges[i] = __fmul_rn(__fadd_rn(level[i + 1], level[i]), 0.5f);
    int vectors = THREADS / int(M), byte = threadIdx.x % int(M), local = threadIdx.x / int(M);
    int first = threadIdx.x - byte % int(share);  // thread of the weight's first byte
    for (i64 base = i64(blockIdx.x) * vectors; base < count; base += i64(gridDim.x) * vectors) {
        i64 vector = base + local;
        bool in = local < vectors && vector < count;
        float x[8];
        double sum = 0;
        for (int j = 0; j < 8; j++) {
            x[j] = in ? rotated[(vector * M + byte) * 8 + j] : 0.0f;
            sum += double(x[j]) * double(x[j]);
        }
        __syncthreads();
        squares[threadIdx.x] = sum;
        __syncthreads();
        sum = 0;
        for (int i = 0; in && i < share; i++) sum += squares[first + i];
        float radius = float(sqrt(sum)), divisor = fmaxf(radius, 1.17549435e-38f);
        u32 sign = 0;
        u64 planes = 0;  // a byte each
        sum = 0;
        for (int j = 0; j < 8; j++) {
            float size = fabsf(__fdiv_rn(x[j], divisor));
            int index = 0;  // edges below the size
            for (int p = int(bits) - 1; p >= 0; p--)
                if (!(edges[(index | 1 << p) - 1] >= size)) index |= 1 << p;
            sign |= u32(x[j] >= 0) << j;
            for (int p = 0; p < bits; p++) planes |= u64(index >> p & 1) << (8 * p + j);
            sum += double(__fmul_rn(level[index], size));
        }
        products[threadIdx.x] = sum;
        __syncthreads();
        if (!in) continue;
        signs[vector * M + byte] = u8(sign);
        for (int p = 0; p < bits; p++)
            magnitudes[(vector * bits + p) * M + byte] = u8(planes >> (8 * p));
        if (byte % share) continue;
        sum = 0;
        for (int i = 0; i < share; i++) sum += products[first + i];
        float weight = __fdiv_rn(__fmul_rn(norms[vector], radius), float(sum));
        weights[vector * (M / share) + byte / share] = radius > 0 ? weight : 0.0f;
    }
}

// Grid: a thread per weight. Reads 4 bytes and writes 4; a reference serves `each` weights.
// weights float32 [count]; weight_scales float32 [count / each]; codes int32 [count].
extern "C" __global__ void __launch_bounds__(THREADS)
log_codes(const float* weights, const float* weight_scales, int* codes, i64 count, i64 each, i64 bits,
          float octaves) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= count) return;
    double top = double((1 << bits) - 1), steps = double(1 << bits) / octaves;
    double weight_scale = fmax(double(weight_scales[i / each]), 2.2250738585072014e-308);
    double code = log2(double(weights[i]) / weight_scale) * steps + top;
    codes[i] = weights[i] > 0 ? int(fmin(fmax(rint(code), 1.0), top)) : 0;
}

// Grid and bytes as above. steps: 2^bits / octaves.
extern "C" __global__ void __launch_bounds__(THREADS)
log_weights(const int* codes, const float* weight_scales, float* weights, i64 count, i64 each,
            i64 bits, float steps) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= count) return;
    float octaves = __fdiv_rn(float(codes[i] - ((1 << bits) - 1)), steps);
    weights[i] = codes[i] ? exp2f(octaves) * weight_scales[i / each] : 0.0f;
}
