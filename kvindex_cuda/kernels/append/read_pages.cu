// What steps read of an engine's pages, of all layers: where a sequence's segments (256 tokens) lie, how many
// of its tokens are searched, the scale of their weights; and which segments have become full.
//
// A sequence is searched up to `window` tokens before its end, in whole segments, if it has `dense_below`
// tokens and more than `sink` are left; else not at all, and all its tokens are resident. A row of the batch of
// no tokens is resident nowhere; its first addresses are those of a page that is there.
// Where rows are kept by their slots (`segments`), a sequence's segments are told by number, too, and a clock goes on:
// stamps of a cache of rows that all sequences share (common/row_cache.cuh).
// Grid: (any, R + 1, L), THREADS threads; rows 0 to R - 1 of the grid are the batch's, of a layer each; of the
// last one a block alone looks through the slots. Reads 4 bytes per page of a sequence and 256 per segment that
// is searched, layer and KV head; writes 16 per segment and layer. Limited by latency, at many tokens by memory.
// Compile-time: nothing.
#include "common/weight_scale.cuh"

constexpr int LANES = TOKENS / 16, AT_ONCE = THREADS / LANES;  // threads with 16 weights each of a record; records

struct Arguments {
    const int* tables;       // [R, table]: pages of each sequence
    const int* lengths;      // [R]
    const i64* slots;        // [count]: where tokens of this step go, below 0 for nowhere
    const i64* bases;        // [L, 2]: addresses of a layer's codes and rows
    const int* candidates;   // [row + 1]: C of so many segments
    i64* codes;              // [L, room, row]: addresses of segments, as are `rows`
    i64* rows;
    i64* length;             // [room]: tokens that are searched
    i64* resident_count;     // [room]: tokens that are not, and the sink
    int* counted;            // [room]: tokens that are searched, but the sink
    int* wanted;             // [room]: C
    float* weight_scale;     // [L, room, KV heads]: 0, of a row that is searched its scale
    i64* due;                // [1 + most]: how many segments have their last token among the slots, and which
    int* segments;           // [room, row]: numbers of segments, page · parts + part, or null
    int* clock;              // [1]: steps so far, or null
    i64 batch, room, row, table, pages, parts, kv_heads, count, most;
    i64 codes_page, codes_part, codes_head, weights, rows_page, rows_part;  // bytes
    i64 sink, window, dense_below;
};

// In any order.
__device__ __forceinline__ void find_due(const Arguments& args) {
    __shared__ int found;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (i64 i = threadIdx.x; i < args.count; i += THREADS) {
        i64 slot = args.slots[i];
        if (slot < 0 || (slot + 1) % TOKENS || slot / TOKENS >= args.pages * args.parts) continue;
        int at = atomicAdd(&found, 1);
        if (at < args.most) args.due[1 + at] = slot / TOKENS;
    }
    __syncthreads();
    if (threadIdx.x == 0) args.due[0] = min(i64(found), args.most);
}

extern "C" __global__ void __launch_bounds__(THREADS)
read_pages(const __grid_constant__ Arguments args) {
    i64 r = blockIdx.y, layer = blockIdx.z;
    if (r == args.batch) {
        if (blockIdx.x == 0 && layer == 0) {
            if (args.clock && threadIdx.x == 0) args.clock[0] += 1;
            find_due(args);
        }
        return;
    }
    i64 tokens = min(i64(max(0, args.lengths[r])), args.row * TOKENS), place = layer * args.room + r;
    i64 segments = (tokens + TOKENS - 1) / TOKENS;
    i64 searched = tokens < args.dense_below ? 0 : max(tokens - args.window, i64(0)) / TOKENS;
    if (searched * TOKENS <= args.sink) searched = 0;
    i64 sink = searched ? args.sink : 0;
    if (layer == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        args.length[r] = searched * TOKENS;
        args.resident_count[r] = tokens - searched * TOKENS + sink;
        args.counted[r] = int(searched * TOKENS - sink);
        args.wanted[r] = args.candidates[searched];
    }
    auto page_of = [&](i64 s) {
        i64 page = s / args.parts < args.table ? args.tables[r * args.table + s / args.parts] : 0;
        return page >= 0 && page < args.pages ? page : 0;
    };
    i64 codes = args.bases[2 * layer], rows = args.bases[2 * layer + 1], step = i64(gridDim.x);
    for (i64 s = blockIdx.x * THREADS + threadIdx.x; s < max(segments, i64(1)); s += step * THREADS) {
        i64 page = page_of(s), part = s % args.parts;
        if (args.segments && layer == 0) args.segments[r * args.row + s] = int(page * args.parts + part);
        args.codes[place * args.row + s] = codes + page * args.codes_page + part * args.codes_part;
        args.rows[place * args.row + s] = rows + page * args.rows_page + part * args.rows_part;
    }
    // of each record the largest byte of its weights
    i64 records = searched * args.kv_heads;
    int lane = threadIdx.x % LANES;
#pragma unroll 4
    for (i64 i = blockIdx.x * AT_ONCE + threadIdx.x / LANES; i < records; i += step * AT_ONCE) {
        i64 s = i / args.kv_heads, g = i % args.kv_heads;
        i64 record = codes + page_of(s) * args.codes_page + s % args.parts * args.codes_part + g * args.codes_head;
        uint4 bytes = reinterpret_cast<const uint4*>(record + args.weights)[lane];
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) largest = max(largest, (&bytes.x)[j / 4] >> j % 4 * 8 & 255);
        // scales are positive: they are in the order of their bits
        int scale = __float_as_uint(scale_of(int(largest)));
        int* all = reinterpret_cast<int*>(args.weight_scale + place * args.kv_heads + g);
        if (__ldcg(all) < scale) atomicMax(all, scale);
    }
}
