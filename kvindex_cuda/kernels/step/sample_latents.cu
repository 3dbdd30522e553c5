// Find a threshold for the approximate scores (votes) of keys, for a group with many query heads (latent
// attention). More than C keys almost certainly reach the threshold, where C is the number of candidates. It is
// computed from the votes of a sample of the keys. Reference: thresholds_of in kvindex/pariskv/sign_votes.py.
//
// The sample has 32 keys from each of SAMPLED / 32 blocks of codes, evenly spread. Their codes are requested
// while prepare_latents.cu still runs. Each warp computes the votes of these keys for sets of 8 heads; if there
// are few heads, each warp processes only half of the keys. The thread block that finishes last finds the
// threshold (threshold.cuh).
//
// Grid: (SAMPLED / 32, B), 256 threads. Reads (D/8 + 1) SAMPLED bytes of codes, and from L2 D bytes per head
// and thread block.
// Limited by latency: reading the rounded queries, their product with the codes, and the search for the
// threshold in the last thread block.
// Compile-time constants: D, GROUP (heads of a tile), TILES, DTYPE (of queries), CENTERED (1: blocks have
// centers), PLANES, SAMPLING (1: candidates are sampled), RAGGED (1: each sequence has its own length).
#include "common/byte_votes.cuh"
#include "common/threshold.cuh"

constexpr int HALVES = HEADS > 32 ? 2 : 1;  // groups of 16 keys that a warp processes
constexpr int UNITS = COLUMNS_OF / 8 * (2 / HALVES);

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks of codes
    const u32* valid;           // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;          // [1], or RAGGED: [B]: number of tokens
    const float* weight_scale;  // [B]: power of two that log weights are relative to
    const int* wanted;          // [B]: C, the number of candidates wanted
    const int* counted;         // [B]: number of valid keys
    const int* factors;         // [256]: from kvindex.ops.codes.log_factors
    const i8* integers;         // [B, WIDTH / 16, COLUMNS_OF, 16]: written by prepare_latents.cu, as are the next five
    const int* sums;
    const float* units;
    const float* products;
    const float2* scales;
    const u32* seeds;
    int* sample;                // [B, SAMPLED]: votes of the sample
    int* tickets;               // [B]: counts finished thread blocks, 0 before and after the launch
    int* thresholds;            // [B]: keys with lower votes are not listed
    int* bases;                 // [B]: vote at which the histogram's first bin begins
    int* shifts;                // [B]: log2 of the width of the histogram's bins
    i64 row;
};

extern "C" __global__ void __launch_bounds__(256)
sample_latents(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) char codes[32 * STRIDE];
    __shared__ __align__(8) int offsets[COLUMNS_OF], sums[COLUMNS_OF];
    __shared__ __align__(16) float2 scales[SAMPLING ? COLUMNS_OF : 2];
    __shared__ Vote votes[UNITS][16 * HALVES];
    __shared__ __align__(16) int histogram[BINS];
    i64 b = blockIdx.y, tokens = args.length[RAGGED * b], blocks = (tokens + TOKENS - 1) / TOKENS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, i = blockIdx.x;
    i64 s = blocks * i / (SAMPLED / 32);
    // The sample consists of groups of 32 consecutive keys. Each group is one eighth of a block, which has the
    // codes of 256 keys. Choose the number of the eighth (0 to 7) for group i. If the index has fewer blocks
    // than the sample has groups, several groups are in the same block, and neighboring groups take different
    // eighths.
    int part = blocks < SAMPLED / 32 ? i * 3 % 8 : int(u32(i) * 2654435761u >> 29);
    float share = float(args.wanted[b]), all = float(args.counted[b]);
    u32 weights = 0, valid = 0;
    if (tokens > 0) {
        const char* block = reinterpret_cast<const char*>(args.codes[b * args.row + s]);
        for (int j = threadIdx.x; j < 2 * STRIDE; j += 256)
            copy_async<16>(shared_place(codes + j * 16), block + part * (32 * STRIDE) + j * 16);
        weights = *reinterpret_cast<const u32*>(block + WEIGHTS + (part * 8 + lane / 4) * 4) + shifts_of(args.weight_scale[b]);
        valid = args.valid[(b * args.row + s) * 8 + part];
    }
    int all_factors[4];
