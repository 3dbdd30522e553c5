// Coarse stage for many heads of a group (paper, B.2.1; ops.step_votes): Σ_j s_j r_j as a product of bytes, 0 or 1 for
// the signs of 16 keys and the rounded queries of 8 heads as they are, for Σ s r = 2 Σ b r − Σ r.
//
// A block of threads has all rounded queries in shared memory, and there a block of 256 keys after another, the next
// one on its way while one is voted on. A warp has 32 keys, whose signs it spreads to bytes once for all heads: so
// codes are read and unpacked once, whatever the number of heads. (scan.cu takes bits as they are, of queries'
// digits: more instructions for each head, and its registers hold the queries of 16 heads at most.)
// What centers of up to 8 blocks make with the queries is one product for each tile of heads, first (votes.cuh).
// Grid: (any, B), 256 threads. Reads D/8 + 1 bytes per key and 2 D per block of keys, once, and D bytes per head a block
// of threads; writes 4 bytes per key, and 8 and a count for each key at or above the threshold.
// Limited by the matrix unit from some 32 heads on: D / 32 instructions for 16 keys and 8 heads.
// Dynamic shared memory: COLUMNS_OF PITCH + 2 STAGE bytes.
// Compile-time: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED, PLANES, DRAWN, RAGGED (each row of
// the batch has a length).
#include "common/tiles.cuh"
#include "common/votes.cuh"

constexpr int HEADS = TILES * GROUP, COLUMNS_OF = (HEADS + 7) / 8 * 8;
constexpr int WIDTH = WORDS * 32;                        // bytes of a rounded query
constexpr int PITCH = (WIDTH + 127) / 128 * 128 + 32;    // in shared memory: lanes of four heads find other banks
constexpr int STAGE = (CENTER + 127) / 128 * 128;        // of signs and weights
constexpr int AT_ONCE = 8;                               // blocks of keys whose centers come together

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks
    const i8* integers;         // [B, HEADS, WIDTH]: of prepare_query.cu, of tiles, as are sums, units, thresholds,
                                // bases and shifts
    const int* sums;
    const void* queries;        // DTYPE [B, TILES GROUP, D]
    const float* units;
    const float* weight_scale;  // [B]
    const int* factors;         // [256]
    const u32* valid;           // [B, row, 8]: a bit per token
    const i64* length;          // [1], or RAGGED: [B]
    const int* thresholds;
    const int* bases;
    const int* shifts;
    const float2* scales;       // of votes.cuh, as are seeds
    const u32* seeds;
    int* votes;                 // [B, room]: of all keys, or priorities
    int* counts;                // [B] APART: entries listed, cleared before
    u64* list;                  // [B, capacity]
    int* histogram;             // [B, BINS], cleared before
    float* products;            // [B, row, TILES GROUP]: ⟨q, μ⟩ of each block
    i64 row, room, capacity;
};

// Four bits as bytes of 0 or 1.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

