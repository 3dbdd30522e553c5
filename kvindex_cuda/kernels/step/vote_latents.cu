// Compute the approximate scores (votes) of all keys for a group with many query heads (latent attention), and
// list the keys whose vote reaches a threshold (ParisKV paper, B.2.1). Reference: scan in
// kvindex/pariskv/decode_step.py, kvindex/pariskv/sign_votes.py.
//
// Tensor cores multiply the sign bits of 16 keys, as bytes of 0 or 1, with the rounded queries of 8 heads
// (byte_votes.cuh). A thread block stores all rounded queries in shared memory. It processes one block of 256
// keys after another, while the following ones are copied asynchronously. Each warp expands the signs of 32
// keys to bytes once for all heads. (scan.cu multiplies bits instead, which takes more instructions per head,
// and has registers for at most 16 heads.)
// With WARPGROUPS, four warps multiply 16 keys each with up to 64 heads in one instruction, and convert
// products to votes while other heads are multiplied.
// The kernel computes the votes of up to AT_ONCE blocks of keys before it waits for the threshold, so that
// sample_latents.cu, which finds the threshold, runs concurrently. Then keys are listed, with one addition to
// the list's counter per AT_ONCE blocks.
//
// Grid: (any, B), 256 threads.
// Reads D/8 + 1 bytes per key once, 4 bytes per head and block of keys, and D bytes per head and thread block;
// writes 4 bytes per key, and 8 bytes and a count for each key that reaches the threshold.
// Limited by the tensor cores from about 64 heads on: 2 D operations per key and head.
// Dynamic shared memory: COLUMNS_OF WIDTH + STAGES STAGE bytes.
// Compile-time constants: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED (1: blocks have
// centers), PLANES, SAMPLING (1: candidates are sampled), RAGGED (1: each sequence has its own length),
// WARPGROUPS (1: use wgmma, which needs compute capability 9.0 and code for sm_90a).
#if WARPGROUPS
#include "common/warpgroup.cuh"
#else
#include "common/byte_votes.cuh"
#endif

// bytes of shared memory for the signs and weights of a block of 256 keys
constexpr int STAGE = (CENTER + 127) / 128 * 128;
constexpr int AT_ONCE = 8;  // blocks of keys that are processed before waiting for the threshold

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks of codes
    const i8* integers;         // [B, WIDTH / 16, COLUMNS_OF, 16]: written by prepare_latents.cu, as are the next five
    const int* sums;
    const float* units;
    const float* products;      // [B, row, HEADS]: ⟨q, μ⟩, the product of each query with each block's center
    const float2* scales;       // see votes.cuh, as for `seeds`
    const u32* seeds;           // [B]: seed of the noise
    const float* weight_scale;  // [B]: power of two that log weights are relative to
    const int* factors;         // [256]: from kvindex.ops.codes.log_factors
    const u32* valid;           // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;          // [1], or RAGGED: [B]: number of tokens
    const int* thresholds;      // [B]: written by sample_latents.cu, as are bases and shifts
    const int* bases;
    const int* shifts;
    int* votes;                 // [B, room]: votes of all keys, or their priorities
    int* counts;                // [B] APART: number of listed entries, cleared before the launch
    u64* list;                  // [B, capacity]: entries (`entry_of` in common.cuh)
    int* histogram;             // [B, BINS]: listed keys by `bin_of` their vote, cleared before the launch
    i64 row, room, capacity;
};

// Compute the maximum vote (approximate score) of each of a warp's 32 keys over all heads.
//   signs: address of the sign bits of the first key.
//   integers: rounded queries of all heads, in shared memory.
//   sums, offsets, scales: one number per head (see `vote` in byte_votes.cuh).
__device__ __forceinline__ void vote_on(Vote (&best)[4], const char* signs, const char* integers, const int (&factor)[4],
                                        const int* sums, const int* offsets, const float2* scales) {
    int lane = threadIdx.x % 32, t = lane % 4;
    auto scale_of = [&](int h) { return SAMPLING ? *reinterpret_cast<const float4*>(scales + h) : float4{}; };
    auto two_of = [&](const int* of, int h) { return *reinterpret_cast<const int2*>(of + h); };
#if WARPGROUPS
    constexpr int CHUNKS = COLUMNS_OF / CHUNK;
    Shared right = shared_place(integers);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        Keys<1> keys;
        load(keys, signs + half * (16 * STRIDE));
        Vote two[2] = {NO_VOTE, NO_VOTE};
        int own[2] = {half ? factor[2] : factor[0], half ? factor[3] : factor[1]};
        int dots[2][CHUNK / 8][1][4];
        auto begin = [&](int c) {
            warpgroup_begin();
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                multiply_bytes(dots[c % 2], keys.words[0][w], right + 2 * w * PIECE + c * (CHUNK * 16), w == 0);
            warpgroup_commit();
        };
        begin(0);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c + 1 < CHUNKS) {
                begin(c + 1);
                warpgroup_wait<1>(dots[c % 2]);
            } else {
                warpgroup_wait<0>(dots[c % 2]);
            }
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
                int h = c * CHUNK + n * 8 + 2 * t;
                vote(two, dots[c % 2][n], own, two_of(sums, h), two_of(offsets, h), scale_of(h));
            }
        }
        best[0] = half ? best[0] : two[0], best[1] = half ? best[1] : two[1];
        best[2] = two[0], best[3] = two[1];  // after the second iteration: votes of the second half
    }
#else
    Keys<2> keys;
    load(keys, signs);
#pragma unroll
    for (int i = 0; i < 4; i++) best[i] = NO_VOTE;
