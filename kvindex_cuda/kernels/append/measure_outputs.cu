// Add up |v|² and |o|² of the newest tokens of some sequences, for each head. v is the value of a token in a KV head, and
// o the attention output in a query head. The limits of the error follow from their means.
// Reference: OutputScale.measure in kvindex/layer/output_scale.py.
//
// A thread block adds up the squares of one head of one sequence. The sum does not depend on the order in which threads
// run.
//
// Grid: (sequences, KV heads + query heads), THREADS threads.
// Reads each number once: at most 256 tokens of a sequence. Writes 4 bytes per thread block.
// Limited by latency.
// Compile-time constants: DTYPE.
#include "common/common.cuh"

struct Arguments {
    const void* values;   // DTYPE [T, KV heads, DV], of the tokens of the batch; coordinates are adjacent
    const void* outputs;  // DTYPE [T, query heads, DV], likewise
    const i64* stops;     // [sequences]: index in the batch of the token after the newest one
    const i64* counts;    // [sequences]: number of tokens to add up, possibly 0
    float* sums;          // [sequences, KV heads + query heads]
    i64 kv_heads, value_dim;
    i64 value_token, value_head, output_token, output_head;  // strides in numbers
};

extern "C" __global__ void __launch_bounds__(THREADS)
measure_outputs(const __grid_constant__ Arguments args) {
    __shared__ float parts[THREADS / 32];
    i64 sequence = blockIdx.x, head = blockIdx.y, count = args.counts[sequence];
    bool value = head < args.kv_heads;
    const void* from = value ? args.values : args.outputs;
    i64 token_step = value ? args.value_token : args.output_token;
    i64 head_at = value ? head * args.value_head : (head - args.kv_heads) * args.output_head;
    i64 first = args.stops[sequence] - count;
    float sum = 0;
    for (i64 i = threadIdx.x; i < count * args.value_dim; i += THREADS) {
        float x = element(from, (first + i / args.value_dim) * token_step + head_at + i % args.value_dim);
        sum += x * x;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < THREADS / 32; w++) sum += parts[w];
    args.sums[sequence * gridDim.y + head] = sum;
}
