// The rate at which memory can be read at all, what a share of the read-only ceiling refers to
// (benchmarks/decode/timing.py), and that of reading as the scan does and doing nothing else.
//
// `total`: neighboring lanes load neighboring words of 16 bytes, LOADS of them in flight per thread, and
// sum them so that no load can be left out. Grid: any. Reads 16 bytes per word, once; writes one
// sum per warp.
// Compile-time: LOADS.
#include "common/common.cuh"

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

// `pieces`: of each of `count` records of `apart` bytes the first `piece`, by copies to shared memory, two
// ahead of each warp, as scan.cu reads codes. Grid: any. Dynamic shared memory: 16 `piece` bytes.
// sum uint32 [1], added to: of the 4-byte parts of each record's first 512 bytes; piece at least so many,
// and a multiple of 16 as `apart` is.
extern "C" __global__ void __launch_bounds__(256)
pieces(const char* data, i64 count, i64 apart, i64 piece, u32* sum) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[8][2];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 warps = gridDim.x * 8, first = blockIdx.x * 8 + warp;
    Shared stages = shared_place(memory) + u32(warp * 2 * piece), barrier = shared_place(barriers[warp]);
    u32 mine = 0;
    if (lane == 0) begin_barrier(barrier), begin_barrier(barrier + 8);
    __syncwarp();
    auto fetch = [&](i64 record, int stage) {
        if (record >= count) return;
        if (lane == 0) expect(barrier + 8 * stage, u32(piece));
        copy(stages + u32(stage * piece), data + record * apart, u32(piece), barrier + 8 * stage);
    };
    fetch(first, 0);
    fetch(first + warps, 1);
    for (i64 record = first, n = 0; record < count; record += warps, n++) {
        int stage = n % 2;
        wait(barrier + 8 * stage, n / 2 % 2);
        uint4 word = load_from<uint4>(stages + u32(stage * piece + 16 * lane));
        mine += word.x + word.y + word.z + word.w;
        __syncwarp();
        fetch(record + 2 * warps, stage);
    }
    mine = warp_sum(mine);
    if (lane == 0) atomicAdd(sum, mine);
}
