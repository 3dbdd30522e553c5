// Prepare the queries of up to 128 heads that share a KV head (latent attention), and multiply them with the
// centers (mean keys) of all blocks of codes (ParisKV paper, A.1 and B.2.1). Reference: prepare_query in
// kvindex/pariskv/decode_step.py, kvindex/pariskv/sign_regression.py.
//
// Heads are processed in TILES tiles of GROUP heads. As in prepare_query.cu, queries are rotated and rounded to
// integers, r = round(R q · largest / max|R q|); with REGRESSION, R q is first multiplied by Aᵀ, a matrix
// fitted by regression.
// Some thread blocks rotate all heads of a tile (one warp per head) and multiply them by SIXTEENS · 16 columns
// of A, which they load first. Other thread blocks multiply the centers by the original queries, 8 blocks of
// codes per warp, and prefetch the signs and weights of these blocks into L2. The thread block of a tile that
// finishes last rounds the queries.
//
// Grid: (TILES · (columns / SIXTEENS / 16 + spread) + 1, B), 256 threads.
// Reads 2 D² bytes, and 2 D bytes per block of codes, once from memory and once per tile from L2; writes 5 D +
// 4 bytes per head, and 4 bytes per head and block of codes.
// Limited by latency: two reads and the rotation, a product, and the sums in the last thread block.
// Compile-time constants: D, GROUP (heads of a tile), TILES, DTYPE, CENTERED (1: blocks have centers), PLANES,
// SAMPLING (1: candidates are sampled), REGRESSION, SIXTEENS (groups of 16 columns per thread block), RAGGED
// (1: each sequence has its own length).
#include "common/prepare.cuh"
#include "common/byte_votes.cuh"

// Stride of operand rows in shared memory, in float16 numbers. It lets neighboring rows start in different
// banks.
constexpr int PITCH = (EIGHTS | 1) * 32;
constexpr int COLUMN_TILES = REGRESSION ? (D + 15) / 16 : 1;
constexpr int COLUMN_BLOCKS = (COLUMN_TILES + SIXTEENS - 1) / SIXTEENS;
constexpr int STEPS = (EIGHTS + 7) / 8;                   // steps of 32 coordinates per warp

struct Arguments {
    const void* queries;        // DTYPE [B, HEADS, D], aligned to 16 bytes
    const float* rotation;      // [D + ODD]: the signs and the waves that `rotate` needs
    const float* weight_scale;  // [B]: power of two that log weights are relative to
    const u16* regression;      // Aᵀ, float16 [B, D, D], aligned to 16 bytes, or null without regression
    const i64* codes;           // [B, row]: addresses of blocks of codes
    const u32* valid;           // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;          // [1], or RAGGED: [B]: number of tokens
    const int* counted;         // [B]: number of valid keys
    float* voting;              // [B, HEADS, D]: Aᵀ R q · up, or R q · up
    i8* integers;               // [B, 2 WORDS, COLUMNS_OF, 16]: r, in the layout of byte_votes.cuh
    int* sums;                  // [B TILES, 4 SETS]: Σ r of each head
    float* units;               // [B TILES, 4 SETS]: votes per unit of q·k
    u16* operands;              // [B TILES, 4 OPERANDS]: R q · up as a float16 number and its remainder
    float* ups;                 // [B TILES, GROUP]: power of two by which R q is scaled
    float* products;            // [B, row, HEADS]: ⟨q, μ⟩, the product of each query with each block's center
    int* tickets;               // [B TILES]: counts finished thread blocks, 0 before and after the launch
    float2* scales;             // [B TILES, 4 SETS]: see votes.cuh, as for seeds [B]; null unless candidates are
                                // sampled
    u32* seeds;
    int* cleared;               // [words]: counters that are set to 0
    int* wrong;                 // [1]: set to 1 if a query is out of range, or null
    i64 row, words, spread;     // spread: thread blocks per tile that multiply centers
    i64 query_max;              // the largest r
    i64 seed;
    float level;                // E|u|, the mean absolute coordinate of a random unit vector
    float factor_max;           // the largest value of kvindex.ops.codes.log_factors
    float octaves;              // octaves per unit of q·k
    double gain;                // the same in units of 2^-16 octaves
};

