// Update the tensors that describe an index to the kernels of a decode step, after tokens were appended or
// removed: the number of tokens, their valid bits, the numbers of valid keys and of candidates per sequence,
// and the scale of the log weights. Reference: kvindex/pariskv/step_state.py.
//
// Grid: (any, B G), THREADS threads; (any, 1) if the scale of the log weights does not change.
// Writes 32 bytes per sequence and block of 256 tokens, 8 bytes per sequence, and 8 per KV head. Reads 264
// bytes per KV head and block from block `codes_from` on: 4 MB at a million tokens and 4 heads.
// Limited by latency: for every 64 blocks that a thread block processes, one read of an address and one
// dependent read.
// Compile-time constants: only those of kvindex_cuda/runtime/constants.py.
#include "common/weight_scale.cuh"

constexpr int WORDS = TOKENS / 32;   // words of a block's valid bits
constexpr int PIECES = TOKENS / 16;  // 16-byte parts of a block's weights
constexpr int DONE = 1 << 16;

struct Arguments {
    // [B, row, 8]: one bit per token, 1 if the token is valid; 8 words of 32 bits for each block of 256 tokens.
    // In blocks `first` to `last` - 1, the kernel sets the bits of the first `tokens` tokens of the sequence to 1
    // and all other bits to 0. If the pointer is null, no bits change.
    u32* valid;
    i64* length;               // [1]: set to `tokens`
    int* counted;              // [B]: set to `count`, or null: unchanged
    int* wanted;               // [B]: set to `candidates`, or null: unchanged
    const i64* codes;          // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                               // head_bytes. Null: the scale is unchanged.
    int* largest;              // [BG]: largest upper byte of a weight in full blocks; before the launch, in those up to
                               // `codes_from`
    float* weight_scale;       // [BG]
    i64 row, first, last, tokens, count, candidates, batches;
    i64 kv_heads, head_bytes, weights, codes_from;
};

// Return the largest of 16 weight bytes, which are the upper bytes of the 16-bit log weights of 16 keys. Only
// the first `left` keys of a block count; the others are ignored. The bytes are in the order of
// block_layout.places.
__device__ __forceinline__ int largest_of(const uint4& bytes, int piece, i64 left) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int word = piece * 4 + i / 4, key = word / 8 * 32 + word % 8 + i % 4 * 8;
        if (key < left) largest = max(largest, int((&bytes.x)[i / 4] >> i % 4 * 8 & 255));
    }
    return largest;
}

// Compute the scale of the log weights of one KV head. All thread blocks with the same blockIdx.y work on one
// KV head, with the number bg. While the kernel runs, one integer, largest[bg], is the sum of a counter and two
// maxima:
//   DONE · (number of finished thread blocks)
//   + 256 · (largest weight byte in the partly filled block)
//   + (largest weight byte in full blocks)
// The thread block that finishes last computes the scale and stores only the maximum over full blocks.
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
        int known = args.codes_from || old >= DONE ? old : 0;  // the first thread block may reset the old value
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
    i64 words = (args.last - args.first) * WORDS;  // words per sequence
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
