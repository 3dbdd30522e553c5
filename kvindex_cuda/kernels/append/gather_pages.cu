// Copy the rows (keys and values of tokens) of whole sequences into one contiguous tensor. Rows of earlier
// tokens come from an inference engine's pages, which may be in pinned host memory. Rows of new tokens come
// from the tensors `keys` and `values`.
//
// The result has room for `width` pages per sequence. Pages after the last token of a sequence are not written.
// Neighboring threads copy neighboring pieces of a row. A piece has 16 bytes, or 8 bytes with FP8_PAGES: then
// pages and the result are in FP8, and the rows of new tokens are converted as write_pages.cu converts them.
//
// Grid: (any, R) for R sequences, THREADS threads. Reads and writes each row once. Limited by memory, or by the
// PCIe bus if pages are on the host.
// Compile-time constants: FP8_PAGES (1: pages contain e4m3 numbers), DTYPE (of the new keys and values: 0 float32, 1
// float16, 2 bfloat16; not used without FP8_PAGES).
#include "common/new_rows.cuh"

struct Arguments {
    const int* tables;    // [R, table]: page numbers of each sequence
    const int* lengths;   // [R]: tokens of each sequence, new ones included
    const int* starts;    // [R + 1]: index of each sequence's first new token among all new tokens, then their total
                          // number
    const uint4* keys;    // [T, KV heads, D]: keys of the new tokens
    const uint4* values;  // [T, KV heads, D]: values of the new tokens
    const i64* base;      // [2]: addresses of a layer's codes and of its rows
    Piece* copy;          // [R, width, KV heads, tokens, pieces]: the result
    i64 width, table, pages, tokens, kv_heads, key, pieces;
    i64 key_token, key_head, value_token, value_head;  // strides
    const float* key_scale;    // [1]: scale of the keys; only if FP8_PAGES
    const float* value_scale;  // [1]: scale of the values; only if FP8_PAGES
};

// The arguments `key` and `pieces` (sizes of a key and of a row) count pieces, and the strides count units of 16
// bytes. A sequence has fewer than 2^31 pieces.
extern "C" __global__ void __launch_bounds__(THREADS)
gather_pages(const __grid_constant__ Arguments args) {
    float key_scale = FP8_PAGES ? *args.key_scale : 1.0f, value_scale = FP8_PAGES ? *args.value_scale : 1.0f;
    i64 r = blockIdx.y, first = args.starts[r], count = args.starts[r + 1] - first;
    i64 length = min(i64(max(0, args.lengths[r])), args.width * args.tokens), before = max(length - count, i64(0));
    u32 tokens = u32(args.tokens), pieces = u32(args.pieces), head = tokens * pieces, page = u32(args.kv_heads) * head;
    u32 total = u32((u32(length) + tokens - 1) / tokens) * page;
    const Piece* rows = reinterpret_cast<const Piece*>(args.base[1]);
    Piece* copy = args.copy + r * args.width * page;
#pragma unroll 4
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        u32 p = i / page, inside = i - p * page, g = inside / head, place = inside - g * head;
        u32 at = place / pieces, piece = place - at * pieces;
        i64 token = i64(p) * tokens + at;
        if (token >= length) continue;
        i64 t = first + token - before;
        bool stored = token < before, value = piece >= args.key;
        const void* from;
        if (stored) {
            i64 number = p < args.table ? args.tables[r * args.table + p] : 0;
            from = rows + (number >= 0 && number < args.pages ? number : 0) * page + inside;
        } else if (!value)
            from = args.keys + t * args.key_token + g * args.key_head + piece * WIDTH;
        else
            from = args.values + t * args.value_token + g * args.value_head + (piece - args.key) * WIDTH;
        copy[i] = stored || !FP8_PAGES ? *static_cast<const Piece*>(from)
                                       : to_stored(static_cast<const uint4*>(from), value ? value_scale : key_scale);
    }
}
