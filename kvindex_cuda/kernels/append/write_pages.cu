// Write the keys and values of new tokens into an inference engine's pages, which may be in pinned host memory.
// A token has one row (key and value) per KV head, and its slot number determines where the rows are written. If
// there is a row cache in device memory, it may contain older rows of the same slots. They are removed from it
// (common/row_cache.cuh).
//
// Neighboring threads write neighboring pieces of a row, then of the next KV head's row. A piece has 16 bytes, or
// 8 bytes with FP8_PAGES: then keys and values are converted to FP8.
//
// Grid: any number of thread blocks, THREADS threads. Reads a slot number of 8 bytes per token, 16 bytes of
// cache tags per KV head, and each row once; writes each row once.
// Limited by memory, or by the PCIe bus if pages are on the host, which few thread blocks saturate.
// Compile-time constants: FP8_PAGES (1: pages contain e4m3 numbers), DTYPE (of the new keys and values: 0 float32, 1
// float16, 2 bfloat16; not used without FP8_PAGES).
#include "common/new_rows.cuh"
#include "common/row_cache.cuh"

struct Arguments {
    const uint4* keys;    // [count, KV heads, D]
    const uint4* values;  // [count, KV heads, D]
    const i64* slots;     // [count]: slot of each token, below 0 for none
    const i64* base;      // [2]: addresses of a layer's codes and of its rows
    int* tags;            // [KV heads, cached]: tags of the cache, aligned to 16 bytes, or null
    i64 count, kv_heads, width, pieces, most;  // width, pieces: size of a key, and of a row; most: number of slots
    i64 key_token, key_head, value_token, value_head;             // strides
    i64 parts, rows_page, rows_part, rows_head, row_bytes;  // parts: segments per page; the others are strides in bytes
    i64 cached;
    const float* key_scale;    // [1]: scale of the keys; only if FP8_PAGES
    const float* value_scale;  // [1]: scale of the values; only if FP8_PAGES
};

// The arguments `width` and `pieces` count pieces, and the strides of keys and values count units of 16 bytes. All
// rows to copy have fewer than 2^31 pieces.
extern "C" __global__ void __launch_bounds__(THREADS)
write_pages(const __grid_constant__ Arguments args) {
    float key_scale = FP8_PAGES ? *args.key_scale : 1.0f, value_scale = FP8_PAGES ? *args.value_scale : 1.0f;
    u32 heads = u32(args.kv_heads), pieces = u32(args.pieces), total = u32(args.count) * heads * pieces;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        u32 row = i / pieces, piece = i - row * pieces, t = row / heads, g = row - t * heads;
        i64 slot = args.slots[t];
        if (slot < 0 || slot >= args.most) continue;
        u32 segment = u32(slot) / TOKENS, page = segment / u32(args.parts);
        i64 place = args.base[1] + page * args.rows_page + (segment - page * u32(args.parts)) * args.rows_part +
                    g * args.rows_head + slot % TOKENS * args.row_bytes;
        bool value = piece >= args.width;
        const uint4* from = value ? args.values + t * args.value_token + g * args.value_head +
                                        (piece - args.width) * WIDTH
                                  : args.keys + t * args.key_token + g * args.key_head + piece * WIDTH;
        reinterpret_cast<Piece*>(place)[piece] = to_stored(from, value ? value_scale : key_scale);
        if (piece || !args.cached) continue;
        int* set = args.tags + g * args.cached + set_of(int(slot), args.cached);
#pragma unroll
        for (int w = 0; w < WAYS; w++)
            if (set[w] == int(slot)) set[w] = -1;
    }
}
