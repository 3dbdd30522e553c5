// Write rows of tokens to their slots in an engine's pages, which may lie in host memory that the device sees;
// and a cache of rows by slots forgets what was there before (common/row_cache.cuh).
//
// Neighbouring threads take neighboring pieces of a row, and then of the next head.
// Grid: any, THREADS threads. Reads 8 bytes of a slot, 16 of tags for each KV head, each row once; writes it once.
// Limited by the bus where pages lie on the host: few blocks of threads fill it.
// Compile-time: nothing.
#include "common/row_cache.cuh"

struct Arguments {
    const uint4* keys;    // [count, KV heads, width]
    const uint4* values;  // [count, KV heads, pieces - width]
    const i64* slots;     // [count]: below 0 for nowhere
    const i64* base;      // [2]: addresses of a layer's codes and rows
    int* tags;            // [KV heads, cached], aligned to 16 bytes, or null
    i64 count, kv_heads, width, pieces, most;                     // slots that there are
    i64 key_token, key_head, value_token, value_head;             // strides
    i64 parts, rows_page, rows_part, rows_head, row_bytes;        // bytes, but segments of a page
    i64 cached;
};

// Widths, `pieces` and strides are in units of 16 bytes. There are fewer than 2^31 pieces, and slots.
extern "C" __global__ void __launch_bounds__(THREADS)
write_pages(const __grid_constant__ Arguments args) {
    u32 heads = u32(args.kv_heads), pieces = u32(args.pieces), total = u32(args.count) * heads * pieces;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        u32 row = i / pieces, piece = i - row * pieces, t = row / heads, g = row - t * heads;
        i64 slot = args.slots[t];
        if (slot < 0 || slot >= args.most) continue;
        u32 segment = u32(slot) / TOKENS, page = segment / u32(args.parts);
        i64 place = args.base[1] + page * args.rows_page + (segment - page * u32(args.parts)) * args.rows_part +
                    g * args.rows_head + slot % TOKENS * args.row_bytes;
        reinterpret_cast<uint4*>(place)[piece] =
            piece < args.width ? args.keys[t * args.key_token + g * args.key_head + piece]
                               : args.values[t * args.value_token + g * args.value_head + piece - args.width];
        if (piece || !args.cached) continue;
        int* set = args.tags + g * args.cached + set_of(int(slot), args.cached);
#pragma unroll
        for (int w = 0; w < WAYS; w++)
            if (set[w] == int(slot)) set[w] = -1;
    }
}
