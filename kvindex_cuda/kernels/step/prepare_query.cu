// First kernel of a decode step. It prepares the queries of a group (the query heads that share a KV head). It
// also finds the threshold with which scan.cu lists keys: the approximate scores (votes) of more than C keys
// almost certainly reach it, where C is the number of candidates. Reference: prepare_query in
// kvindex/pariskv/decode_step.py, and thresholds_of in kvindex/pariskv/sign_votes.py. ParisKV paper: A.1,
// B.2.1.
//
// Queries: a warp rotates the query of a head and rounds it to integers, r = round(R q · largest / max|R q|)
// (kvindex.ops.coarse.rounded). It writes r as bit planes for scan.cu, and R q as float16 numbers for
// rerank.cu. Every thread block of a group does this for itself.
// Threshold: the thread blocks compute the votes of a sample of the keys, 32 keys from each of SAMPLED / 32
// blocks of codes, evenly spread over the tokens. The codes are requested before the queries are rotated. The
// thread block that finishes last finds the threshold (about 2 C keys reach it if C is 2% of all keys).
//
// With SAMPLING, candidates are sampled at random. Every thread block then also computes a scale that all heads
// share, from up to CENTERS block centers (kvindex.ops.priority.totals), and the seed of the noise. The
// threshold and the bounds of the histogram's bins are then multiples of STEP.
// With REGRESSION, r is computed from Aᵀ R q, where A is a matrix fitted by regression
// (kvindex/pariskv/sign_regression.py). Each warp multiplies 16 columns of A, which it loads first, with all
// heads. Each thread block of a group therefore reads 2 D² more bytes, from L2: 32 KiB at D = 128. The read
// takes about 0.3 µs and overlaps with the first reads. The product, the exchange of its results and one more
// barrier are predicted to add 0.3 µs.
// In a caller's CUDA graph, the newest token's key and value arrive with the queries. The last thread block of
// each group then appends them to the resident rows, so that stage_token.cu need not be launched.
//
// With LIMITED, select_rows.cu chooses the number of rows by the expected error of attention, for which it needs
// the attention weight of the resident rows (sink and window). `resident_splits` further thread blocks per group
// compute it concurrently with the rest of this kernel (resident_sums.cuh). If PAGED, these rows are in the pages of an
// inference engine.
//
// Grid: (splits, BG), or LIMITED: (splits + resident_splits, BG), 256 threads.
// Reads (D/8 + 1) SAMPLED + 2 D SAMPLED / 32 bytes of codes per group.
// Writes D PLANES / 8 bytes per head for the scan and 4 D bytes per head for the rerank, and clears the step's
// counters.
// Limited by latency: three dependent reads (the number of tokens, the table of blocks, the codes), which
// overlap with the read of the queries; then the votes, and the search for the threshold in the last thread
// block.
// This file is longer than most because it is one kernel, whose parts pass values in registers.
// Compile-time constants: D, GROUP (query heads per KV head), DTYPE, CENTERED (1: blocks of codes have
// centers), PLANES (bit planes of r), SAMPLING, REGRESSION, RAGGED (1: each sequence has its own length), LIMITED
// (1: the number of rows depends on the expected error), PAGED and FP8_PAGES (only with LIMITED: where resident rows are,
// as in attend.cu).
#include "common/prepare.cuh"
#include "common/threshold.cuh"

constexpr int PITCH = (EIGHTS | 1) * 32;         // float16 numbers from one operand row to the next in shared memory;
                                                 // two neighboring rows are in different banks
constexpr int COLUMN_TILES = (D + 15) / 16;             // tiles of 16 columns of the matrix A
constexpr bool EARLY = COLUMN_TILES <= 8;               // true if a warp's tile fits into registers
constexpr int HANDS = REGRESSION && GROUP <= 4 ? 2 : 1;  // warps that round one head
constexpr int ROOM = (REGRESSION || LIMITED) && SETS * 4 * D > BINS ? SETS * 4 * D : BINS;
struct Sampled {  // codes of 32 keys of the sample
    Signs signs;
    Mean mean;
    u32 weights, valid;
};