// Multiply block centers with the queries of one tile of heads. Each block of 256 keys has a center, which is
// the mean of its keys and is stored with its codes.
__device__ __forceinline__ void multiply_centers(const Arguments& args, i64 b, int tile, int part) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Group group;
    load_queries(group, static_cast<const char*>(args.queries) + (b * HEADS + tile * GROUP) * i64(D * (DTYPE == 0 ? 4 : 2)));
    i64 blocks = (args.length[RAGGED * b] + TOKENS - 1) / TOKENS;
#pragma unroll 1
    for (i64 first = (part * 8 + warp) * 8; first < blocks; first += args.spread * 64) {
        i64 s = first + lane / 4;
        Mean mean = {};
        const char* block = s < blocks ? reinterpret_cast<const char*>(args.codes[b * args.row + s]) : nullptr;
        if (block) load(mean, block + CENTER);
        float dots[SETS][2];
        products_of(dots, mean, group);
        // Prefetch the codes that vote_latents.cu will read, if L2 has room for them. The threads that do this
        // are otherwise idle.
        if (block && tile == 0 && lane % 4 == 0 && blocks * gridDim.y <= 1024)
            to_l2(block, CENTER), to_l2(args.valid + (b * args.row + s) * 8);
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++) {
            int h = i / 2 * 4 + 2 * (lane % 4) + i % 2;
            if (lane % 4 < 2 && h < GROUP && s < blocks)
                args.products[(b * args.row + s) * HEADS + tile * GROUP + h] = dots[i / 2][i % 2];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, TILES > 2 ? 2 : 1)
prepare_latents(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) u16 halves[SETS][8][PITCH];  // R q · up of 4 heads, then the remainders of these 4
    __shared__ float signs_of[PER_LANE * 32], waves[ODD], ups[SETS * 4];
#if REGRESSION
    __shared__ float parts[8][SIXTEENS][SETS][4][16];      // partial sums over coordinates, one per warp
#endif
    i64 b = blockIdx.y;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool rotates = blockIdx.x < TILES * COLUMN_BLOCKS, idle = blockIdx.x == gridDim.x - 1;
    int other = int(blockIdx.x) - TILES * COLUMN_BLOCKS, tile = 0, part = 0;
    if (rotates) tile = blockIdx.x / COLUMN_BLOCKS, part = blockIdx.x % COLUMN_BLOCKS;
    else if (!idle) tile = other / u32(args.spread), part = other % u32(args.spread);
    i64 of = b * TILES + tile;

    for (int i = threadIdx.x; i < PER_LANE * 32; i += 256) signs_of[i] = i < D ? args.rotation[i] : 0.0f;
    if (threadIdx.x < ODD) waves[threadIdx.x] = args.rotation[D + threadIdx.x];
#if REGRESSION
    // Load this warp's columns of the regression matrix A while the previous kernel still runs. This is safe
    // because no concurrent kernel writes A. Of every 32 entries of a column, a lane loads 8.
    uint4 held[SIXTEENS][STEPS][2];
#pragma unroll
    for (int c = 0; c < SIXTEENS; c++)
#pragma unroll
        for (int k = 0; k < 2 * STEPS; k++) {
            int j = (part * SIXTEENS + c) * 16 + k % 2 * 8 + lane / 4, i = (warp + k / 2 * 8) * 32 + lane % 4 * 8;
            held[c][k / 2][k % 2] = rotates && j < D && i < D
                ? *reinterpret_cast<const uint4*>(args.regression + (b * D + j) * D + i) : uint4{0, 0, 0, 0};
        }
