// Compute votes of keys from their sign bits (ParisKV paper, B.2.1). A vote is an integer estimate of the
// product of query and key; keys with high votes become candidates. Used by prepare_query.cu and scan.cu.
// Reference: kvindex/pariskv/sign_votes.py.
//
// vote = f · Σ_j s_j r_j + offset, with the key's signs s_j = ±1, the rounded query r, a factor f from the
// key's weight, and the product of the query and the center of the key's block as offset. The vote of a group
// is the maximum over its query heads.
//
// With sign bits b_j, Σ s r = 2 Σ b r − Σ r. Let r be written in binary. Then Σ b r is a sum over bit planes p
// of r: 2^p times the number of positions where b and plane p are both 1. A tensor core instruction on bits
// counts these positions for 16 keys and 8 columns, which are 2 bit planes of 4 heads. Sign bits are used as
// they are stored. A second instruction, on bytes, multiplies the counts by powers of four and adds them up. In
// fact r is written in base -2: each odd plane then counts -2 times the even plane before it, so both need the
// same powers of four.
//
// With SAMPLING, candidates are sampled at random. Votes are converted to a scale that all heads share, and
// noise is added to a key's maximum over the heads (kvindex/ops/priority.py). This sum, the key's priority,
// replaces the vote.
//
// Compile-time constants: D, GROUP (query heads per KV head), DTYPE (of queries), CENTERED (1: blocks of codes
// have centers), PLANES (digits of r in base -2: 4 can represent 5 and -5, 6 represent 21, 8 represent 85),
// SAMPLING.
#pragma once
#include "common/operands.cuh"
#if SAMPLING
#include "common/noise.cuh"
#endif

constexpr int SETS = (GROUP + 3) / 4;        // sets of 4 query heads
constexpr int PARTS = PLANES / 2;
constexpr int EIGHTS = (D + 31) / 32;        // groups of 8 coordinates of a center, and of a query, per lane
constexpr int PIECES = 3 - DTYPE;            // bfloat16 numbers that add up to a query's coordinate
constexpr int DOUBLE = PLANES <= 6 ? 2 : 1;  // factor of the powers of four; with more planes it would not fit into
                                             // bytes
constexpr bool IN_REGISTERS = SETS * EIGHTS * PIECES <= 8;  // true if registers hold the queries
constexpr int WEIGHTS = TOKENS * STRIDE;     // offsets of the fields in a record of codes
                                             // (kvindex_cuda/memory/layout.py)
constexpr int CENTER = WEIGHTS + TOKENS;
constexpr int SCANNED = CENTER + (CENTERED ? 2 * D : 0);  // bytes of a record that are needed for votes

// What a warp needs of the queries of a group to compute votes. The heads are divided into sets of 4. In each
// set, a lane computes results for two heads, numbers (2 lane) % 4 and (2 lane) % 4 + 1.
//   planes: bit planes of the rounded queries r, as fragments of the first product.
//   powers: powers of four, as fragments of the second product; powers[i] is for key i of two.
//   less: -Σ r of the lane's two heads.
//   units: votes per unit of q·k, for the lane's two heads.
//   queries: part of the queries as bfloat16 fragments, for products with centers (`half_of`).
struct Group {
    u32 planes[SETS][QUADS][PARTS], powers[2][PARTS];
    int less[SETS][2];
    float units[SETS][2];
    uint2 queries[IN_REGISTERS && CENTERED ? SETS : 1][EIGHTS][PIECES];
    const void* all;    // the queries, DTYPE [GROUP, D], aligned to 16 bytes
#if SAMPLING
    float4 scales[1];  // of the lane's two heads, if registers hold them
    const float4* all_scales;
    u32 seed;
#endif
};

// Converts votes to priorities. prepare_query.cu writes these tensors; both pointers are null if candidates are
// not sampled.
struct Sampling {
    const float2* scales;  // [BG, 4 SETS]: size of one vote in units of 2^-16 octaves, and an offset that puts all
                           // heads on one scale, -inf for a missing head
    const u32* seeds;      // [BG]: seed of the noise
};