struct Arguments {
    const void* queries;        // DTYPE [B, H, D], aligned to 16 bytes
    const float* rotation;      // [D + ODD]: the signs and the waves that `rotate` needs
    const float* weight_scale;  // [BG]: power of two that log weights are relative to
    const u16* regression;      // Aᵀ, float16 [BG, D, D], aligned to 16 bytes, or null without regression
    const i64* codes;           // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                                // head_bytes
    const u32* valid;           // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;          // [1], or RAGGED: [B]: number of tokens
    const int* wanted;          // [B]: C, the number of candidates wanted
    const int* counted;         // [B]: number of valid keys
    const int* factors;         // [256]: from kvindex.ops.codes.log_factors
    u32* planes;                // [BG, SETS, QUADS, PARTS, 32]: digits of r, in the layout of matrix fragments
    int* sums;                  // [BG, 4 SETS]: Σ r of each head
    float* units;               // [BG, 4 SETS]: votes per unit of q·k
    u16* operands;              // [BG, 4 OPERANDS]: R q · up as a float16 number and its remainder, for rerank.cu; 0
                                // where nothing is written
    float* ups;                 // [BG, GROUP]: power of two by which R q is scaled
    int* sample;                // [BG, SAMPLED]: votes of the sample
    int* tickets;               // [BG]: counts finished thread blocks, 0 before and after the launch
    int* thresholds;            // [BG]: keys with lower votes are not listed
    int* bases;                 // [BG]: vote at which the histogram's first bin begins
    int* shifts;                // [BG]: log2 of the width of the histogram's bins
    float2* scales;             // see votes.cuh, as for `seeds`; null unless candidates are sampled
    u32* seeds;
    int* cleared;               // [words]: counters that are set to 0
    int* wrong;                 // [1]: set to 1 if a query is out of range, or null
    const void* token_keys;     // DTYPE [BG, D]: key of the newest token, or null if no token is appended
    const void* token_values;   // DTYPE [BG, DV]: value of that token
    void* resident;             // DTYPE [BG, room, D + DV]: the token is written behind the last resident row
    i64* resident_count;        // [1]: incremented if there is a new token. RAGGED: [B], only read, because stage_token.cu
                                // appends the tokens.
    int* ticket;                // [1]: counts thread blocks, 0 before and after the launch
    // With LIMITED and RAGGED, each `consecutive` entries of the batch are tokens of one sequence. `resident` and
    // `resident_mask` then have an entry for each sequence. From here to `softcap`: only if LIMITED.
    const u8* resident_mask;    // [B, room]: 1 where a resident row is valid
    float2* resident_parts;     // [BG, resident_splits, GROUP]: largest logit of the resident rows of a part, and the
                                // sum of exp(logit − largest)
    i64 resident_splits;        // 0 if there are no resident rows, or without LIMITED
    i64 consecutive;            // tokens of each sequence in the batch, usually 1
    float scale, softcap;       // softcap: 0 for none
    i64 row, head_bytes, words, kv_heads;
    i64 room, value_dim;        // room: capacity of `resident`; value_dim: DV
    i64 query_max;              // the largest r
    i64 seed;
    float level;                // E|u|, the mean absolute coordinate of a random unit vector
    float factor_max;           // the largest value in `factors`
    float octaves;              // octaves per unit of q·k
    double gain;                // the same in units of 2^-16 octaves
    // From here on: only if PAGED, as in attend.cu.
    const i64* rows;            // [B, row]: addresses of blocks of rows; those of KV head g begin at g · rows_head_bytes
    const int* segments;        // [B, row]: number of each block among all pages; only if PAGED is 2, as are `cache`,
                                // `tags` and `cached`
    const char* cache;          // [KV heads, cached, row_bytes]: rows in the row cache
    const int* tags;            // [KV heads, cached]: number of the row in each slot of the cache
    const float* key_scale;     // [1]: scale of the keys in pages; only if FP8_PAGES
    i64 rows_head_bytes, row_bytes, cached, sink;
};

__device__ __forceinline__ void copy_element(void* to, i64 at, const void* come, i64 from) {
#if DTYPE == 0
    static_cast<u32*>(to)[at] = static_cast<const u32*>(come)[from];
#else
    static_cast<u16*>(to)[at] = static_cast<const u16*>(come)[from];
#endif
}

// Number of thread blocks per group, without those for the resident rows.
#if LIMITED
#define SPLITS (gridDim.x - u32(args.resident_splits))
#include "common/resident_sums.cuh"
#else
#define SPLITS gridDim.x
#endif

// Count the newest token as a resident row. One thread of each thread block that has read `resident_count`, the
// number of rows before, calls this function, and the last caller increments the number.
__device__ __forceinline__ void count_token(const Arguments& args, i64 before) {
    int readers = gridDim.y;
#if LIMITED
    readers += gridDim.y * int(args.resident_splits);
#endif
    if (atomicAdd(args.ticket, 1) != readers - 1) return;
    *args.ticket = 0;
    if (before < args.room) *args.resident_count = before + 1;
}

