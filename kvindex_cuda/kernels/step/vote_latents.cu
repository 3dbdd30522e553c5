// Coarse stage for many heads of a group, as one tile of them after another (votes.cuh; paper, B.2.1).
//
// A block of threads has a block of 256 keys in shared memory, each of its warps some tiles of heads; the largest
// vote of a key is found there. So codes are read once, whatever the number of heads. scan.cu has no room for
// the planes of more than 16 heads in its registers.
// Grid: (any, B), 256 threads. Reads D/8 + 1 bytes per key and 2 D per block of keys, once, and from L2 the planes
// of all heads for each; writes 4 bytes per key, and 8 and a count for each key at or above the threshold.
// Limited by the matrix unit from some 32 heads on: D PLANES / 128 instructions for 16 keys and 4 heads.
// Compile-time: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED, PLANES, DRAWN, RAGGED (each row of
// the batch has a length).
#include "common/tiles.cuh"
#include "common/votes.cuh"

constexpr int SHARE = TILES >= 8 ? 1 : TILES >= 4 ? 2 : TILES >= 2 ? 4 : 8;  // warps of a tile

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks
    const u32* planes;          // of prepare_query.cu, of tiles, as are sums, units, thresholds, bases and shifts
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

// Integers that order as floats do, and back.
__device__ __forceinline__ int as_order(float x) {
    int bits = int(__float_as_uint(x));
    return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float from_order(int order) {
    return __uint_as_float(u32(order ^ (order >> 31 & 0x7fffffff)));
}

extern "C" __global__ void __launch_bounds__(256)
vote_latents(const __grid_constant__ Arguments args) {
    __shared__ __align__(128) char codes[(SCANNED + 127) / 128 * 128];
    __shared__ FACTORS int factors[256];
    __shared__ int best[TOKENS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 b = blockIdx.y;
    factors[threadIdx.x] = args.factors[threadIdx.x];
    after_previous();
    let_next_begin();
    i64 tokens = __ldcg(args.length + RAGGED * b), blocks = (tokens + TOKENS - 1) / TOKENS;
    u32 shifts = shifts_of(args.weight_scale[b]);
    Listing listing = listing_of(args.thresholds + b * TILES, args.bases + b * TILES, args.shifts + b * TILES);
#if DRAWN
    u32 seed = __ldcg(args.seeds + b * TILES);
#endif
#pragma unroll 1
    for (i64 s = blockIdx.x; s < blocks; s += gridDim.x) {
        __syncthreads();  // what is there was read
        const char* from = reinterpret_cast<const char*>(args.codes[b * args.row + s]);
        for (int i = threadIdx.x; i < SCANNED / 16; i += 256)
            copy_piece<16>(shared_place(codes) + i * 16, from + i * 16);
        best[threadIdx.x] = LEAST;
        pieces_wait();
        __syncthreads();
        Shared place = shared_place(codes), factor_places = shared_place(factors);
#pragma unroll 1
        for (int unit = warp; unit < TILES * SHARE; unit += 8) {
            int tile = unit / SHARE, first = unit % SHARE * (8 / SHARE);
            Group group;
            load(group, args.queries, args.planes, args.sums, args.units, {args.scales, args.seeds}, b * TILES + tile);
            Mean mean;
            int offsets[SETS][2];
            load(mean, place + CENTER);
            float* products = args.products + (b * args.row + s) * (TILES * GROUP) + tile * GROUP + 2 * lane % 4;
            offsets_of<true>(offsets, mean, group, products);
#pragma unroll 1
            for (int part = first; part < first + 8 / SHARE; part++) {
                Signs signs;
                load(signs, place, part);
                u32 weights = load_weights(place + WEIGHTS, part);
#if DRAWN
                int vote = as_order(size_of(signs, weights, shifts, group, offsets, factor_places));
#else
                int vote = vote_of(signs, weights, shifts, group, offsets, factor_places, 0);
#endif
                atomicMax(best + part * 32 + own_key(), vote);
            }
        }
        __syncthreads();
        int i = threadIdx.x, id = int(s) * TOKENS + i, vote = best[i];
        bool there = id < tokens && args.valid[(b * args.row + s) * 8 + i / 32] >> i % 32 & 1;
#if DRAWN
        vote = priority_of(from_order(vote), id, seed);
#endif
        if (!there) vote = LEAST;
        if (id < args.room) args.votes[b * args.room + id] = vote;
        bool listed = there && vote >= listing.threshold;
        u32 all = __ballot_sync(ALL, listed);
        int start = lane == 0 && all ? atomicAdd(args.counts + b * APART, __popc(all)) : 0;
        int to = __shfl_sync(ALL, start, 0) + __popc(all & ((1u << lane) - 1));
        if (listed) {
            if (to < args.capacity) args.list[b * args.capacity + to] = entry_of(vote, id);
            atomicAdd(args.histogram + b * BINS + bin_of(vote, listing.base, listing.shift), 1);
        }
    }
}