#endif
    __syncthreads();
    after_previous();
    let_next_begin();
    for (u32 i = (blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; i < u32(args.words);
         i += gridDim.y * gridDim.x * 256)
        args.cleared[i] = 0;
    if (idle) {
#if SAMPLING
        i64 tokens = args.length[RAGGED * b];
        if (warp || tokens <= 0) return;
        u32 valid = lane < (tokens + 31) / 32 ? args.valid[b * args.row * 8 + lane] : 0;
        u32 byte = lane < D / 8 ? reinterpret_cast<const u8*>(args.codes[b * args.row])[lane] : 0;
        u32 seed = seed_of(args, b, 0, tokens, valid, byte);
        if (lane == 0) args.seeds[b] = seed;
#endif
        return;
    }
    if (rotates) {
        if (warp < GROUP) {
            float x[PER_LANE], signs[PER_LANE];
#pragma unroll
            for (int w = 0; w < PER_LANE; w++) signs[w] = signs_of[w * 32 + lane];
#pragma unroll
            for (int w = 0; w < PER_LANE; w++)
                x[w] = w * 32 + lane < D ? element(args.queries, (b * HEADS + tile * GROUP + warp) * i64(D) + w * 32 + lane) : 0.0f;
            rotate(x, signs, waves);
            float peak = peak_of(x);
            if (!(peak < SAFE) && !in_range(x)) {  // the query is replaced by zeros
                if (args.wrong && lane == 0) *args.wrong = 1;
#pragma unroll
                for (int w = 0; w < PER_LANE; w++) x[w] = 0;
                peak = 0;
            }
            float up = up_of(peak);
#pragma unroll
            for (int w = 0; w < PER_LANE; w++) {
                u16 high, low;
                split(x[w] *= up, high, low);
                int j = w * 32 + lane;
                if (j < D) halves[warp / 4][warp % 4][j] = high, halves[warp / 4][4 + warp % 4][j] = low;
                if (!REGRESSION && j < D) args.voting[(b * HEADS + tile * GROUP + warp) * i64(D) + j] = x[w];
            }
            if (lane == 0) ups[warp] = up;
        }
        __syncthreads();
        if (part == COLUMN_BLOCKS - 1 && threadIdx.x < GROUP) args.ups[of * GROUP + threadIdx.x] = ups[threadIdx.x];
#if REGRESSION
        // Multiply 16 columns of the regression matrix A with the rotated queries, for four heads at a time. A
        // query is stored as two vectors: its rounded coordinates, and the remainders (rounding errors).
        // Columns 0 to 3 of the result are the products with the rounded coordinates, one column per head, and
        // columns 4 to 7 are the products with the remainders.
        float sums[SETS][SIXTEENS][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int n = 0; n < SETS; n++) {
                int i = (warp + k * 8) * 32 + lane % 4 * 8;
                uint4 right = {0, 0, 0, 0};
                if (n * 4 + lane / 4 % 4 < GROUP && i < D) right = *reinterpret_cast<const uint4*>(&halves[n][lane / 4][i]);
#pragma unroll
                for (int c = 0; c < SIXTEENS; c++) {
                    uint4 upper = held[c][k][0], lower = held[c][k][1];
                    mma_halves(sums[n][c], upper.x, lower.x, upper.y, lower.y, right.x, right.y);
                    mma_halves(sums[n][c], upper.z, lower.z, upper.w, lower.w, right.z, right.w);
                }
            }
        bool later = lane & 2;  // this lane keeps the lower row
#pragma unroll
        for (int i = 0; i < SETS * SIXTEENS * 2; i++) {
            int n = i / 2 / SIXTEENS, c = i / 2 % SIXTEENS, side = i % 2;
            float upper = sums[n][c][side], lower = sums[n][c][2 + side];
            float sum = (later ? lower : upper) + __shfl_xor_sync(ALL, later ? upper : lower, 2);
            parts[warp][c][n][lane % 2 * 2 + side][later * 8 + lane / 4] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < SIXTEENS * SETS * 64; i += 256) {
            int c = i / (SETS * 64), h = i / 16 % (SETS * 4), j = (part * SIXTEENS + c) * 16 + i % 16;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < 8; w++) sum += (&parts[w][0][0][0][0])[i];
            if (h < GROUP && j < D) args.voting[(b * HEADS + tile * GROUP + h) * i64(D) + j] = sum;
        }
#endif
    } else {
        multiply_centers(args, b, tile, part);
    }
    bool last = last_block(args.tickets + of, COLUMN_BLOCKS + int(args.spread));
    if (rotates && part == COLUMN_BLOCKS - 1) {  // write the operands of estimate_latents.cu, off the critical path
        u16* operands = args.operands + of * (OPERANDS * 4);
        for (int i = threadIdx.x; i < 2 * GROUP * D; i += 256) {
            int low = i % 2, h = i / 2 / D, j = i / 2 % D;
            operands[operand_of(h, j, low)] = halves[h / 4][low * 4 + h % 4][j];
        }
    }
    if (!last) return;

    float weight_scale = args.weight_scale[b];
    int h = warp;
    if (h < GROUP) {
        i64 head = b * HEADS + tile * GROUP + h;
        i8* integers = args.integers + b * (COLUMNS_OF * WIDTH) + (tile * GROUP + h) * 16;
        float x[PER_LANE], up = __ldcg(args.ups + of * GROUP + h);
#pragma unroll
        for (int w = 0; w < PER_LANE; w++) x[w] = w * 32 + lane < D ? __ldcg(args.voting + head * D + w * 32 + lane) : 0.0f;
        float peak = peak_of(x), scale = peak > 0 ? float(args.query_max) / peak : 0.0f, unit = 0;
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            int r = __float2int_rn(x[w] * scale);
            sum += r;
            integers[byte_of(w, lane)] = i8(r);
        }
        sum = __reduce_add_sync(ALL, sum);
        if (scale > 0 && weight_scale > 0) unit = scale * up * (args.factor_max / (args.level * weight_scale));
        if (lane == 0) args.sums[of * SETS * 4 + h] = sum, args.units[of * SETS * 4 + h] = unit;