// Return coordinates j to j + 7 of head h as bfloat16 numbers, two per word, with j = 32 i + 8 (lane % 4). A
// coordinate is the exact sum of PIECES bfloat16 numbers; `piece` says which of them is returned, the most
// significant one first. Coordinates from D on are 0.
__device__ __forceinline__ uint4 piece_of(const void* queries, int h, int i, int piece) {
    int j = 32 * i + threadIdx.x % 4 * 8;
    if (h >= GROUP || j >= D) return {0, 0, 0, 0};
    if (DTYPE == 2) return *reinterpret_cast<const uint4*>(static_cast<const u16*>(queries) + h * D + j);
    uint4 words;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        float x = element(queries, h * D + j + e);
#pragma unroll
        for (int p = 0; p < piece; p++) x -= __uint_as_float(__float_as_uint(x) & 0xffff0000u);
        u32 bits = __float_as_uint(x) >> 16;
        (&words.x)[e / 2] = e % 2 ? (&words.x)[e / 2] | bits << 16 : bits;
    }
    return words;
}
// Return this lane's fragment of a query, for tensor core products with centers.
__device__ __forceinline__ uint2 half_of(const void* queries, int n, int i, int piece) {
    int lane = threadIdx.x % 32;
    uint4 all = piece_of(queries, n * 4 + lane / 4 % 4, i, piece);
    return lane < 16 ? uint2{all.x, all.z} : uint2{all.y, all.w};
}
__device__ __forceinline__ void load_queries(Group& group, const void* queries) {
    group.all = queries;
    if (CENTERED && IN_REGISTERS)
#pragma unroll
        for (int n = 0; n < SETS; n++)
#pragma unroll
            for (int i = 0; i < EIGHTS * PIECES; i++)
                group.queries[IN_REGISTERS ? n : 0][i / PIECES][i % PIECES] =
                    half_of(queries, n, i / PIECES, i % PIECES);
}

// Set the right matrices of the second product in the computation of votes (top of this file). Their nonzero
// entries are powers of four.
__device__ __forceinline__ void set_powers(Group& group) {
    int lane = threadIdx.x % 32;
    bool own = lane % 4 == lane / 4 % 4, second = lane >= 16;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        group.powers[0][p] = own && !second ? DOUBLE << (2 * p) : 0;
        group.powers[1][p] = own && second ? DOUBLE << (2 * p) : 0;
    }
}

// Load what a warp needs of the queries of group `bg`. queries: DTYPE [BG, GROUP, D]. planes, sums and units
// are written by prepare_query.cu.
__device__ __forceinline__ void load(Group& group, const void* queries, const u32* planes,
                                     const int* sums, const float* units, const Sampling& draw, i64 bg) {
    int lane = threadIdx.x % 32;
    constexpr int SIZE = DTYPE == 0 ? 4 : 2;
    load_queries(group, static_cast<const char*>(queries) + bg * (GROUP * D * SIZE));
#pragma unroll
    for (int i = 0; i < SETS * QUADS * PARTS; i++)
        (&group.planes[0][0][0])[i] = planes[(bg * (SETS * QUADS * PARTS) + i) * 32 + lane];
#pragma unroll
    for (int n = 0; n < SETS; n++) {
        const int* two = sums + bg * SETS * 4 + n * 4 + 2 * lane % 4;
        group.less[n][0] = -two[0], group.less[n][1] = -two[1];
        for (int i = 0; i < 2; i++) group.units[n][i] = units[bg * SETS * 4 + n * 4 + 2 * lane % 4 + i];
    }
    set_powers(group);
#if SAMPLING
    group.all_scales = reinterpret_cast<const float4*>(draw.scales) + bg * SETS * 2 + lane % 2;
    if (SETS == 1) group.scales[0] = *group.all_scales;
    group.seed = draw.seeds[bg];
#endif
}

// A lane's coordinates of a center, in the layout of `piece_of`.
struct Mean {
    uint4 eights[EIGHTS];
};
template <class Place>  // an address in global or in shared memory
__device__ __forceinline__ void load(Mean& mean, Place center) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        int j = 32 * i + threadIdx.x % 4 * 8;
        mean.eights[i] = CENTERED && j < D ? load_from<uint4>(center + 2 * j) : uint4{0, 0, 0, 0};
    }
}

