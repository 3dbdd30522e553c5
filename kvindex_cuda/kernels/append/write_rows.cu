// Write the rows (keys and values) of consecutive tokens into an index's blocks of rows, in device memory or in
// pinned host memory. Small appends use this kernel. Larger ones use copies on a separate stream, which must be
// synchronized with events.
//
// Neighboring threads write neighboring 16-byte chunks of a row, then of the next row.
//
// Grid: any number of thread blocks, THREADS threads. Reads and writes each row once, and reads 8 bytes of the
// block table per row.
// Limited by memory, or by the PCIe bus if blocks are on the host. Few thread blocks saturate the bus and leave
// the multiprocessors to the decode step.
// Compile-time constants: only those of kvindex_cuda/runtime/constants.py.
#include "common/common.cuh"

struct Arguments {
    const uint4* one;       // [B, G, count, width]: first parts of the rows, from token `start` on
    const uint4* other;     // [B, G, count, pieces - width]: second parts, or null if rows come in one part
    const i64* rows;        // [B, row]: addresses of blocks [G, TOKENS, pieces]
    i64 row, start, count, width, pieces, kv_heads;
    i64 total;              // number of 16-byte units in all rows
    i64 one_batch, one_head, one_token, other_batch, other_head, other_token;  // strides
};

// The arguments `width` (length of a row's first part), `pieces` (length of a whole row) and all strides count
// units of 16 bytes.
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