extern "C" __global__ void __launch_bounds__(256, LIMITED && D <= 128 ? 2 : 0)
prepare_query(const __grid_constant__ Arguments args) {
    const void* queries = args.queries;
    u16* operands = args.operands;
    __shared__ FACTORS int factors[256];
    __shared__ __align__(16) u16 halves[SETS][8][PITCH];  // R q · up of 4 heads, then the remainders of these 4
    __shared__ float waves[ODD];
    __shared__ u32 planes[SETS * 4][PLANES][QUADS * 4];
    __shared__ float units[SETS * 4], ups[SETS * 4];
    __shared__ int sums[SETS * 4];
    __shared__ i64 resident;  // number of resident rows before this token
    __shared__ __align__(16) int histogram[ROOM];  // also used for Aᵀ R q · up, float32 [4 SETS, D], before it becomes
                                                   // a histogram
#if SAMPLING
    __shared__ __align__(16) float2 scales_of[SETS * 4];  // see Sampling in votes.cuh
    __shared__ float products[CENTERS][GROUP];
    __shared__ u32 seed;
#endif
    i64 bg = blockIdx.y, batch = blockIdx.y / u32(args.kv_heads), tokens, blocks;
    i64 head_offset = blockIdx.y % u32(args.kv_heads) * args.head_bytes;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if LIMITED
    if (blockIdx.x >= SPLITS) {
        bool staged = args.token_keys;
        const char* own = static_cast<const char*>(queries) + blockIdx.y * (GROUP * D * (DTYPE == 0 ? 4 : 2));
        after_previous();
        let_next_begin();
        int split = blockIdx.x - SPLITS;
        float2* to = args.resident_parts + (bg * args.resident_splits + split) * GROUP;
        i64 sequence = RAGGED ? u32(batch) / u32(args.consecutive) : batch;
        i64 shown = RAGGED ? sequence * args.kv_heads + blockIdx.y % u32(args.kv_heads) : bg;  // whose rows are read
        float* memory = reinterpret_cast<float*>(histogram);
        resident_sums(args, shown, sequence, batch, own, staged, split, memory, &resident, to);
        if (staged && threadIdx.x == 0) count_token(args, resident);
        return;
    }
#endif
    queries = static_cast<const char*>(queries) + bg * (GROUP * D * (DTYPE == 0 ? 4 : 2));

    auto place = [&](int i) { return blocks * i / (SAMPLED / 32); };
    // The sample of keys consists of runs of 32 consecutive keys. A block of the index has 256 keys, so run
    // number i is one eighth of a block. Return which eighth it is (0 to 7). If the index has fewer blocks than
    // the sample has runs, several runs are in the same block. Then consecutive runs are different eighths.
    auto part = [&](int i) { return blocks < SAMPLED / 32 ? i * 3 % 8 : int(u32(i) * 2654435761u >> 29); };
    auto draw = [&](Sampled& sampled, int i, i64 address) {
        i64 s = place(i);
        const char* block = reinterpret_cast<const char*>(address) + head_offset;
        load(sampled.signs, block, part(i));
        load(sampled.mean, block + CENTER);
        sampled.weights = load_weights(block + WEIGHTS, part(i));
        sampled.valid = args.valid[(batch * args.row + s) * 8 + part(i)];
    };
    float signs[PER_LANE];
#pragma unroll
    for (int w = 0; w < PER_LANE; w++) signs[w] = w * 32 + lane < D ? args.rotation[w * 32 + lane] : 0.0f;
    if (threadIdx.x < ODD) waves[threadIdx.x] = args.rotation[D + threadIdx.x];
    factors[threadIdx.x] = args.factors[threadIdx.x];
    for (int i = threadIdx.x; i < SETS * 4 * PLANES * QUADS * 4; i += 256) (&planes[0][0][0])[i] = 0;
    if (threadIdx.x < SETS * 4) sums[threadIdx.x] = 0, units[threadIdx.x] = 0;
#if SAMPLING
    if (threadIdx.x < SETS * 4) scales_of[threadIdx.x] = {0, threadIdx.x < GROUP ? 0.0f : NEVER};
#endif
#if REGRESSION
    // Load this warp's columns of the regression matrix A while the previous kernel still runs. This is safe
    // because no concurrent kernel writes A. Of every 32 entries of a column, a lane loads 8.
    auto entries = [&](int tile, int s, int half) -> uint4 {
        int j = tile * 16 + half * 8 + lane / 4, i = s * 32 + lane % 4 * 8;
        return j < D && i < D ? *reinterpret_cast<const uint4*>(args.regression + (bg * D + j) * D + i) : uint4{0, 0, 0, 0};
    };
    uint4 held[EARLY ? EIGHTS : 1][2];
#pragma unroll
    for (int i = 0; i < (EARLY ? 2 * EIGHTS : 0); i++) held[i / 2][i % 2] = entries(warp, i / 2, i % 2);
#endif
    __syncthreads();
    auto read_query = [&](float (&x)[PER_LANE], int h) {
#pragma unroll
        for (int w = 0; w < PER_LANE; w++) {
            int j = w * 32 + lane;
            x[w] = h < GROUP && j < D ? element(queries, h * D + j) : 0.0f;
        }
    };
    float plain[PER_LANE];
    Group group;
    auto begin = [&] {
        after_previous();
        let_next_begin();
        read_query(plain, warp);
        load_queries(group, queries);
    };
    // `early` is true if this kernel runs in a CUDA graph that the caller has captured. In such a graph, the
    // previous kernel computes the queries but writes no codes. So this kernel can load codes before the previous
    // kernel has ended, and waits for it only before it loads the queries. If `early` is false, this kernel waits
    // before it loads anything.
    bool early = !RAGGED && args.token_keys;
    if (!early) begin();
#if SAMPLING
    u32 valid_bits = warp == 7 && lane < 8 * args.row ? args.valid[batch * args.row * 8 + lane] : 0;
    i64 first_block = warp == 7 ? args.codes[batch * args.row] : 0;
#endif
    float weight_scale = args.weight_scale[bg];
    float share = float(args.wanted[batch]), all = float(args.counted[batch]);
    tokens = args.length[RAGGED * batch], blocks = (tokens + TOKENS - 1) / TOKENS;
    int first = blockIdx.x * 8 + warp;
    bool any = tokens > 0 && first < SAMPLED / 32;
    i64 sampled_block = any ? args.codes[batch * args.row + place(first)] : 0;
#if SAMPLING
    // Read the addresses of the block centers that will be multiplied by the queries. There are up to
    // CENTERS centers, CENTERS / 8 per warp. A warp processes 8 centers at a time, with four lanes each.
    constexpr int EACH_CENTERS = CENTERS / 64;
    int centers = CENTERED ? int(blocks < CENTERS ? blocks : CENTERS) : 0;
    i64 center_blocks[EACH_CENTERS] = {};
    auto center_of = [&](int j) { return (warp * EACH_CENTERS + j) * 8 + lane / 4; };
#pragma unroll
    for (int j = 0; j < EACH_CENTERS; j++)
        if (center_of(j) < centers)
            center_blocks[j] = args.codes[batch * args.row + blocks * center_of(j) / centers];
#endif

    Sampled sampled;
    if (any) draw(sampled, first, sampled_block);
#if SAMPLING
    u32 byte = 0;
    if (warp == 7 && tokens > 0 && lane < D / 8)
        byte = reinterpret_cast<const u8*>(first_block)[head_offset + lane];
    Mean means[EACH_CENTERS];
#pragma unroll
    for (int j = 0; j < EACH_CENTERS; j++) {
        means[j] = {};
        if (center_blocks[j])
            load(means[j], reinterpret_cast<const char*>(center_blocks[j]) + head_offset + CENTER);
    }
#endif
    if (early) begin();
    bool stages = early && blockIdx.x == SPLITS - 1;
    if (stages && threadIdx.x == 0) resident = __ldcg(args.resident_count);

    // Round the coordinates of the query of head `h` to integers, and store them as bit planes: plane p contains
    // digit p (to base -2) of each coordinate. If two warps share a head, the warp with `hand` = 0 processes the
    // even words of a plane, and the warp with `hand` = 1 processes the odd words.
    auto round_head = [&](const float (&x)[PER_LANE], int h, float peak, float up, int hand) {
        float scale = peak > 0 ? float(args.query_max) / peak : 0.0f;
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (w % HANDS != hand) continue;
            int r = __float2int_rn(x[w] * scale);
            sum += r;
            u32 mine = 0, digits = (u32(r) + 0xaaaaaaaau) ^ 0xaaaaaaaau;  // to base -2
#pragma unroll
            for (int p = 0; p < PLANES; p++) {
                u32 plane = __ballot_sync(ALL, digits >> p & 1);
                if (lane == p) mine = plane;
            }
            if (lane < PLANES) planes[h][lane][w] = mine;
        }
        sum = __reduce_add_sync(ALL, sum);
        if (lane == 0) atomicAdd(sums + h, sum);
        if (lane == 0 && hand == 0 && scale > 0 && weight_scale > 0) {
            float unit = scale * up * (args.factor_max / (args.level * weight_scale));
            units[h] = unit;
#if SAMPLING
            scales_of[h].x = float(args.gain) / unit;
#endif
        }
    };
    // Rotate the query that is in a warp's registers, and write it to shared memory as float16 numbers.
    auto put_head = [&](float (&x)[PER_LANE], int h) {
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
            if (j < D) halves[h / 4][h % 4][j] = high, halves[h / 4][4 + h % 4][j] = low;
        }
        if (lane == 0) ups[h] = up;
        if (!REGRESSION) round_head(x, h, peak * up, up, 0);
    };
    if (warp < GROUP) put_head(plain, warp);
    for (u32 i = (blockIdx.y * SPLITS + blockIdx.x) * 256 + threadIdx.x; i < u32(args.words);
         i += gridDim.y * SPLITS * 256)
        args.cleared[i] = 0;
    for (int h = warp + 8; h < GROUP; h += 8) {
        read_query(plain, h);
        put_head(plain, h);
    }