#pragma unroll 1
    for (int h = 0; h < COLUMNS_OF; h += 16) {
        int dots[2][2][4] = {};
        const char* right = integers + (h + lane / 4) * 16 + t * 4;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const char* at = right + e * 128 + 2 * w * PIECE;
                u32 low = *reinterpret_cast<const u32*>(at), high = *reinterpret_cast<const u32*>(at + PIECE);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32(&left)[4] = keys.words[half][w];
                    mma_bytes(dots[e][half], left[0], left[1], left[2], left[3], low, high);
                }
            }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int first = h + e * 8 + 2 * t;
            vote(best, dots[e], factor, two_of(sums, first), two_of(offsets, first), scale_of(first));
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1)
vote_latents(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ FACTORS int factors[256];
    __shared__ __align__(8) int offsets[AT_ONCE][COLUMNS_OF], sums[COLUMNS_OF];
    __shared__ __align__(16) float2 scales[SAMPLING ? COLUMNS_OF : 2];
    __shared__ int held[AT_ONCE][256];  // votes of the thread's own key in each block
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = warp * 32 + lane % 4 * 8 + lane / 4;
    char *integers = memory, *stages = memory + COLUMNS_OF * WIDTH;
    i64 b = blockIdx.y;
    factors[threadIdx.x] = args.factors[threadIdx.x];
    const i8* rounded = args.integers + b * (COLUMNS_OF * WIDTH);
    for (int i = threadIdx.x; i < COLUMNS_OF * (WIDTH / 16); i += 256)
        copy_async<16>(shared_place(integers) + i * 16, rounded + i * 16);
    i64 tokens = __ldcg(args.length + RAGGED * b), blocks = (tokens + TOKENS - 1) / TOKENS;
    i64 each = min(i64(AT_ONCE), max(1ll, (blocks + gridDim.x - 1) / gridDim.x));
    for (int h = threadIdx.x; h < COLUMNS_OF; h += 256) {
        i64 of = (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP;
        sums[h] = h < HEADS ? __ldcg(args.sums + of) : 0;
        for (int j = 0; j < AT_ONCE; j++) offsets[j][h] = LEAST;
#if SAMPLING
        scales[h] = h < HEADS ? __ldcg(args.scales + of) : float2{0, NEVER};
#endif
    }
    u32 shifts = shifts_of(args.weight_scale[b]);
    int threshold = 0, base = 0, shift = 0;
    bool waited = false;
    auto wait_for_threshold = [&] {
        if (waited) return;
        after_previous();
        let_next_begin();
        threshold = __ldcg(args.thresholds + b), base = __ldcg(args.bases + b), shift = __ldcg(args.shifts + b);
        waited = true;
    };
#pragma unroll 1
    for (i64 start = blockIdx.x * each; start < blocks; start += gridDim.x * each) {
        int many = int(min(each, blocks - start));
        u64 places = lane < many ? u64(args.codes[b * args.row + start + lane]) : 0;
        auto fetch = [&](int at) {
            const char* from = reinterpret_cast<const char*>(__shfl_sync(ALL, places, at));
            for (int i = threadIdx.x; i < CENTER / 16; i += 256)
                copy_async<16>(shared_place(stages + at % STAGES * STAGE) + i * 16, from + i * 16);
        };
        __syncthreads();  // all threads have finished with the previous contents
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) {
            if (j < many) fetch(j);
            async_commit();
        }
        for (int i = threadIdx.x; i < many * HEADS; i += 256) {
            int at = i / HEADS, h = i % HEADS;
            float units = __ldcg(args.units + (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP);
            offsets[at][h] = CENTERED ? offset_of(__ldcg(args.products + (b * args.row + start) * HEADS + i), units) : 0;
        }
#pragma unroll 1
        for (int at = 0; at < many; at++) {
            u32 valid = args.valid[(b * args.row + start + at) * 8 + warp];
            async_wait_but<STAGES - 2>();
#if WARPGROUPS
            show_to_warpgroup();  // make the queries visible to the tensor cores; needed once, with the first keys
#endif
            __syncthreads();
            if (at + STAGES - 1 < many) fetch(at + STAGES - 1);
            async_commit();
            const char* codes = stages + at % STAGES * STAGE;
            u32 weights = *reinterpret_cast<const u32*>(codes + WEIGHTS + (warp * 8 + lane / 4) * 4) + shifts;
            int factor[4];
            Vote best[4];
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i] = factors[weights >> 8 * i & 255];
            vote_on(best, codes + warp * (32 * STRIDE), integers, factor, sums, offsets[at], scales);
            Vote mine = best_of(best);  // each of four lanes gets the vote of one of its four keys
            i64 id = (start + at) * TOKENS + key;
            int vote = LEAST;
            if (id < tokens && valid >> key % 32 & 1) {
#if SAMPLING
                vote = priority_of(mine, u32(id), __ldcg(args.seeds + b));
#else
                vote = mine;
#endif
            }
            held[at][threadIdx.x] = vote;
            // The votes (approximate scores of keys) may be written before the previous kernel has ended,
            // because that kernel does not read them.
            if (id < args.room) args.votes[b * args.room + id] = vote;
        }
        wait_for_threshold();
        auto listed = [&](int at) { return held[at][threadIdx.x] >= threshold && held[at][threadIdx.x] != LEAST; };
        int count = 0;
        for (int at = 0; at < many; at++) count += listed(at);
        int to = room_for<256>(count, args.counts + b * APART);
        for (int at = 0; at < many; at++) {
            if (!listed(at)) continue;
            int vote = held[at][threadIdx.x];
            if (to < args.capacity) args.list[b * args.capacity + to] = entry_of(vote, int(start + at) * TOKENS + key);
            atomicAdd(args.histogram + b * BINS + bin_of(vote, base, shift), 1);
            to++;
        }
    }
    async_wait();
    wait_for_threshold();
}
