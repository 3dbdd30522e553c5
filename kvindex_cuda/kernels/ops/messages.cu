// Combine the attention outputs of several ranks (GPUs), which have attended to different rows. The kernel
// `pack_message` packs the result of one rank into a message, and `merge_messages` merges the messages of all
// ranks (Milakov and Gimelshein, 2018). Reference: kvindex.ops.messages.pack and merge_messages.
//
// Grid: (B G), 256 threads; a thread block processes the heads of one group of one sequence. `pack_message`
// reads and writes GROUP DV elements and GROUP + 1 words. `merge_messages` reads these from each rank and
// writes them once.
// Limited by latency. Sums are float32, in the order of ranks.
// Compile-time constants: DV, GROUP (query heads per KV head), DTYPE, WIDE (1: counts are int64, else int32).
#include "common/common.cuh"

#if DTYPE == 0
typedef u32 Bits;
#else
typedef u16 Bits;
#endif

#if WIDE
typedef i64 Count;
#else
typedef int Count;
#endif

struct PackArguments {
    const Bits* output;      // [B, H, DV]
    const float* lse;        // [B, H]
    Count* found;            // [B, G]
    Bits* to_output;         // [B, H, DV]: this and the next two are the message
    float* to_lse;           // [B, H]
    int* to_found;           // [B, G]
    int seen;                // 1 if attention included other rows, so that its result is valid even if no row was found
    int take;                // set `found` to 0 afterwards
};

extern "C" __global__ void __launch_bounds__(256)
pack_message(const __grid_constant__ PackArguments args) {
    after_previous();
    let_next_begin();
    i64 group = blockIdx.x, first = group * GROUP;
    Count count = args.found[group];
    bool blind = !args.seen && count == 0;
    for (int i = threadIdx.x; i < GROUP * DV; i += 256)
        args.to_output[first * DV + i] = blind ? Bits(0) : args.output[first * DV + i];
    for (int h = threadIdx.x; h < GROUP; h += 256)
        args.to_lse[first + h] = blind ? NEVER : args.lse[first + h];
    if (threadIdx.x == 0) args.to_found[group] = int(count);
    __syncthreads();  // all threads have read the count
    if (args.take && threadIdx.x == 0) args.found[group] = 0;
}

struct MergeArguments {
    const Bits* outputs;     // [W, B, H, DV]
    const float* lses;       // [W, B, H]
    const int* founds;       // [W, B, G]
    i64 output_rank, lse_rank, found_rank;  // strides in elements
    void* output;            // [B, H, DV]
    float* lse;              // [B, H]
    int* found;              // [B, G]
    i64* total;              // [B, G]: increased by the number of rows found, or null
    i64 ranks;               // W, the number of ranks
};

extern "C" __global__ void __launch_bounds__(256)
merge_messages(const __grid_constant__ MergeArguments args) {
    after_previous();
    let_next_begin();
    i64 group = blockIdx.x, first = group * GROUP;
    for (int i = threadIdx.x; i < GROUP * DV; i += 256) {
        i64 head = first + i / DV;
        float peak = NEVER;
        for (i64 w = 0; w < args.ranks; w++) peak = fmaxf(peak, args.lses[w * args.lse_rank + head]);
        float base = peak == NEVER ? 0.0f : peak, weights = 0.0f, sum = 0.0f;
        for (i64 w = 0; w < args.ranks; w++) {
            float weight = expf(args.lses[w * args.lse_rank + head] - base);
            weights += weight;
            sum += weight * element(args.outputs, w * args.output_rank + first * DV + i);
        }
        store(args.output, first * DV + i, weights > 0.0f ? sum / weights : 0.0f);
        if (i % DV == 0) args.lse[head] = weights > 0.0f ? logf(weights) + base : NEVER;
    }
    if (threadIdx.x == 0) {
        int found = 0;
        for (i64 w = 0; w < args.ranks; w++) found += args.founds[w * args.found_rank + group];
        args.found[group] = found;
        if (args.total) args.total[group] += found;
    }
}