#if REGRESSION
    auto voting = reinterpret_cast<float(*)[D]>(histogram);
    // Multiply 16 columns of the regression matrix A with the rotated queries of four heads. The queries are
    // stored as rounded values and remainders (rounding errors). Columns 0 to 3 of the result are products with
    // the rounded values, columns 4 to 7 with the remainders.
    auto multiply = [&](int tile, int n) {
        float products[2][4] = {};
#pragma unroll
        for (int s = 0; s < EIGHTS; s++) {
            int i = s * 32 + lane % 4 * 8;
            uint4 a = EARLY ? held[EARLY ? s : 0][0] : entries(tile, s, 0), b = {0, 0, 0, 0};
            uint4 lower = EARLY ? held[EARLY ? s : 0][1] : entries(tile, s, 1);
            if (n * 4 + lane / 4 % 4 < GROUP && i < D) b = *reinterpret_cast<const uint4*>(&halves[n][lane / 4][i]);
            mma_halves(products[0], a.x, lower.x, a.y, lower.y, b.x, b.y);
            mma_halves(products[1], a.z, lower.z, a.w, lower.w, b.z, b.w);
        }
        bool later = lane & 2;  // this lane keeps the lower row
        int j = tile * 16 + later * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float upper = products[0][i] + products[1][i], lower = products[0][2 + i] + products[1][2 + i];
            float sum = (later ? lower : upper) + __shfl_xor_sync(ALL, later ? upper : lower, 2);
            if (j < D) voting[n * 4 + lane % 2 * 2 + i][j] = sum;
        }
    };
    __syncthreads();
