// Rows by id, whatever they hold (paper, B.3; ops.fetch): copied as pieces of PIECE bytes.
//
// Neighbouring threads take neighboring pieces of a row, and then of the next, so that rows of 8
// bytes and of 1 KB are both read in whole sectors.
// Grid: any, 256 threads. Reads 8 bytes per id and the row, writes the row. The bound is memory:
// a row of 512 bytes moves 512 in and out, one of 16 a sector of 32 in.
// Compile-time: PIECE (1, 2, 4, 8 or 16 bytes, which divides rows, strides and addresses).
#include "common/common.cuh"

#if PIECE == 16
typedef uint4 Piece;
#elif PIECE == 8
typedef uint2 Piece;
#elif PIECE == 4
typedef u32 Piece;
#elif PIECE == 2
typedef u16 Piece;
#else
typedef u8 Piece;
#endif

struct RowArguments {
    const Piece* rows;       // [B, G, n, pieces]
    const i64* ids;          // [B, G, count]
    Piece* gathered;         // [B, G, count, pieces]
    i64 rows_batch, rows_head, rows_token;  // strides in pieces
    i64 pieces, count, n, kv_heads;
    i64 total;               // pieces of all rows gathered
};

// An id that is no row's gives zeros.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const __grid_constant__ RowArguments args) {
    for (i64 i = i64(blockIdx.x) * 256 + threadIdx.x; i < args.total; i += i64(gridDim.x) * 256) {
        i64 slot = i / args.pieces, bg = slot / args.count, id = args.ids[slot];
        Piece found = {};
        if (id >= 0 && id < args.n)
            found = args.rows[bg / args.kv_heads * args.rows_batch +
                              bg % args.kv_heads * args.rows_head + id * args.rows_token +
                          i - slot * args.pieces];
        args.gathered[i] = found;
    }
}

struct BlockArguments {
    const i64* rows;         // [B, n / TOKENS]: addresses of blocks [G, TOKENS, pieces]
    const i64* ids;          // [B, G, count]
    Piece* gathered;         // [B, G, count, pieces]
    i64 rows_batch;          // a stride
    i64 pieces, count, n, kv_heads;
    i64 total;               // pieces of all rows gathered
};

// The same of rows in blocks.
extern "C" __global__ void __launch_bounds__(256)
gather_blocks(const __grid_constant__ BlockArguments args) {
    for (i64 i = i64(blockIdx.x) * 256 + threadIdx.x; i < args.total; i += i64(gridDim.x) * 256) {
        i64 slot = i / args.pieces, bg = slot / args.count, id = args.ids[slot];
        Piece found = {};
        if (id >= 0 && id < args.n) {
            i64 block = args.rows[bg / args.kv_heads * args.rows_batch + id / TOKENS];
            i64 row = bg % args.kv_heads * TOKENS + id % TOKENS;
            found = reinterpret_cast<const Piece*>(block)[row * args.pieces + i - slot * args.pieces];
        }
        args.gathered[i] = found;
    }
}