extern "C" __global__ void __launch_bounds__(256, 1)
vote_latents(const __grid_constant__ Arguments args) {
    DYNAMIC_SHARED(memory);
    __shared__ FACTORS int factors[256];
    __shared__ __align__(8) int offsets[AT_ONCE][COLUMNS_OF], sums[COLUMNS_OF];
#if DRAWN
    __shared__ __align__(16) float2 scales[COLUMNS_OF];
    typedef float Vote;
    const float NO_VOTE = NEVER;
#else
    typedef int Vote;
    constexpr int NO_VOTE = LEAST;
#endif
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    char *integers = memory, *stages = memory + COLUMNS_OF * PITCH;
    i64 b = blockIdx.y;
    factors[threadIdx.x] = args.factors[threadIdx.x];
    after_previous();
    let_next_begin();
    const i8* rounded = args.integers + b * (HEADS * WIDTH);
    for (int i = threadIdx.x; i < COLUMNS_OF * (WIDTH / 16); i += 256) {
        int h = i / (WIDTH / 16), piece = i % (WIDTH / 16) * 16;
        const i8* from = rounded + (h < HEADS ? h * WIDTH + piece : 0);
        copy_piece<16>(shared_place(integers + h * PITCH + piece), from, h < HEADS);
    }
    for (int h = threadIdx.x; h < COLUMNS_OF; h += 256) {
        i64 of = (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP;
        sums[h] = h < HEADS ? __ldcg(args.sums + of) : 0;
        for (int j = 0; j < AT_ONCE; j++) offsets[j][h] = LEAST;
#if DRAWN
        scales[h] = h < HEADS ? __ldcg(args.scales + of) : float2{0, NEVER};
#endif
    }
    i64 tokens = __ldcg(args.length + RAGGED * b), blocks = (tokens + TOKENS - 1) / TOKENS;
    i64 each = min(i64(AT_ONCE), max(1ll, (blocks + gridDim.x - 1) / gridDim.x));
    u32 shifts = shifts_of(args.weight_scale[b]);
    Listing listing = listing_of(args.thresholds + b * TILES, args.bases + b * TILES, args.shifts + b * TILES);
#if DRAWN
    u32 seed = __ldcg(args.seeds + b * TILES);
#endif
    auto block_of = [&](i64 s) { return reinterpret_cast<const char*>(args.codes[b * args.row + s]); };
    auto fetch = [&](i64 s, int stage) {
        const char* from = block_of(s);
        for (int i = threadIdx.x; i < CENTER / 16; i += 256)
            copy_piece<16>(shared_place(stages + stage * STAGE) + i * 16, from + i * 16);
    };
#pragma unroll 1
    for (i64 start = blockIdx.x * each; start < blocks; start += gridDim.x * each) {
        int many = int(min(each, blocks - start));
        __syncthreads();  // what is there was read, or written
        fetch(start, 0);
#pragma unroll 1
        for (int tile = warp; tile < TILES; tile += 8) {
            Group group;
            i64 of = b * TILES + tile;
            load_queries(group, static_cast<const char*>(args.queries) + of * (GROUP * D * (DTYPE == 0 ? 4 : 2)));
            Mean mean = {};
            if (lane / 4 < many) load(mean, block_of(start + lane / 4) + CENTER);
            float dots[SETS][2];
            products_of(dots, mean, group);
#pragma unroll
            for (int i = 0; i < 2 * SETS; i++) {
                int h = i / 2 * 4 + 2 * t + i % 2, head = tile * GROUP + h;
                if (t >= 2 || h >= GROUP || lane / 4 >= many) continue;
                float dot = dots[i / 2][i % 2], votes = dot * __ldcg(args.units + of * (SETS * 4) + h);
                if (CENTERED) args.products[(b * args.row + start + lane / 4) * HEADS + head] = dot;
                votes = fminf(fmaxf(votes, -1073741824.0f), 1073741824.0f);
                offsets[lane / 4][head] = CENTERED ? __float2int_rn(votes) : 0;
            }
        }
#pragma unroll 1
        for (int at = 0; at < many; at++) {
            pieces_wait();
            __syncthreads();
            if (at + 1 < many) fetch(start + at + 1, (at + 1) % 2);
            const char* codes = stages + at % 2 * STAGE + warp * (32 * STRIDE);
            u32 left[2][WORDS][4];  // factors of the product, of keys lane / 4 + 16 half + 0 and 8
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int w = 0; w < WORDS; w++)
#pragma unroll
                    for (int row = 0; row < 2; row++) {
                        int key = half * 16 + row * 8 + lane / 4;
                        u32 bits = *reinterpret_cast<const u32*>(codes + key * STRIDE + w * 4) >> 8 * t;
                        left[half][w][row] = spread(bits), left[half][w][row + 2] = spread(bits >> 4);
                    }
            const char* weights_at = stages + at % 2 * STAGE + WEIGHTS + (warp * 8 + lane / 4) * 4;
            u32 weights = *reinterpret_cast<const u32*>(weights_at) + shifts;
            int factor[4];
            Vote best[4];
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i] = factors[weights >> 8 * i & 255], best[i] = NO_VOTE;
#pragma unroll 1
            for (int h = 0; h < COLUMNS_OF; h += 8) {
                int dots[2][4] = {};
                const char* right = integers + (h + lane / 4) * PITCH + t * 8;
#pragma unroll
                for (int w = 0; w < WORDS; w++) {
                    uint2 two = *reinterpret_cast<const uint2*>(right + w * 32);
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        mma_bytes(dots[half], left[half][w][0], left[half][w][1], left[half][w][2], left[half][w][3],
                                  two.x, two.y);
                }
                int2 sum = *reinterpret_cast<const int2*>(sums + h + 2 * t);
                int2 offset = *reinterpret_cast<const int2*>(offsets[at] + h + 2 * t);
#if DRAWN
                float4 scale = *reinterpret_cast<const float4*>(scales + h + 2 * t);
#endif
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int own = i / 2, dot = 2 * dots[own / 2][own % 2 * 2 + i % 2] - (i % 2 ? sum.y : sum.x);
                    int vote = mad(dot, factor[own], i % 2 ? offset.y : offset.x);
#if DRAWN
                    best[own] = fmaxf(best[own], fmaf(float(vote), i % 2 ? scale.z : scale.x, i % 2 ? scale.w : scale.y));
#else
                    best[own] = max(best[own], vote);
#endif
                }
            }
            // of four lanes each has one of the four keys
            Vote mine = NO_VOTE;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                for (int step = 1; step < 4; step *= 2) {
                    Vote other = __shfl_xor_sync(ALL, best[i], step);
                    best[i] = other > best[i] ? other : best[i];
                }
                if (t == i) mine = best[i];
            }
            i64 s = start + at;
            int key = t * 8 + lane / 4, id = int(s) * TOKENS + warp * 32 + key;
            bool there = id < tokens && args.valid[(b * args.row + s) * 8 + warp] >> key & 1;
#if DRAWN
            int vote = priority_of(mine, id, seed);
#else
            int vote = mine;
#endif
            if (!there) vote = LEAST;
            if (id < args.room) args.votes[b * args.room + id] = vote;
            bool listed = there && vote >= listing.threshold;
            u32 all = __ballot_sync(ALL, listed);
            int first = lane == 0 && all ? atomicAdd(args.counts + b * APART, __popc(all)) : 0;
            int to = __shfl_sync(ALL, first, 0) + __popc(all & ((1u << lane) - 1));
            if (listed) {
                if (to < args.capacity) args.list[b * args.capacity + to] = entry_of(vote, id);
                atomicAdd(args.histogram + b * BINS + bin_of(vote, listing.base, listing.shift), 1);
            }
        }
    }
    pieces_wait();
}