#pragma unroll 1
    for (int tile = warp; tile < COLUMN_TILES; tile += 8)
#pragma unroll(EARLY ? SETS : 1)
        for (int n = 0; n < SETS; n++) multiply(tile, n);
    __syncthreads();
    for (int i = warp; i < GROUP * HANDS; i += 8) {
        int h = i % GROUP;
#pragma unroll
        for (int w = 0; w < PER_LANE; w++) plain[w] = w * 32 + lane < D ? voting[h][w * 32 + lane] : 0.0f;
        round_head(plain, h, peak_of(plain), ups[h], i / GROUP);
    }
#endif
#if SAMPLING
#pragma unroll
    for (int j = 0; j < EACH_CENTERS; j++) {
        float dots[SETS][2];
        products_of(dots, means[j], group);
        for (int i = 0; i < 2 * SETS; i++) {
            int h = i / 2 * 4 + 2 * lane % 4 + i % 2;
            if (lane % 4 < 2 && center_of(j) < centers && h < GROUP) products[center_of(j)][h] = dots[i / 2][i % 2];
        }
    }
    if (warp == 7 && tokens > 0) {
        u32 found = seed_of(args, batch, head_offset, tokens, valid_bits, byte);
        if (lane == 0) seed = found;
    }
#endif
    __syncthreads();
    if (stages && threadIdx.x == 0) count_token(args, resident);  // all threads have read `resident_count`

    auto fragment = [&](int i, int of) {  // column `of` / 4 of part p: bit plane 2 p or 2 p + 1 of a head
        int p = i % PARTS, quad = i / PARTS % QUADS, n = i / PARTS / QUADS;
        return planes[n * 4 + of / 8][2 * p + of / 4 % 2][quad * 4 + of % 4];
    };
