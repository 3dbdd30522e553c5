// Write rows of consecutive tokens to their places in blocks, on the device or in host memory
// that it sees: an update of the local window, without a stream and events of its own. A row may come
// in two parts, its key and its value.
//
// Neighbouring threads take neighboring pieces of a row, and then of the next.
// Grid: any, 256 threads. Reads and writes each row once, 8 bytes of a table besides. Limited by the
// bus where blocks lie on the host: few blocks of threads fill it, and leave the others to a step.
// Compile-time: nothing.
#include "common/common.cuh"


struct Arguments {
    const uint4* one;       // [B, G, count, width]: of tokens from `start` on
    const uint4* other;     // [B, G, count, pieces - width], or null: there is one part
    const i64* rows;        // [B, row]: addresses of blocks [G, TOKENS, pieces]
    i64 row, start, count, width, pieces, kv_heads;
    i64 total;              // pieces of all rows
    i64 one_batch, one_head, one_token, other_batch, other_head, other_token;  // strides
};

// Widths, `pieces` and strides are in units of 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
write_rows(const __grid_constant__ Arguments args) {
    const uint4* __restrict__ one = args.one;
    const uint4* __restrict__ other = args.other;
    const i64* __restrict__ table = args.rows;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < args.total; i += i64(gridDim.x) * THREADS) {
        i64 slot = i / args.pieces, piece = i - slot * args.pieces, bg = slot / args.count, n = slot - bg * args.count;
        i64 b = bg / args.kv_heads, g = bg - b * args.kv_heads, id = args.start + n;
        i64 block = table[b * args.row + id / TOKENS], place = (g * TOKENS + id % TOKENS) * args.pieces + piece;
        reinterpret_cast<uint4*>(block)[place] =
            piece < args.width ? one[b * args.one_batch + g * args.one_head + n * args.one_token + piece]
                          : other[b * args.other_batch + g * args.other_head + n * args.other_token + piece - args.width];
    }
}
