// State of a step after tokens have come or gone: bits of valid tokens, their number, valid keys and
// candidates of each row, the scale of weights.
//
// Grid: any, 256 threads. Writes 32 bytes per row of the batch and block of 256 tokens, and of each
// row 8 bytes and 4 per KV head, which it reads. Limited by latency.
// Compile-time: nothing.
#include "common/common.cuh"

constexpr int WORDS = TOKENS / 32;  // of a block's bits

struct Arguments {
    u32* valid;                // [B, row, 8]: bits of blocks `first` to `last`, those of the tokens up to `tokens` set and
                               // the others cleared, or null: they stay
    i64* length;               // [1]: becomes `tokens`
    int* counted;              // [B]: each becomes `count`, or null: they stay
    int* wanted;               // [B]: each becomes `candidates`, or null: they stay
    float* weight_scale;       // [scales]
    const float* new_scale;    // [scales]: copied there, or null
    i64 row, first, last, tokens, count, candidates, batches, scales;
};

extern "C" __global__ void __launch_bounds__(THREADS)
update_state(const __grid_constant__ Arguments args) {
    i64 from = i64(blockIdx.x) * THREADS + threadIdx.x, step = i64(gridDim.x) * THREADS;
    i64 words = (args.last - args.first) * WORDS;  // of a row
    if (args.valid)
        for (i64 i = from; i < args.batches * words; i += step) {
            i64 b = i / words, word = args.first * WORDS + i - b * words, rest = args.tokens - word * 32;
            args.valid[b * args.row * WORDS + word] = rest >= 32 ? ALL : rest > 0 ? (1u << rest) - 1 : 0;
        }
    if (args.new_scale)
        for (i64 i = from; i < args.scales; i += step) args.weight_scale[i] = args.new_scale[i];
    for (i64 i = from; i < args.batches; i += step) {
        if (args.counted) args.counted[i] = int(args.count);
        if (args.wanted) args.wanted[i] = int(args.candidates);
    }
    if (from == 0) *args.length = args.tokens;
}
