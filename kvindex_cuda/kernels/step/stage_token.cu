// What comes with a decoded token goes to where a step reads it: its key and value to the window
// and to the rows beside it, its queries to a graph's own.
//
// Grid: (G, B), 128 threads. Reads and writes 2 (D + DV) and GROUP · D elements per KV head;
// limited by latency.
// Compile-time: D, DV, DTYPE, GROUP (query heads per KV head).
#include "common/common.cuh"

#if DTYPE == 0
typedef u32 Bits;
#else
typedef u16 Bits;
#endif

constexpr int THREADS = 128;

// keys [B, G, D], values [B, G, DV], queries [B, H, D], each with the strides of its first two
// dimensions in elements and none between neighbors; window_keys, window_values: the token's own
// places, [B, G, D] and [B, G, DV] likewise; rows [B, G, room, D + DV] get it at `at`, and held [1]
// is one more than that. asked [B, H, D], or null: nobody replays.
extern "C" __global__ void __launch_bounds__(THREADS)
stage_token(const Bits* __restrict__ keys, const Bits* __restrict__ values, Bits* __restrict__ window_keys,
     Bits* __restrict__ window_values, Bits* __restrict__ rows, i64* count,
     const Bits* __restrict__ queries, Bits* __restrict__ asked, i64 keys_b, i64 keys_g, i64 values_b,
     i64 values_g, i64 window_keys_b, i64 window_keys_g, i64 window_values_b, i64 window_values_g,
     i64 queries_b, i64 queries_h, i64 room, i64 at) {
    i64 g = blockIdx.x, b = blockIdx.y, bg = b * gridDim.x + g;
    Bits* row = rows + (bg * room + at) * (D + DV);
    for (int i = threadIdx.x; i < D; i += THREADS) {
        Bits one = keys[b * keys_b + g * keys_g + i];
        row[i] = one;
        window_keys[b * window_keys_b + g * window_keys_g + i] = one;
    }
    for (int i = threadIdx.x; i < DV; i += THREADS) {
        Bits one = values[b * values_b + g * values_g + i];
        row[D + i] = one;
        window_values[b * window_values_b + g * window_values_g + i] = one;
    }
    if (asked) {
        for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
            i64 h = g * GROUP + i / D;
            asked[bg * GROUP * D + i] = queries[b * queries_b + h * queries_h + i % D];
        }
    }
    if (bg == 0 && threadIdx.x == 0) *count = at + 1;
}
