// The rate at which memory can be read at all: what a share of the read-only ceiling refers to
// (benchmarks/decode/timing.py).
//
// Neighbouring lanes load neighbouring words of 16 bytes, LOADS of them in flight per thread, and
// sum them so that no load can be left out. Grid: any. Reads 16 bytes per word, once; writes one
// sum per warp.
// Compile-time: LOADS.
#include "common.cuh"

// data: count words of 16 bytes; sum uint32 [1], added to: of all 4-byte parts, modulo 2^32.
extern "C" __global__ void __launch_bounds__(512)
total(const uint4* data, i64 count, u32* sum) {
    i64 apart = i64(gridDim.x) * blockDim.x;
    i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 mine = 0;
    for (; i + (LOADS - 1) * apart < count; i += LOADS * apart) {
        uint4 words[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) words[j] = data[i + j * apart];
#pragma unroll
        for (int j = 0; j < LOADS; j++) mine += words[j].x + words[j].y + words[j].z + words[j].w;
    }
    for (; i < count; i += apart) mine += data[i].x + data[i].y + data[i].z + data[i].w;
    mine = warp_sum(mine);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}