#pragma unroll
    for (int k = 0; k < 4; k++) all_factors[k] = args.factors[weights >> 8 * k & 255];
    after_previous();
    let_next_begin();
    for (int h = threadIdx.x; h < COLUMNS_OF; h += 256) {
        i64 of = (b * TILES + h / GROUP) * (SETS * 4) + h % GROUP;
        bool there = h < HEADS && tokens > 0;
        sums[h] = there ? __ldcg(args.sums + of) : 0;
        offsets[h] = h >= HEADS ? LEAST : 0;
        if (CENTERED && there) offsets[h] = offset_of(__ldcg(args.products + (b * args.row + s) * HEADS + h), __ldcg(args.units + of));
#if SAMPLING
        scales[h] = there ? __ldcg(args.scales + of) : float2{0, NEVER};
#endif
    }
    async_wait();
    __syncthreads();
#pragma unroll 1
    for (int unit = warp; unit < UNITS && tokens > 0; unit += 8) {
        int h = unit / (2 / HALVES) * 8, half = HALVES == 2 ? 0 : unit % 2;
        Keys<HALVES> keys;
        load(keys, codes + half * (16 * STRIDE));
        const i8* right = args.integers + b * (COLUMNS_OF * WIDTH) + (h + lane / 4) * 16 + t * 4;
        int dots[HALVES][4] = {};
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            uint2 two = {__ldcg(reinterpret_cast<const u32*>(right + 2 * w * PIECE)),
                         __ldcg(reinterpret_cast<const u32*>(right + (2 * w + 1) * PIECE))};
#pragma unroll
            for (int k = 0; k < HALVES; k++)
                mma_bytes(dots[k], keys.words[k][w][0], keys.words[k][w][1], keys.words[k][w][2], keys.words[k][w][3], two.x, two.y);
        }
        int factor[2 * HALVES];
        Vote best[2 * HALVES];
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++)
            factor[k] = HALVES == 2 || half == 0 ? all_factors[k] : all_factors[k + 2], best[k] = NO_VOTE;
        float4 scale = {};
#if SAMPLING
        scale = *reinterpret_cast<const float4*>(scales + h + 2 * t);
#endif
        vote(best, dots, factor, *reinterpret_cast<const int2*>(sums + h + 2 * t),
             *reinterpret_cast<const int2*>(offsets + h + 2 * t), scale);
        Vote mine = best_of(best);
        if (t < 2 * HALVES) votes[unit][t * 8 + lane / 4] = mine;
    }
    __syncthreads();
    if (warp == 0) {
        Vote best = NO_VOTE;
        for (int unit = HALVES == 2 ? 0 : lane / 16; unit < UNITS; unit += 2 / HALVES) {
            Vote mine = votes[unit][lane % (16 * HALVES)];
            best = mine > best ? mine : best;
        }
        i64 id = s * TOKENS + part * 32 + lane;
        bool there = id < tokens && valid >> lane & 1;
        int found = LEAST;
#if SAMPLING
        if (there) found = priority_of(best, u32(id), __ldcg(args.seeds + b));
#else
        if (there) found = best;
#endif
        args.sample[b * SAMPLED + i * 32 + lane] = found;
    }
    if (!last_block(args.tickets + b, SAMPLED / 32)) return;
    Threshold found = threshold_of(args.sample + b * SAMPLED, share, all, histogram);
    if (threadIdx.x == 0) {
        args.thresholds[b] = found.threshold, args.bases[b] = found.base, args.shifts[b] = found.shift;
        args.tickets[b] = 0;
    }
}