// Compute the products ⟨q, μ⟩ of a center μ with the queries of this lane's two heads in each set of four. Each
// group of four neighboring lanes can process another center.
__device__ __forceinline__ void products_of(float (&products)[SETS][2], const Mean& mean, const Group& group) {
    bool later = threadIdx.x & 2;  // the lane keeps the later two of its four sums
#pragma unroll
    for (int n = 0; n < SETS; n++) {
        float dots[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < (CENTERED ? EIGHTS : 0); i++)
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                uint4 a = mean.eights[i];
                uint2 b = IN_REGISTERS ? group.queries[IN_REGISTERS ? n : 0][i][piece] : half_of(group.all, n, i, piece);
                mma_halves<true>(dots, a.x, a.y, a.z, a.w, b.x, b.y);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float dot = later ? dots[2 + i] : dots[i];
            products[n][i] = dot + __shfl_xor_sync(ALL, dot, 2);
        }
    }
}

// Compute ⟨q, μ⟩, the product of query and center, as an integer in the unit of votes, for this lane's two
// heads in each set. For a head that does not exist, the result is LEAST. KEPT: also store ⟨q, μ⟩ as a float in
// `products`.
template <bool KEPT>
__device__ __forceinline__ void offsets_of(int (&offsets)[SETS][2], const Mean& mean,
                                           const Group& group, float* products) {
    float dots[SETS][2];
    products_of(dots, mean, group);
#pragma unroll
    for (int n = 0; n < SETS; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int h = n * 4 + 2 * threadIdx.x % 4 + i;
            float dot = dots[n][i];
            if (CENTERED && KEPT && threadIdx.x % 32 < 2 && h < GROUP) products[n * 4 + i] = dot;
            float votes = fminf(fmaxf(dot * group.units[n][i], -1073741824.0f), 1073741824.0f);
            offsets[n][i] = h >= GROUP ? LEAST : CENTERED ? __float2int_rn(votes) : 0;
        }
    }
}

// Sign bits of 32 keys. Lane l has words l % 4, l % 4 + 4, … of keys l / 4 + 8 i, in rows[i].
struct Signs {
    u32 rows[4][QUADS];
};
template <class Place>
__device__ __forceinline__ void load(Signs& found, Place signs, int part) {  // part: which 32 keys of the block
    int lane = threadIdx.x % 32, t = lane % 4;
    signs += part * (32 * STRIDE);
    if constexpr (WORDS == 4 && is_shared(Place())) {
        u32 words[4];
        load_rows(words, signs + lane * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) found.rows[i][0] = words[i];
        return;
    }
    Place mine = signs + (lane / 4 * WORDS + t) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            bool has = QUADS * 4 == WORDS || quad * 4 + t < WORDS;
            found.rows[i][quad] = has ? load_from<u32>(mine + (i * 8 * WORDS + quad * 4) * 4) : 0;
        }
}

// Load the weight bytes of the four keys whose sign bits this lane has (`Signs::rows`), in the stored order
// (block_layout.places).
template <class Place>
__device__ __forceinline__ u32 load_weights(Place weights, int part) {
    return load_from<u32>(weights + (part * 8 + threadIdx.x % 32 / 4) * 4);
}

// The key, out of 32, whose vote a lane gets.
__device__ __forceinline__ int own_key() {
    return (threadIdx.x % 2 * 2 + threadIdx.x % 4 / 2) * 8 + threadIdx.x % 32 / 4;
}

// Return a word to add to a word of four weight bytes. It converts the bytes from their absolute scale to
// indices into the table of factors (kvindex.ops.codes.factors). Only bytes of positions after the last token
// can overflow; they are the upper bytes, so the carry does no harm.
__device__ __forceinline__ u32 shifts_of(float weight_scale) {
    int exponent = int(__float_as_uint(weight_scale) >> 23) - 127;
    return u32(OCTAVES / 2 - exponent) * (256 / OCTAVES) * 0x01010101u;
}

