// Rows of whole sequences, side by side: those of tokens that came before from an engine's pages, which may lie in
// host memory that the device sees, those of new tokens from keys and values.
//
// Neighbouring threads take neighboring pieces of a page. Pages of a sequence are `width` in the copy, of which the
// first ones are written, up to its last token.
// Grid: (any, R), THREADS threads. Reads and writes each row once. Limited by the bus where pages lie on the host.
// Compile-time: nothing.
#include "common/common.cuh"

struct Arguments {
    const int* tables;    // [R, table]: pages of each sequence
    const int* lengths;   // [R], with its new tokens
    const int* starts;    // [R + 1]: of each sequence the first new token among all, and the end
    const uint4* keys;    // [T, KV heads, key], of new tokens
    const uint4* values;  // [T, KV heads, pieces - key]
    const i64* base;      // [2]: addresses of a layer's codes and rows
    uint4* copy;          // [R, width, KV heads, tokens, pieces]
    i64 width, table, pages, tokens, kv_heads, key, pieces;
    i64 key_token, key_head, value_token, value_head;  // strides
};

// `key`, `pieces` and strides are in units of 16 bytes; a page is in one piece. A sequence has fewer than 2^31 pieces.
extern "C" __global__ void __launch_bounds__(THREADS)
gather_pages(const __grid_constant__ Arguments args) {
    i64 r = blockIdx.y, first = args.starts[r], count = args.starts[r + 1] - first;
    i64 length = min(i64(max(0, args.lengths[r])), args.width * args.tokens), before = max(length - count, i64(0));
    u32 tokens = u32(args.tokens), pieces = u32(args.pieces), head = tokens * pieces, page = u32(args.kv_heads) * head;
    u32 total = u32((u32(length) + tokens - 1) / tokens) * page;
    const uint4* rows = reinterpret_cast<const uint4*>(args.base[1]);
    uint4* copy = args.copy + r * args.width * page;
#pragma unroll 4
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < total; i += gridDim.x * THREADS) {
        u32 p = i / page, inside = i - p * page, g = inside / head, place = inside - g * head;
        u32 at = place / pieces, piece = place - at * pieces;
        i64 token = i64(p) * tokens + at;
        if (token >= length) continue;
        const uint4* from;
        if (token < before) {
            i64 number = p < args.table ? args.tables[r * args.table + p] : 0;
            from = rows + (number >= 0 && number < args.pages ? number : 0) * page + inside;
        } else if (piece < args.key)
            from = args.keys + (first + token - before) * args.key_token + g * args.key_head + piece;
        else
            from = args.values + (first + token - before) * args.value_token + g * args.value_head + piece - args.key;
        copy[i] = *from;
    }
}
