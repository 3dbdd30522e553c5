// Coarse stage for many heads of a group (paper, B.2.1; ops.step_votes): products of bytes, 0 or 1 for the signs of 16
// keys and the rounded queries of 8 heads (byte_votes.cuh).
//
// A block of threads has all rounded queries in shared memory, and there a block of 256 keys after another, the next
// ones on their way while one is voted on. A warp has 32 keys, whose signs it spreads to bytes once for all heads: so
// codes are read and unpacked once, whatever the number of heads. (scan.cu takes bits as they are, of queries'
// digits: more instructions for each head, and its registers hold the queries of 16 heads at most.)
// All that comes before the first keys' votes are listed waits for prepare_latents.cu alone, which has ended when this
// kernel begins: so sample_latents.cu runs beside it.
// Grid: (any, B), 256 threads. Reads D/8 + 1 bytes per key once, 4 per head and block of keys, and D bytes per head a
// block of threads; writes 4 bytes per key, and 8 and a count for each key at or above the threshold.
// Limited by the matrix unit from some 32 heads on: D / 32 instructions for 16 keys and 8 heads, those of several
// eights of heads in turns, for each waits for the one before it.
// Dynamic shared memory: COLUMNS_OF PITCH + STAGES STAGE bytes.
// Compile-time: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED, PLANES, DRAWN, RAGGED (each row of
// the batch has a length).
#include "common/byte_votes.cuh"

constexpr int PITCH = (WIDTH + 127) / 128 * 128 + 32;    // in shared memory: lanes of four heads find other banks
constexpr int STAGE = (CENTER + 127) / 128 * 128;        // of signs and weights
constexpr int AT_ONCE = 8;                               // blocks of keys whose offsets come together
constexpr int EIGHTS_AT_ONCE = COLUMNS_OF % 16 == 0 ? 2 : 1;  // of heads

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks
    const i8* integers;         // [B, HEADS, WIDTH]: of prepare_latents.cu, as are the next five
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

extern "C" __global__ void __launch_bounds__(256, 1)
vote_latents(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ FACTORS int factors[256];
    __shared__ __align__(8) int offsets[AT_ONCE][COLUMNS_OF], sums[COLUMNS_OF];
    __shared__ __align__(16) float2 scales[DRAWN ? COLUMNS_OF : 2];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    char *integers = memory, *stages = memory + COLUMNS_OF * PITCH;
    i64 b = blockIdx.y;
    factors[threadIdx.x] = args.factors[threadIdx.x];
    const i8* rounded = args.integers + b * (HEADS * WIDTH);
    for (int i = threadIdx.x; i < COLUMNS_OF * (WIDTH / 16); i += 256) {
        int h = i / (WIDTH / 16), piece = i % (WIDTH / 16) * 16;
        const i8* from = rounded + (h < HEADS ? h * WIDTH + piece : 0);
        copy_piece<16>(shared_place(integers + h * PITCH + piece), from, h < HEADS);
    }
    i64 tokens = __ldcg(args.length + RAGGED * b), blocks = (tokens + TOKENS - 1) / TOKENS;
    i64 each = min(i64(AT_ONCE), max(1ll, (blocks + gridDim.x - 1) / gridDim.x));
    auto fetch = [&](i64 s, int stage) {
        const char* from = reinterpret_cast<const char*>(args.codes[b * args.row + s]);
        for (int i = threadIdx.x; i < CENTER / 16; i += 256)
            copy_piece<16>(shared_place(stages + stage * STAGE) + i * 16, from + i * 16);
    };
    for (int h = threadIdx.x; h < COLUMNS_OF; h += 256) {
        i64 of = (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP;
        sums[h] = h < HEADS ? __ldcg(args.sums + of) : 0;
        for (int j = 0; j < AT_ONCE; j++) offsets[j][h] = LEAST;
#if DRAWN
        scales[h] = h < HEADS ? __ldcg(args.scales + of) : float2{0, NEVER};
#endif
    }
    u32 shifts = shifts_of(args.weight_scale[b]), seed = DRAWN ? __ldcg(args.seeds + b) : 0;
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
        __syncthreads();  // what is there was read, or written
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) {
            if (j < many) fetch(start + j, j);
            pieces_commit();
        }
        for (int i = threadIdx.x; i < many * HEADS; i += 256) {
            int at = i / HEADS, h = i % HEADS;
            float units = __ldcg(args.units + (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP);
            offsets[at][h] = CENTERED ? offset_of(__ldcg(args.products + (b * args.row + start) * HEADS + i), units) : 0;
        }
#pragma unroll 1
        for (int at = 0; at < many; at++) {
            pieces_wait_but<STAGES - 2>();
            __syncthreads();
            if (at + STAGES - 1 < many) fetch(start + at + STAGES - 1, (at + STAGES - 1) % STAGES);
            pieces_commit();
            const char* codes = stages + at % STAGES * STAGE;
            Keys<2> keys;
            load(keys, codes + warp * (32 * STRIDE));
            u32 weights = *reinterpret_cast<const u32*>(codes + WEIGHTS + (warp * 8 + lane / 4) * 4) + shifts;
            int factor[4];
            Vote best[4];
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i] = factors[weights >> 8 * i & 255], best[i] = NO_VOTE;
#pragma unroll 1
            for (int h = 0; h < COLUMNS_OF; h += 8 * EIGHTS_AT_ONCE) {
                int dots[EIGHTS_AT_ONCE][2][4] = {};
                const char* right = integers + (h + lane / 4) * PITCH + t * 8;
#pragma unroll
                for (int w = 0; w < WORDS; w++)
#pragma unroll
                    for (int e = 0; e < EIGHTS_AT_ONCE; e++) {
                        uint2 two = *reinterpret_cast<const uint2*>(right + e * (8 * PITCH) + w * 32);
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const u32(&left)[4] = keys.words[half][w];
                            mma_bytes(dots[e][half], left[0], left[1], left[2], left[3], two.x, two.y);
                        }
                    }
#pragma unroll
                for (int e = 0; e < EIGHTS_AT_ONCE; e++) {
                    int first = h + e * 8 + 2 * t;
                    float4 scale = {};
#if DRAWN
                    scale = *reinterpret_cast<const float4*>(scales + first);
#endif
                    vote(best, dots[e], factor, *reinterpret_cast<const int2*>(sums + first),
                         *reinterpret_cast<const int2*>(offsets[at] + first), scale);
                }
            }
            Vote mine = best_of(best);  // of four lanes each has one of the four keys
            i64 s = start + at;
            int key = t * 8 + lane / 4, id = int(s) * TOKENS + warp * 32 + key;
            bool there = id < tokens && args.valid[(b * args.row + s) * 8 + warp] >> key & 1;
#if DRAWN
            int vote = priority_of(mine, id, seed);
#else
            int vote = mine;
#endif
            if (!there) vote = LEAST;
            wait_for_threshold();
            if (id < args.room) args.votes[b * args.room + id] = vote;
            bool listed = there && vote >= threshold;
            u32 all = __ballot_sync(ALL, listed);
            int first = lane == 0 && all ? atomicAdd(args.counts + b * APART, __popc(all)) : 0;
            int to = __shfl_sync(ALL, first, 0) + __popc(all & ((1u << lane) - 1));
            if (listed) {
                if (to < args.capacity) args.list[b * args.capacity + to] = entry_of(vote, id);
                atomicAdd(args.histogram + b * BINS + bin_of(vote, base, shift), 1);
            }
        }
    }
    pieces_wait();
    wait_for_threshold();
}
