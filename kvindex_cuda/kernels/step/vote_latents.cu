// Coarse stage for many heads of a group (paper, B.2.1; pariskv.sign_votes): products of bytes, 0 or 1 for the signs of 16
// keys and the rounded queries of 8 heads (byte_votes.cuh).
//
// A block of threads has all rounded queries in shared memory, and there a block of 256 keys after another, the next
// ones on their way while one is voted on. A warp has 32 keys, whose signs it spreads to bytes once for all heads: so
// codes are read and unpacked once, whatever the number of heads. (scan.cu takes bits as they are, of queries'
// digits: more instructions for each head, and its registers hold the queries of 16 heads at most.) With WARPGROUPS four
// warps multiply 16 keys of each with all heads at once, up to 64 of them while votes of 64 others are made.
// All votes of up to AT_ONCE blocks of keys are made before the threshold is waited for: sample_latents.cu runs beside
// them, for they wait for prepare_latents.cu alone, which has ended when this kernel begins. Then these are listed, with
// one addition to the list's counter.
// Grid: (any, B), 256 threads. Reads D/8 + 1 bytes per key once, 4 per head and block of keys, and D bytes per head a
// block of threads; writes 4 bytes per key, and 8 and a count for each key at or above the threshold.
// Limited by the matrix unit from some 64 heads on: 2 D operations for each key and head.
// Dynamic shared memory: COLUMNS_OF WIDTH + STAGES STAGE bytes.
// Compile-time: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED, PLANES, DRAWN, RAGGED (each row of
// the batch has a length), WARPGROUPS (compute capability 9.0 alone, compiled for sm_90a).
#if WARPGROUPS
#include "common/warpgroup.cuh"
#else
#include "common/byte_votes.cuh"
#endif

constexpr int STAGE = (CENTER + 127) / 128 * 128;        // of signs and weights
constexpr int AT_ONCE = 8;                               // blocks of keys whose offsets come together

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks
    const i8* integers;         // [B, WIDTH / 16, COLUMNS_OF, 16]: of prepare_latents.cu, as are the next five
    const int* sums;
    const float* units;
    const float* products;      // [B, row, HEADS]: ⟨q, μ⟩ of each block
    const float2* scales;       // of votes.cuh, as are seeds
    const u32* seeds;           // [B]
    const float* weight_scale;  // [B]
    const int* factors;         // [256]
    const u32* valid;           // [B, row, 8]: a bit per token
    const i64* length;          // [1], or RAGGED: [B]
    const int* thresholds;      // [B]: of sample_latents.cu, as are bases and shifts
    const int* bases;
    const int* shifts;
    int* votes;                 // [B, room]: of all keys, or priorities
    int* counts;                // [B] APART: entries listed, cleared before
    u64* list;                  // [B, capacity]
    int* histogram;             // [B, BINS], cleared before
    i64 row, room, capacity;
};

// The best votes of 32 keys of a warp. signs: of the first of them; integers: all rounded queries, in shared memory;
// sums, offsets, scales: of heads.
__device__ __forceinline__ void vote_on(Vote (&best)[4], const char* signs, const char* integers, const int (&factor)[4],
                                        const int* sums, const int* offsets, const float2* scales) {
    int lane = threadIdx.x % 32, t = lane % 4;
    auto scale_of = [&](int h) { return DRAWN ? *reinterpret_cast<const float4*>(scales + h) : float4{}; };
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
        best[2] = two[0], best[3] = two[1];  // of the last half
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
    __shared__ __align__(16) float2 scales[DRAWN ? COLUMNS_OF : 2];
    __shared__ int held[AT_ONCE][256];  // votes of keys: a thread's own
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = warp * 32 + lane % 4 * 8 + lane / 4;
    char *integers = memory, *stages = memory + COLUMNS_OF * WIDTH;
    i64 b = blockIdx.y;
    factors[threadIdx.x] = args.factors[threadIdx.x];
    const i8* rounded = args.integers + b * (COLUMNS_OF * WIDTH);
    for (int i = threadIdx.x; i < COLUMNS_OF * (WIDTH / 16); i += 256)
        copy_piece<16>(shared_place(integers) + i * 16, rounded + i * 16);
    i64 tokens = __ldcg(args.length + RAGGED * b), blocks = (tokens + TOKENS - 1) / TOKENS;
    i64 each = min(i64(AT_ONCE), max(1ll, (blocks + gridDim.x - 1) / gridDim.x));
    for (int h = threadIdx.x; h < COLUMNS_OF; h += 256) {
        i64 of = (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP;
        sums[h] = h < HEADS ? __ldcg(args.sums + of) : 0;
        for (int j = 0; j < AT_ONCE; j++) offsets[j][h] = LEAST;
#if DRAWN
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
                copy_piece<16>(shared_place(stages + at % STAGES * STAGE) + i * 16, from + i * 16);
        };
        __syncthreads();  // what is there was read, or written
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) {
            if (j < many) fetch(j);
            pieces_commit();
        }
        for (int i = threadIdx.x; i < many * HEADS; i += 256) {
            int at = i / HEADS, h = i % HEADS;
            float units = __ldcg(args.units + (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP);
            offsets[at][h] = CENTERED ? offset_of(__ldcg(args.products + (b * args.row + start) * HEADS + i), units) : 0;
        }
#pragma unroll 1
        for (int at = 0; at < many; at++) {
            u32 valid = args.valid[(b * args.row + start + at) * 8 + warp];
            pieces_wait_but<STAGES - 2>();
#if WARPGROUPS
            show_to_warpgroup();  // the queries, when the first keys come
#endif
            __syncthreads();
            if (at + STAGES - 1 < many) fetch(at + STAGES - 1);
            pieces_commit();
            const char* codes = stages + at % STAGES * STAGE;
            u32 weights = *reinterpret_cast<const u32*>(codes + WEIGHTS + (warp * 8 + lane / 4) * 4) + shifts;
            int factor[4];
            Vote best[4];
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i] = factors[weights >> 8 * i & 255];
            vote_on(best, codes + warp * (32 * STRIDE), integers, factor, sums, offsets[at], scales);
            Vote mine = best_of(best);  // of four lanes each has one of the four keys
            i64 id = (start + at) * TOKENS + key;
            int vote = LEAST;
            if (id < tokens && valid >> key % 32 & 1) {
#if DRAWN
                vote = priority_of(mine, u32(id), __ldcg(args.seeds + b));
#else
                vote = mine;
#endif
            }
            held[at][threadIdx.x] = vote;
            if (id < args.room) args.votes[b * args.room + id] = vote;  // which no kernel beside this one reads
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
    pieces_wait();
    wait_for_threshold();
}