#pragma unroll
    for (int i = 0; i < SETS * QUADS * PARTS; i++) (&group.planes[0][0][0])[i] = fragment(i, lane);
#pragma unroll
    for (int n = 0; n < SETS; n++) {
        for (int i = 0; i < 2; i++) group.less[n][i] = -sums[n * 4 + 2 * lane % 4 + i];
        for (int i = 0; i < 2; i++) group.units[n][i] = units[n * 4 + 2 * lane % 4 + i];
    }
    set_powers(group);
#if SAMPLING
    for (int h = warp; h < GROUP && centers; h += 8) {
        float peak = NEVER, sum = 0;
        for (int i = lane; i < centers; i += 32) peak = fmaxf(peak, products[i][h]);
        peak = warp_max(peak);
        for (int i = lane; i < centers; i += 32) sum += exp2f((products[i][h] - peak) * args.octaves);
        float total = -65536 * (peak * args.octaves + log2f(warp_sum(sum)));
        if (lane == 0 && fabsf(total) < LONGEST) scales_of[h].y = total;
    }
    __syncthreads();
    group.all_scales = reinterpret_cast<const float4*>(scales_of) + lane % 2;
    if (SETS == 1) group.scales[0] = *group.all_scales;
    group.seed = seed;
    if (blockIdx.x == 0 && threadIdx.x == 0) args.seeds[bg] = seed;
    if (blockIdx.x == 0 && threadIdx.x < SETS * 4) args.scales[bg * SETS * 4 + threadIdx.x] = scales_of[threadIdx.x];
#endif
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i < SETS * QUADS * PARTS * 32; i += 256)
            args.planes[bg * (SETS * QUADS * PARTS * 32) + i] = fragment(i / 32, i % 32);
        if (threadIdx.x < SETS * 4) {
            args.sums[bg * SETS * 4 + threadIdx.x] = sums[threadIdx.x];
            args.units[bg * SETS * 4 + threadIdx.x] = units[threadIdx.x];
        }
    }
    int* mine = args.sample + bg * SAMPLED;
    for (int i = first; i < SAMPLED / 32; i += SPLITS * 8) {
        int vote = LEAST;
        if (tokens > 0) {
            int offsets[SETS][2];
            offsets_of<false>(offsets, sampled.mean, group, nullptr);
            u32 shifts = shifts_of(weight_scale);
            i64 id = place(i) * TOKENS + part(i) * 32 + own_key();
            vote = vote_of(sampled.signs, sampled.weights, shifts, group, offsets, shared_place(factors), u32(id));
            if (id >= tokens || !(sampled.valid >> own_key() & 1)) vote = LEAST;
            int next = i + SPLITS * 8;
            if (next < SAMPLED / 32) draw(sampled, next, args.codes[batch * args.row + place(next)]);
        }
        mine[i * 32 + lane] = vote;
    }
    bool last = last_block(args.tickets + bg, SPLITS);

    // Write the data that the kernels in rerank.cu and attend.cu read. For each group (the query heads of a KV
    // head), only the last thread block does this. It computes its votes first, so that these writes do not delay
    // the thread block that reads all votes.
    if (blockIdx.x == SPLITS - 1) {
        if (stages && resident < args.room) {
            i64 wide = D + args.value_dim, to = (bg * args.room + resident) * wide;
            for (i64 i = threadIdx.x; i < wide; i += 256) {
                bool key = i < D;
                copy_element(args.resident, to + i, key ? args.token_keys : args.token_values,
                             key ? bg * D + i : bg * args.value_dim + i - D);
            }
        }
        if (threadIdx.x < GROUP) args.ups[bg * GROUP + threadIdx.x] = ups[threadIdx.x];
        operands += bg * (OPERANDS * 4);
        for (int i = threadIdx.x; i < 2 * GROUP * D; i += 256) {
            int part = i % 2, h = i / 2 / D, j = i / 2 % D;
            operands[operand_of(h, j, part)] = halves[h / 4][part * 4 + h % 4][j];
        }
    }
    if (!last) return;

    Threshold found = threshold_of(mine, share, all, histogram);
    if (threadIdx.x == 0) {
        args.thresholds[bg] = found.threshold, args.bases[bg] = found.base, args.shifts[bg] = found.shift;
        args.tickets[bg] = 0;
    }
}
