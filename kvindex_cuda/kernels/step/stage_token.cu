// Copy the newest token to the places where a decode step reads it: its key and value to the window and to the
// resident rows (sink and window, which attention always reads), and its queries to the input buffer of a CUDA
// graph. There is no reference implementation, because the kernel only copies.
//
// The host passes the token's position among the resident rows. In two cases the kernel reads the position from
// a counter on the device instead, which its last thread block increments: in a caller's CUDA graph (unless
// prepare_query.cu already does this), and if each sequence of the batch has its own counter.
//
// With `counts`, the B tokens are `consecutive` tokens of each of B / consecutive sequences. Those of a sequence
// follow each other among its resident rows. Token b attends to the rows up to its own, so its number of rows is
// written to counts[b].
//
// Grid: (G, B), THREADS threads. Reads and writes 2 (D + DV) and GROUP · D elements per KV head. Limited by
// latency.
// Compile-time constants: D, DV, DTYPE, GROUP (query heads per KV head).
#include "common/common.cuh"

#if DTYPE == 0
typedef u32 Bits;
#else
typedef u16 Bits;
#endif

struct Arguments {
    const Bits* keys;                  // [B, G, D]
    const Bits* values;                // [B, G, DV]
    Bits* window_keys;                 // [B, G, D]: place of the token in the window, or null if the window is not
                                       // written
    Bits* window_values;               // [B, G, DV]
    Bits* resident;                    // [B, G, room, D + DV]: the token is written at row `place`. With `counts`, the
                                       // first dimension is the number of sequences.
    i64* resident_count;               // [1], or [B] if `ragged`: becomes place + 1, or place + consecutive with
                                       // `counts`
    i64* counts;                       // [B]: number of resident rows that each token attends to, or null; only with
                                       // `ticket` and without `ragged`
    int* ticket;                       // [1]: counts finished thread blocks, 0 between launches; null: the host passes
                                       // `place`
    const Bits* queries;               // [B, H, D]
    Bits* graph_queries;               // [B, H, D]: input buffer of a CUDA graph, or null without a graph
    i64 keys_batch, keys_head, values_batch, values_head;
    i64 window_keys_batch, window_keys_head, window_values_batch, window_values_head;
    i64 queries_batch, queries_head;
    i64 room, place, ragged;
    i64 consecutive;                   // tokens of each sequence; 1 without `counts`
};

// Arguments named after a tensor and a dimension are strides in elements: keys_batch is the stride of the batch
// dimension of `keys`, and keys_head that of its head dimension. The last dimension of each tensor is contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
stage_token(const __grid_constant__ Arguments args) {
    const Bits* __restrict__ keys = args.keys;
    const Bits* __restrict__ values = args.values;
    Bits* __restrict__ window_keys = args.window_keys;
    Bits* __restrict__ window_values = args.window_values;
    Bits* __restrict__ rows = args.resident;
    const Bits* __restrict__ queries = args.queries;
    Bits* __restrict__ graph_queries = args.graph_queries;
    after_previous();  // the previous kernel may compute this token's key, or still read the resident rows
    let_next_begin();
    i64 g = blockIdx.x, b = blockIdx.y, bg = b * gridDim.x + g;
    i64 place = args.ticket ? args.resident_count[args.ragged * b] : args.place;
    u32 tokens = u32(args.consecutive), sequence = u32(b) / tokens;
    if (args.counts) place += u32(b) % tokens;
    if (place < args.room) {
        Bits* row = rows + ((sequence * gridDim.x + g) * args.room + place) * (D + DV);
        for (int i = threadIdx.x; i < D; i += THREADS) {
            Bits one = keys[b * args.keys_batch + g * args.keys_head + i];
            row[i] = one;
            if (window_keys) window_keys[b * args.window_keys_batch + g * args.window_keys_head + i] = one;
        }
        for (int i = threadIdx.x; i < DV; i += THREADS) {
            Bits one = values[b * args.values_batch + g * args.values_head + i];
            row[D + i] = one;
            if (window_values) window_values[b * args.window_values_batch + g * args.window_values_head + i] = one;
        }
    }
    if (graph_queries) {
        for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
            i64 h = g * GROUP + i / D;
            graph_queries[bg * GROUP * D + i] = queries[b * args.queries_batch + h * args.queries_head + i % D];
        }
    }
    if (!args.ticket) {
        if (bg == 0 && threadIdx.x == 0) *args.resident_count = place + 1;
        return;
    }
    if (!last_block(args.ticket, gridDim.x * gridDim.y)) return;
    if (threadIdx.x == 0) *args.ticket = 0;  // all thread blocks have read the counts
    if (args.counts) {
        i64 before = __ldcg(args.resident_count), most = args.room;
        __syncthreads();  // all threads have read the count that the first one changes
        for (i64 i = threadIdx.x; i < gridDim.y; i += THREADS) args.counts[i] = min(before + u32(i) % tokens + 1, most);
        if (threadIdx.x == 0) *args.resident_count = min(before + tokens, most);
        return;
    }
    for (i64 i = threadIdx.x; i < (args.ragged ? gridDim.y : 1); i += THREADS) {
        i64 count = __ldcg(args.resident_count + i);
        if (count < args.room) args.resident_count[i] = count + 1;
    }
}
