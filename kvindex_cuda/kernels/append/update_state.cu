// What a step reads of how many tokens there are, once some have come or gone: bits of those that
// are there, their number, valid keys and candidates of each row, the reference of weights.
//
// Grid: any, 256 threads. Writes 32 bytes per row of the batch and block of 256 tokens, and of each
// row 8 bytes and 4 per KV head, which it reads. Limited by latency.
// Compile-time: nothing.
#include "common/common.cuh"

constexpr int THREADS = 256;
constexpr int WORDS = TOKENS / 32;  // of a block's bits

// valid int32 [B, row, 8]: bits of blocks `first` to `last`, those of the tokens up to `tokens` set and
// the others cleared, or null: they stay; length int64 [1]: `tokens`. counted, wanted int32 [B]: each
// all `count` and `candidates`, or null: they stay. known float32 [B · G] is copied to weight_scale, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
update_state(u32* valid, i64* length, int* counted, int* wanted, float* weight_scale, const float* known, i64 row,
     i64 first, i64 last, i64 tokens, i64 count, i64 candidates, i64 batches, i64 groups) {
    i64 from = i64(blockIdx.x) * THREADS + threadIdx.x, step = i64(gridDim.x) * THREADS;
    i64 words = (last - first) * WORDS;  // of a row
    if (valid)
        for (i64 i = from; i < batches * words; i += step) {
            i64 b = i / words, word = first * WORDS + i - b * words, rest = tokens - word * 32;
            valid[b * row * WORDS + word] = rest >= 32 ? ALL : rest > 0 ? (1u << rest) - 1 : 0;
        }
    if (known)
        for (i64 i = from; i < groups; i += step) weight_scale[i] = known[i];
    for (i64 i = from; i < batches; i += step) {
        if (counted) counted[i] = int(count);
        if (wanted) wanted[i] = int(candidates);
    }
    if (from == 0) *length = tokens;
}
