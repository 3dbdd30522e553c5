// Keys per centroid of each subspace (paper, B.2.1; ops.coarse.histogram), of codes that no index counts as they
// come: an engine's pages, of which a sequence has a share.
//
// A thread block counts keys in shared memory, and adds what it found to the group's counts.
// Grid: (splits, BG), 256 threads; dynamic shared memory: 1 KB · M. Reads D / 8 bytes per key, and adds up to
// 8 bytes for each of the 256 M counts of a thread block.
// Limited by shared memory: M atomics per key at random banks, as `vote` has look-ups.
// Compile-time: D, RAGGED (each row of the batch has a length).
#include "common/tier_votes.cuh"

constexpr int M = D / 8;
constexpr int WORDS = (M + 3) / 4;  // of a key's signs
constexpr int RECORDS = CHUNK / TOKENS;

struct Arguments {
    const i64* codes;   // [B, row]: addresses of blocks, of KV head g at g · head_bytes
    const u32* valid;   // [B, row, 8]: a bit per token
    const i64* length;  // [1], or RAGGED: [B]
    u64* histogram;     // [BG, M, 256]: 0; becomes the counts
    i64 row, head_bytes, kv_heads;
};

extern "C" __global__ void __launch_bounds__(256, 4)
count_keys(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    int* bins = reinterpret_cast<int*>(memory);  // [M, 256]
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 bg = blockIdx.y, batch = bg / args.kv_heads, tokens = __ldcg(args.length + RAGGED * batch);
    const i64* table = args.codes + batch * args.row;
    const u32* valid = args.valid + batch * args.row * 8;
    after_previous();
    let_next_begin();
    if (i64(blockIdx.x) * CHUNK >= tokens) return;
    for (int i = threadIdx.x; i < M * 256; i += 256) bins[i] = 0;
    __syncthreads();
    for (i64 start = i64(blockIdx.x) * CHUNK; start < tokens; start += i64(gridDim.x) * CHUNK) {
        u32 ids[RECORDS][WORDS];
        bool real[RECORDS];
#pragma unroll
        for (int i = 0; i < RECORDS; i++) {
            i64 s = start / TOKENS + i, key = s * TOKENS + threadIdx.x;
            real[i] = key < tokens && valid[s * 8 + warp] >> lane & 1;
            if (real[i])
                load_signs(ids[i], reinterpret_cast<const char*>(table[s]) + bg % args.kv_heads * args.head_bytes);
        }
#pragma unroll
        for (int i = 0; i < RECORDS; i++)
            if (real[i])
#pragma unroll
                for (int b = 0; b < M; b++) atomicAdd(bins + b * 256 + (ids[i][b / 4] >> (b % 4 * 8) & 255), 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < M * 256; i += 256)
        if (bins[i]) atomicAdd(args.histogram + bg * (M * 256) + i, u64(bins[i]));
}
