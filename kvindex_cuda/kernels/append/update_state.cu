// State of a step after tokens have come or gone: bits of valid tokens, their number, valid keys and
// candidates of each row, the scale of weights.
//
// Grid: (any, KV heads in all, or 1), 256 threads. Writes 32 bytes per row of the batch and block of 256
// tokens, of each row 8 bytes and 8 per KV head; reads 264 bytes per KV head and block from
// `codes_from` on, 4 MB at a million tokens and 4 heads. Limited by latency: for each 64 blocks of a
// thread block, that of an address and then of bytes.
// Compile-time: nothing.
#include "common/weight_scale.cuh"

constexpr int WORDS = TOKENS / 32;   // of a block's bits
constexpr int PIECES = TOKENS / 16;  // of its weights, 16 bytes each
constexpr int DONE = 1 << 16;

struct Arguments {
    u32* valid;                // [B, row, 8]: bits of blocks `first` to `last`, those of the tokens up to `tokens` set and
                               // the others cleared, or null: they stay
    i64* length;               // [1]: becomes `tokens`
    int* counted;              // [B]: each becomes `count`, or null: they stay
    int* wanted;               // [B]: each becomes `candidates`, or null: they stay
    const i64* codes;          // [B, row]: addresses of blocks, of KV head g at g · head_bytes, or null: the scale stays
    int* largest;              // [BG]: upper byte of a weight in full blocks; up to `codes_from` before
    float* weight_scale;       // [BG]
    i64 row, first, last, tokens, count, candidates, batches;
    i64 kv_heads, head_bytes, weights, codes_from;
};

// The largest of a piece's bytes that are of the block's first `left` keys (block_layout.places).
__device__ __forceinline__ int largest_of(const uint4& bytes, int piece, i64 left) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int word = piece * 4 + i / 4, key = word / 8 * 32 + word % 8 + i % 4 * 8;
        if (key < left) largest = max(largest, int((&bytes.x)[i / 4] >> i % 4 * 8 & 255));
    }
    return largest;
}

// Of one head, by all thread blocks of its column of the grid. While they are at it, its `largest` has three
// numbers: how many of them are done, times DONE; the largest of the block that is not full, times 256;
// that of full blocks. The last one to be done leaves this one alone.
__device__ __forceinline__ void find_scale(const Arguments& args) {
    __shared__ int of_full, of_open;
    if (threadIdx.x == 0) of_full = of_open = 0;
    __syncthreads();
    i64 bg = blockIdx.y, batch = bg / args.kv_heads;
    i64 place = bg % args.kv_heads * args.head_bytes + args.weights;
    int piece = threadIdx.x % PIECES, each = THREADS / PIECES, full = 0, open = 0;
#pragma unroll 4
    for (i64 s = args.codes_from + blockIdx.x * each + threadIdx.x / PIECES; s < args.last; s += gridDim.x * each) {
        const char* weights = reinterpret_cast<const char*>(args.codes[batch * args.row + s]) + place;
        uint4 bytes = reinterpret_cast<const uint4*>(weights)[piece];
        i64 left = args.tokens - s * TOKENS;
        int found = largest_of(bytes, piece, left);
        if (left < TOKENS) open = found;
        else full = max(full, found);
    }
    atomicMax(&of_full, full), atomicMax(&of_open, open);
    __syncthreads();
    if (threadIdx.x) return;
    int* largest = args.largest + bg;
    int old = __ldcg(largest), next;
    for (;;) {
        int known = args.codes_from || old >= DONE ? old : 0;  // the first one may begin anew
        next = known / DONE * DONE + DONE + max(known / 256 % 256, of_open) * 256 + max(known % 256, of_full);
        int found = atomicCAS(largest, old, next);
        if (found == old) break;
        old = found;
    }
    if (next / DONE < int(gridDim.x)) return;
    *largest = next % 256;
    args.weight_scale[bg] = scale_of(max(next % 256, next / 256 % 256));
}

extern "C" __global__ void __launch_bounds__(THREADS)
update_state(const __grid_constant__ Arguments args) {
    i64 block = i64(blockIdx.y) * gridDim.x + blockIdx.x, step = i64(gridDim.x) * gridDim.y * THREADS;
    i64 from = block * THREADS + threadIdx.x;
    i64 words = (args.last - args.first) * WORDS;  // of a row
    if (args.valid)
        for (i64 i = from; i < args.batches * words; i += step) {
            i64 b = i / words, word = args.first * WORDS + i - b * words, rest = args.tokens - word * 32;
            args.valid[b * args.row * WORDS + word] = rest >= 32 ? ALL : rest > 0 ? (1u << rest) - 1 : 0;
        }
    for (i64 i = from; i < args.batches; i += step) {
        if (args.counted) args.counted[i] = int(args.count);
        if (args.wanted) args.wanted[i] = int(args.candidates);
    }
    if (from == 0) *args.length = args.tokens;
    if (args.codes) find_scale(args);
}
