// Rows of tokens that follow one another to their places in blocks, on the device or in host memory
// that it sees: an update of the local window, without a stream and events of its own. A row may come
// in two parts, its key and its value.
//
// Neighbouring threads take neighboring pieces of a row, and then of the next.
// Grid: any, 256 threads. Reads and writes each row once, 8 bytes of a table besides. Limited by the
// bus where blocks lie on the host: few blocks of threads fill it, and leave the others to a step.
// Compile-time: nothing.
#include "common/common.cuh"

constexpr int THREADS = 256;

// The tokens are `count` from `start` on. one [B, G, count, width] of 16 bytes, strides ob, og, on; other
// [B, G, count, pieces - width], strides tb, tg, tn, or null: there is one part; table int64 [B, row]:
// addresses of blocks [G, 256, pieces].
extern "C" __global__ void __launch_bounds__(THREADS)
write_rows(const uint4* __restrict__ one, const uint4* __restrict__ other, const i64* __restrict__ table,
     i64 row, i64 start, i64 count, i64 width, i64 pieces, i64 kv_heads, i64 total, i64 ob, i64 og,
     i64 on, i64 tb, i64 tg, i64 tn) {
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < total; i += i64(gridDim.x) * THREADS) {
        i64 slot = i / pieces, piece = i - slot * pieces, bg = slot / count, n = slot - bg * count;
        i64 b = bg / kv_heads, g = bg - b * kv_heads, id = start + n;
        i64 block = table[b * row + id / TOKENS], place = (g * TOKENS + id % TOKENS) * pieces + piece;
        reinterpret_cast<uint4*>(block)[place] =
            piece < width ? one[b * ob + g * og + n * on + piece]
                          : other[b * tb + g * tg + n * tn + piece - width];
    }
}
