// Rows of tokens that follow one another to their places in blocks, on the device or in host memory
// that it sees: an update of the local window, without a stream and events of its own.
//
// Neighbouring threads take neighbouring pieces of a row, and then of the next.
// Grid: any, 256 threads. Reads and writes each row once, 8 bytes of a table besides. Limited by the
// bus where blocks lie on the host: few blocks of threads fill it, and leave the others to a step.
// Compile-time: nothing.
#include "common.cuh"

constexpr int THREADS = 256;

// rows [B, G, count, pieces] of 16 bytes, of the tokens from `start` on; table int64 [B, row]: addresses
// of blocks [G, 256, pieces].
extern "C" __global__ void __launch_bounds__(THREADS)
keep(const uint4* __restrict__ rows, const i64* __restrict__ table, i64 row, i64 start, i64 count,
     i64 pieces, i64 kv_heads, i64 total) {
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < total; i += i64(gridDim.x) * THREADS) {
        i64 slot = i / pieces, bg = slot / count, id = start + slot - bg * count;
        i64 block = table[bg / kv_heads * row + id / TOKENS];
        i64 place = (bg % kv_heads * TOKENS + id % TOKENS) * pieces + i - slot * pieces;
        reinterpret_cast<uint4*>(block)[place] = rows[i];
    }
}
