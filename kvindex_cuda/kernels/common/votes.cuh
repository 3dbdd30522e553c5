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
// With SAMPLING, candidates are sampled at random. Votes are then converted to a scale that all heads share. A
// key's priority is its maximum over the heads plus random noise (kvindex/ops/priority.py), and it replaces the
// vote.
//
// Compile-time constants: D, GROUP (query heads per KV head), DTYPE (of queries), CENTERED (1: blocks of codes
// have centers), PLANES (digits of r in base -2: 4 can represent 5 and -5, 6 represent 21, 8 represent 85),
// SAMPLING (1: candidates are sampled at random).
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

// Registers of a warp that computes votes (approximate scores of keys): data about the queries of one group, the
// query heads that share a KV head. The heads are divided into sets of 4. In each set, a lane computes results for
// two heads, h and h + 1 with h = (2 lane) % 4.
//   planes: bit planes of the rounded queries r, as tensor core fragments for the first product (described at
//     the top of this file).
//   powers: powers of four, as fragments for the second product. powers[i] is for keys 8 i to 8 i + 7 of the 16
//     keys of a product.
//   less: -Σ r of the lane's two heads.
//   units: factor that converts q·k to the unit of votes, for the lane's two heads.
//   queries: the queries as bfloat16 fragments, for products with block centers (`half_of`).
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

// Parameters of random sampling. They convert a vote (approximate score of a key) to a priority, a score with
// random noise. prepare_query.cu writes the tensors `scales` and `seeds`. Both pointers are null if candidates
// are not sampled at random.
struct Sampling {
    const float2* scales;  // [BG, 4 SETS]: size of one vote in units of 2^-16 octaves, and an offset that puts all
                           // heads on one scale, -inf for a missing head
    const u32* seeds;      // [BG]: seed of the noise
};

// Return one bfloat16 summand of each of 8 query coordinates. Each coordinate of a query is split into an exact
// sum of PIECES bfloat16 numbers. The argument `piece` says which of these numbers to return; number 0 is the
// most significant one. The 8 coordinates are j to j + 7 of head h, with j = 32 i + 8 (lane % 4). The result has
// two numbers per word. Coordinates from D on are 0.
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
// Return the part of the queries that this lane needs for products with block centers on the tensor cores.
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

// Set `powers`, the right-hand matrices for the second of the two tensor core products that compute votes
// (approximate scores of keys); the top of this file explains both products. The second product multiplies the
// counts of each pair of bit planes by a power of four. These powers are the nonzero entries of the matrices.
__device__ __forceinline__ void set_powers(Group& group) {
    int lane = threadIdx.x % 32;
    bool own = lane % 4 == lane / 4 % 4, second = lane >= 16;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        group.powers[0][p] = own && !second ? DOUBLE << (2 * p) : 0;
        group.powers[1][p] = own && second ? DOUBLE << (2 * p) : 0;
    }
}

// Load the queries of group `bg` into registers. All threads of a warp call this function.
//   queries: queries of all groups, DTYPE [BG, GROUP, D].
//   planes, sums, units: data about these queries, which the kernel in prepare_query.cu has written.
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

// The part of a block's center (the mean key of the block) that one lane stores. Of every 32 coordinates, these
// are the 8 coordinates from 8 (lane % 4) on, the same as `piece_of` returns for a query.
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

// Compute the inner products ⟨q, μ⟩ of queries q and one block center μ. Query heads are processed in sets of
// four, and each lane receives the results for two heads of each set. Four neighboring lanes process one
// center, so a warp can process eight different centers.
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

// Compute ⟨q, μ⟩, the inner product of a query and a block center, and convert it to an integer in the unit of
// votes (approximate scores of keys). Query heads are divided into sets of four. Each lane computes the integers
// for two heads of each set. For a head that does not exist, the integer is LEAST. If KEPT, also store ⟨q, μ⟩ as
// a float in `products`.
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

// Sign bits of 32 keys. They are divided into words of 32 bits, and each lane of a warp stores some of the words:
// rows[i] of lane l contains the words l % 4, l % 4 + 4, … of key number l / 4 + 8 i.
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

// Load one weight byte for each of the four keys whose sign bits this lane has loaded into `Signs::rows`. Return
// the four bytes packed into one word. (A weight byte is the upper byte of a 16-bit log weight.) The four bytes are
// contiguous, because the function block_layout.places orders the weight bytes of a block for this purpose.
template <class Place>
__device__ __forceinline__ u32 load_weights(Place weights, int part) {
    return load_from<u32>(weights + (part * 8 + threadIdx.x % 32 / 4) * 4);
}

// `vote_of` computes the coarse scores (votes) of 32 keys, one key in each lane of a warp. Return the number
// (0 to 31) of this lane's key.
__device__ __forceinline__ int own_key() {
    return (threadIdx.x % 2 * 2 + threadIdx.x % 4 / 2) * 8 + threadIdx.x % 32 / 4;
}

// Return a number to add to a word that packs the weight bytes of four consecutive keys. A weight byte is the
// logarithm of a key's weight. After the addition, each byte is the key's position in a table of factors. The
// factors are weights divided by `weight_scale` (kvindex.ops.codes.factors). A byte can overflow only at a place
// after the last token. All higher bytes of the word are then after the last token too, and are not used.
__device__ __forceinline__ u32 shifts_of(float weight_scale) {
    int exponent = int(__float_as_uint(weight_scale) >> 23) - 127;
    return u32(OCTAVES / 2 - exponent) * (256 / OCTAVES) * 0x01010101u;
}

// Compute votes (approximate scores) of keys for query heads. The heads are divided into sets of four. Each lane
// computes the votes of two keys for two heads of each set. For each vote, call use(half, n, side, vote):
//   half (0 or 1): the vote is for key number 8 (2 half + lane % 4 / 2) + lane / 4 of the 32 keys.
//   n, side (0 or 1): the vote is for head number 4 n + (2 lane) % 4 + side, which is in set number n.
//   vote: LEAST for a head that does not exist.
// Arguments: `shifts` is the result of `shifts_of`. `factors` is int32 [256] from
// kvindex.ops.codes.log_factors, at a multiple of 1,024 bytes (FACTORS).
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
    // A lane computes the votes (coarse scores) of two keys for two query heads:
    //   dots[half][0] and dots[half][1]: sums of key number `half` (0 or 1) over the even bit planes of the first
    //     and of the second head's query.
    //   dots[half][2] and dots[half][3]: the same sums over the odd bit planes.
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
// Return the logarithm of the estimated attention weight of key number `own_key()`, before the random noise is
// added (the code calls it `size`). For each query head, the key's vote (approximate score) is converted to a
// scale that all heads share. The result is the maximum over the heads.
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

// Return the approximate score (vote) of the calling thread's key, number `own_key()`. Each query head of the
// group has its own score of the key, and the maximum is returned. If candidates are sampled at random, return
// the key's priority instead, which includes random noise. id: position of the key's token.
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

// Divide the warps of the kernel `scan` into teams. A team is a set of adjacent warps that process the same group
// (the query heads of one KV head). If there are fewer warps than groups, each team is one warp and processes
// several groups. `first_of` returns the index of a team's first warp. `warps_of` returns how many warps it has.
__device__ __forceinline__ u32 first_of(u32 team, u32 teams, u32 warps) {
    return (team * warps + teams - 1) / teams;
}
__device__ __forceinline__ u32 warps_of(u32 team, u32 teams, u32 warps) {
    return first_of(team + 1, teams, warps) - first_of(team, teams, warps);
}