#if SAMPLING
        // Compute an offset for this head, which is added to its scaled votes (approximate scores of keys) to
        // make them comparable with those of other heads. It is computed from at most CENTERS block centers,
        // evenly spread over the blocks (kvindex.ops.priority.totals).
        i64 blocks = (args.length[RAGGED * b] + TOKENS - 1) / TOKENS;
        int centers = CENTERED ? int(min(blocks, i64(CENTERS))) : 0;
        float products[CENTERS / 32], largest = NEVER, exponentials = 0;
#pragma unroll
        for (int i = 0; i < CENTERS / 32; i++) {
            int at = i * 32 + lane;
            products[i] = NEVER;
            if (at < centers)
                products[i] = __ldcg(args.products + (b * args.row + blocks * at / centers) * HEADS + tile * GROUP + h);
            largest = fmaxf(largest, products[i]);
        }
        largest = warp_max(largest);
#pragma unroll
        for (int i = 0; i < CENTERS / 32; i++)
            if (i * 32 + lane < centers) exponentials += exp2f((products[i] - largest) * args.octaves);
        float total = -65536 * (largest * args.octaves + log2f(warp_sum(exponentials)));
        float2 scaled = {unit > 0 ? float(args.gain) / unit : 0.0f, centers && fabsf(total) < LONGEST ? total : 0.0f};
        if (lane == 0) args.scales[of * SETS * 4 + h] = scaled;
#endif
    } else if (h < SETS * 4 && lane == 0) {
        args.sums[of * SETS * 4 + h] = 0, args.units[of * SETS * 4 + h] = 0;
#if SAMPLING
        args.scales[of * SETS * 4 + h] = {0, NEVER};
#endif
    }
    if (threadIdx.x == 0) args.tickets[of] = 0;
}