// Compute this lane's votes and call use(half, n, side, vote) for each:
//   key: 8 (2 half + lane % 4 / 2) + lane / 4, of 32.
//   head: 4 n + (2 lane) % 4 + side. The vote is LEAST for a head that does not exist.
// Arguments: `shifts` from `shifts_of`; `factors`, int32 [256] from kvindex.ops.codes.log_factors, at a
// multiple of 1,024 bytes (FACTORS).
#define FACTORS __align__(1024)
template <class Place, class Use>
__device__ __forceinline__ void each_vote(const Signs& signs, u32 weights, u32 shifts, const Group& group,
                                          const int (&offsets)[SETS][2], Place factors, Use use) {
    bool upper = threadIdx.x & 2;  // which 8 of 16 keys are this lane's
    weights += shifts;
    weights = __funnelshift_l(weights, weights, upper ? 26 : 2);
    int factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        factor[half] = load_from<int>(with_bits(factors, (half ? weights >> 16 : weights) & 255 * 4));
    // Partial sums for this lane's two keys (one per half) and two heads: dots[half][0] and dots[half][1] over
    // the even bit planes, dots[half][2] and dots[half][3] over the odd bit planes.
#pragma unroll
    for (int n = 0; n < SETS; n++) {
        int dots[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dots[half][i] = DOUBLE == 2 && i < 2 ? group.less[n][i] : 0;
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    int c[4] = {0, 0, 0, 0};
                    mma_bits(c, signs.rows[2 * half][quad], signs.rows[2 * half + 1][quad],
                             group.planes[n][quad][p]);
                    mma_bytes(dots[half], c[0], c[1], c[2], c[3], group.powers[0][p], group.powers[1][p]);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int dot = mad(dots[half][2 + side], -2, dots[half][side]);
                if (DOUBLE == 1) dot = mad(dot, 2, group.less[n][side]);
                use(half, n, side, mad(dot, factor[half], offsets[n][side]));
            }
    }
}

#if SAMPLING
// Return the size of key `own_key()`: its vote, converted to the scale that all heads share, maximum over the
// heads. Noise is not yet added.
template <class Place>
__device__ __forceinline__ float size_of(const Signs& signs, u32 weights, u32 shifts, const Group& group,
                                         const int (&offsets)[SETS][2], Place factors) {
    bool later = threadIdx.x & 1;  // which 16 keys are the lane's own
    float best[2];
    each_vote(signs, weights, shifts, group, offsets, factors, [&](int half, int n, int side, int vote) {
        float4 scale = SETS == 1 ? group.scales[0] : load_again(group.all_scales + 2 * n);
        float size = fmaf(float(vote), side ? scale.z : scale.x, side ? scale.w : scale.y);
        best[half] = n || side ? fmaxf(best[half], size) : size;
    });
    return fmaxf(later ? best[1] : best[0], __shfl_xor_sync(ALL, later ? best[0] : best[1], 1));
}
#endif

// Return the group's vote for key `own_key()` or, if candidates are sampled, the priority of this key. id: its
// token id.
template <class Place>
__device__ __forceinline__ int vote_of(const Signs& signs, u32 weights, u32 shifts, const Group& group,
                                       const int (&offsets)[SETS][2], Place factors, u32 id) {
#if SAMPLING
    return priority_of(size_of(signs, weights, shifts, group, offsets, factors), id, group.seed);
#else
    bool later = threadIdx.x & 1;  // which 16 keys are the lane's own
    int best[2];
    each_vote(signs, weights, shifts, group, offsets, factors, [&](int half, int n, int side, int vote) {
        best[half] = n || side ? max(best[half], vote) : vote;
    });
    return max(later ? best[1] : best[0], __shfl_xor_sync(ALL, later ? best[0] : best[1], 1));
#endif
}

// Divide the warps of the scan among groups of heads. A team is the warps that process one group at the same
// time; with fewer warps than groups, each team is one warp. `first_of` returns the first warp of a team,
// `warps_of` the number of its warps.
__device__ __forceinline__ u32 first_of(u32 team, u32 teams, u32 warps) {
    return (team * warps + teams - 1) / teams;
}
__device__ __forceinline__ u32 warps_of(u32 team, u32 teams, u32 warps) {
    return first_of(team + 1, teams, warps) - first_of(team, teams, warps);
}
