// Gather rows (keys, values, or both as bytes) by token id (ParisKV paper, B.3). Reference:
// kvindex.ops.fetch.gather_rows.
//
// A thread copies PIECE bytes at a time. Neighboring threads copy neighboring bytes of a row, then of the next
// row, so that rows of 8 bytes and rows of 1 KB are both read in whole sectors.
// Grid: any number of thread blocks, 256 threads. Reads 8 bytes per id and the row, writes the row.
// Limited by memory: a row of 512 bytes is 512 bytes read and written; a row of 16 bytes reads a sector of 32
// bytes.
// Compile-time constants: PIECE (1, 2, 4, 8 or 16 bytes; it divides rows, strides and addresses).
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
    i64 rows_batch, rows_head, rows_token;  // strides in units of PIECE bytes
    i64 pieces, count, n, kv_heads;
    i64 total;               // number of units in all gathered rows
};

// Gather rows from a tensor. If an id is outside the tensor, its row is zeros.
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
    const i64* rows;         // [B, n / TOKENS]: addresses of blocks of rows [G, TOKENS, pieces]
    const i64* ids;          // [B, G, count]
    Piece* gathered;         // [B, G, count, pieces]
    i64 rows_batch;          // a stride
    i64 pieces, count, n, kv_heads;
    i64 total;               // number of units in all gathered rows
};

// Gather the rows of the tokens `ids` from blocks of TOKENS rows each. The valid ids are 0 to n − 1. For any
// other id, write zeros.
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
