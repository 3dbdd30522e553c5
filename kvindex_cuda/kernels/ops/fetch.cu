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

// table [B, G, n] of rows of `pieces` pieces, with strides in pieces; ids int64 [B, G, count]; out
// [B, G, count, pieces]. An id that is no row's gives zeros.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const Piece* table, i64 by_batch, i64 by_head, i64 by_row, const i64* ids, Piece* out,
            i64 pieces, i64 count, i64 n, i64 kv_heads, i64 total) {
    for (i64 i = i64(blockIdx.x) * 256 + threadIdx.x; i < total; i += i64(gridDim.x) * 256) {
        i64 slot = i / pieces, bg = slot / count, id = ids[slot];
        Piece found = {};
        if (id >= 0 && id < n)
            found = table[bg / kv_heads * by_batch + bg % kv_heads * by_head + id * by_row +
                          i - slot * pieces];
        out[i] = found;
    }
}

// The same of rows in blocks [G, 256, pieces], whose addresses are in table int64 [B, n / 256].
extern "C" __global__ void __launch_bounds__(256)
gather_blocks(const i64* table, i64 by_batch, const i64* ids, Piece* out, i64 pieces, i64 count,
              i64 n, i64 kv_heads, i64 total) {
    for (i64 i = i64(blockIdx.x) * 256 + threadIdx.x; i < total; i += i64(gridDim.x) * 256) {
        i64 slot = i / pieces, bg = slot / count, id = ids[slot];
        Piece found = {};
        if (id >= 0 && id < n) {
            i64 block = table[bg / kv_heads * by_batch + id / TOKENS];
            i64 row = bg % kv_heads * TOKENS + id % TOKENS;
            found = reinterpret_cast<const Piece*>(block)[row * pieces + i - slot * pieces];
        }
        out[i] = found;
    }
}
