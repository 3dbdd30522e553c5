// Prepare a decode step over the pages of an inference engine such as vLLM, for all layers at once. For each
// sequence, compute how many tokens are searched, the addresses of their segments (blocks of 256 tokens), and
// the scale of their log weights. Also list the segments that the tokens of this step have filled, so that they
// can be encoded.
//
// A sequence of at least `dense_below` tokens is searched in whole segments, except for its last `window`
// tokens. Shorter sequences are not searched, nor are those marked in `whole`: all their tokens are resident, so
// attention reads all of them. A sequence without tokens gets the addresses of an existing page, so that later kernels read valid memory.
// If `segments` is not null, the kernel also writes the number of each segment and increments `clock`, for a
// row cache that all sequences share (common/row_cache.cuh).
// If `limits` is not null, the number of rows of a search follows from its expected error. Then the kernel also looks up
// the limit of each searched sequence in a table, by its length. As long as `known` is false, the table has no limits,
// and no sequence is searched.
//
// Grid: (any, R + 1, L) for R sequences and L layers, THREADS threads. Of the second dimension, the last index
// (R) lists the filled segments, with a single thread block.
// Reads 4 bytes per page of a sequence, and 256 bytes per searched segment, layer and KV head; writes 16 bytes
// per segment and layer.
// Limited by latency, and with many tokens by memory.
// Compile-time constants: only those of kvindex_cuda/runtime/constants.py.
#include "common/weight_scale.cuh"

constexpr int LANES = TOKENS / 16;        // threads per record of codes; each reads 16 weights
constexpr int AT_ONCE = THREADS / LANES;  // records that a thread block reads at a time

struct Arguments {
    const int* tables;       // [R, table]: page numbers of each sequence
    const int* lengths;      // [R]: tokens of each sequence
    const i64* slots;        // [count]: slots that this step's tokens are written to, below 0 for none
    const i64* bases;        // [L, 2]: addresses of the codes and of the rows of each layer
    const bool* whole;       // [R]: true for a sequence that is not searched whatever its length, or null
    const int* candidates;   // [row + 1]: C, the number of candidates, by the number of searched segments
    i64* codes;              // [L, room, row]: addresses of the segments' codes; `rows` likewise for their rows
    i64* rows;
    i64* length;             // [room]: number of tokens that are searched
    i64* resident_count;     // [room]: number of resident tokens: those that are not searched, and the sink
    int* counted;            // [room]: number of searched tokens without the sink
    int* wanted;             // [room]: C, the number of candidates
    float* weight_scale;     // [L, room, KV heads]: scale of the log weights of a searched sequence; 0 before the
                             // launch
    i64* due;                // [1 + most]: number of segments whose last token is among the slots, then their numbers
    int* segments;           // [room, row]: number of each segment, page · parts + part, or null
    int* clock;              // [1]: number of steps so far, or null
    const float* limits;     // [L, LENGTHS, KV heads]: largest variance of attention weights for sequences whose length
                             // has the same number of binary digits, or null
    const bool* known;       // [1]: whether all layers have limits; only with `limits`, as is `variances`
    float* variances;        // [L, room, KV heads]: limit of each sequence
    i64 batch, room, row, table, pages, parts, kv_heads, count, most;
    i64 codes_page, codes_part, codes_head, weights, rows_page, rows_part;  // strides in bytes
    i64 sink, window, dense_below;
};

// Find the segments that become full in this step, and write their numbers to the list `due`, in any order. A
// segment is a block of 256 tokens that are encoded together. It becomes full when its last token is written.
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
    bool dense = tokens < args.dense_below || (args.whole && args.whole[r]) || (args.limits && !*args.known);
    i64 searched = dense ? 0 : max(tokens - args.window, i64(0)) / TOKENS;
    if (searched * TOKENS <= args.sink) searched = 0;
    i64 sink = searched ? args.sink : 0;
    if (layer == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        args.length[r] = searched * TOKENS;
        args.resident_count[r] = tokens - searched * TOKENS + sink;
        args.counted[r] = int(searched * TOKENS - sink);
        args.wanted[r] = args.candidates[searched];
    }
    if (args.limits && blockIdx.x == 0) {
        i64 digits = 32 - __clz(int(tokens));
        for (i64 g = threadIdx.x; g < args.kv_heads; g += THREADS)
            args.variances[place * args.kv_heads + g] = args.limits[(layer * LENGTHS + digits) * args.kv_heads + g];
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
    // For each segment and KV head, find the largest weight byte of its 256 keys. (A weight byte is the upper byte
    // of a key's 16-bit log weight.) A record contains the codes of these keys.
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
        // Positive floats compare like their bit patterns, so an integer maximum is correct.
        int scale = __float_as_uint(scale_of(int(largest)));
        int* all = reinterpret_cast<int*>(args.weight_scale + place * args.kv_heads + g);
        if (__ldcg(all) < scale) atomicMax(all, scale);
    }
}
