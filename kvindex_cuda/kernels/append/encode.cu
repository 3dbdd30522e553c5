// Encode keys into blocks of codes, 256 tokens per block (ParisKV paper, A.1 to A.3). The kernel subtracts the
// mean of the block's keys (the center), normalizes and rotates each key, and stores a sign and a magnitude of
// BITS bits per coordinate and one log weight per key.
// Reference: kvindex/pariskv/encoding.py, kvindex/ops/transform.py and kvindex/ops/codes.py with block = D.
// Layout of the codes: kvindex/pariskv/block_layout.py.
//
// A segment is the 256 tokens of one block in one KV head. A thread block takes the number of its next segment
// from a global counter, because multiprocessors differ in speed. Each of its 8 warps encodes 32 keys. The
// codes of a segment depend only on the keys of that segment.
//
// If the keys of a segment fit into shared memory (STAGED), they are copied asynchronously while the preceding
// segment is encoded. Tensor cores then add up the keys for the center, by a product with a matrix of ones.
//
// If the keys do not fit, each warp loads its keys twice: from memory to add them up, then from L1 or L2 to
// encode them. Before its last 8 keys, it prefetches the next segment into L2.
//
// Grid: as many thread blocks as fit on the device, 8 warps each. Dynamic shared memory: 256 ROW bytes if
// STAGED.
// Reads each key once from memory; writes (1 + BITS) STRIDE + 3 bytes per key and 2 D bytes per segment.
// Limited by instruction issue and by shuffles. For D = 128, 3 bits and 16-bit keys, a warp executes 1,450
// instructions per 16 keys, of which 1,330 encode and copy (counted in the machine code). float32 keys take 1.4
// times as many instructions. Measured times are in benchmarks/results/append.json.
//
// The result equals the reference except for rounding. Sums are float32, and the center is subtracted after
// four stages of the rotation, so the rounding error of a rotated coordinate is proportional to ‖k‖ + ‖μ‖,
// where k is the key and μ the center. Keys of 2^120 or more may overflow.
//
// This file is longer than most because it is one kernel.
//
// Compile-time constants:
//   D (dimension of a key), BITS (of a magnitude), DTYPE (of the keys: 0 float32, 1 float16, 2 bfloat16)
//   WIDE (1: each key begins at a multiple of 16 bytes), RESIDENT (thread blocks per multiprocessor)
//   CENTERED (1: blocks of codes have centers)
//   PAGED (1: encode whole segments of an inference engine's pages, those that `due` lists)
//   FP8_KEYS (1: keys are e4m3 numbers, and each layer has a scale for them. They are converted to DTYPE when they
//     are loaded. Only if PAGED)
#include "common/fp8.cuh"
#include "common/rotated.cuh"

static_assert(!FP8_KEYS || PAGED, "scales are those of the layers of an engine");
constexpr int STORED = FP8_KEYS ? 1 : BYTES;          // bytes of a coordinate in memory
constexpr int CHUNKS = BYTES / 2;                     // loads of 16 bytes per 8 coordinates
constexpr int ROW = (D * BYTES + 127) / 128 * 128;    // bytes from one key to the next in shared memory
// true if keys are copied to shared memory
constexpr bool STAGED = !FP8_KEYS && WIDE && ROW <= 256 && TOKENS * ROW * RESIDENT <= 200 << 10;
constexpr bool AHEAD = !STAGED && C * BYTE_WORDS <= 16;     // true if registers hold the next keys
constexpr int LOADS = STAGED ? 4 : 8;                 // loads of four keys in flight while keys are added up
constexpr int HALF = 8, GROUP = 32;                   // keys encoded together; keys whose weights are stored together
constexpr int TILES = (M + 7) / 8;                    // tiles of 8 · 8 coordinates
constexpr int STEPS = 65536 / OCTAVES;                // steps of a log weight per octave

// Load 8 coordinates of a key from global memory. If LAST is true, no later load needs these coordinates, so
// they are loaded with the evict-first policy. Keys in FP8 are multiplied by `scale`.
template <bool LAST>
__device__ __forceinline__ void load(u32 (&words)[BYTE_WORDS], const char* at, float scale) {
#if FP8_KEYS
    const uint2* codes = reinterpret_cast<const uint2*>(at);
    uint2 all = LAST ? __ldcs(codes) : __ldg(codes);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[4];
        from_fp8(x, half ? all.y : all.x);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] *= FP8_UNIT * scale;
#pragma unroll
        for (int i = 0; i < BYTE_WORDS / 2; i++) {
#if DTYPE == 0
            words[4 * half + i] = __float_as_uint(x[i]);
#elif DTYPE == 1
            words[2 * half + i] = to_float16(x[2 * i]) | u32(to_float16(x[2 * i + 1])) << 16;
#else
            words[2 * half + i] = to_bfloat16(x[2 * i]) | u32(to_bfloat16(x[2 * i + 1])) << 16;
#endif
        }
    }
#elif WIDE
    const uint4* wide = reinterpret_cast<const uint4*>(at);
#pragma unroll
    for (int r = 0; r < BYTE_WORDS / 4; r++) {
        uint4 all = LAST ? __ldcs(wide + r) : __ldg(wide + r);
        words[4 * r] = all.x, words[4 * r + 1] = all.y;
        words[4 * r + 2] = all.z, words[4 * r + 3] = all.w;
    }
#else
    const u16* from = reinterpret_cast<const u16*>(at);  // little-endian
#pragma unroll
    for (int r = 0; r < BYTE_WORDS; r++) words[r] = from[2 * r] | u32(from[2 * r + 1]) << 16;
#endif
}

// Stop the compiler from recomputing this shared-memory address at every use.
__device__ __forceinline__ Shared hidden(Shared place) {
#ifndef EMULATED
    asm volatile("" : "+r"(place));
#endif
    return place;
}

__device__ __forceinline__ void of_stage(u32 (&words)[BYTE_WORDS], int r, Shared at) {
    uint4 all = load_from<uint4>(at);
    words[4 * r] = all.x, words[4 * r + 1] = all.y;
    words[4 * r + 2] = all.z, words[4 * r + 3] = all.w;
}

// A segment: the 256 tokens of one block of codes in one KV head, which one thread block encodes. This struct
// is in shared memory to save registers.
enum { NONE, SOME, WHOLE };
struct Segment {
    const char* keys;  // address of the segment's first key
    const u8* flags;   // valid flag of the segment's first token, or null
    char* block;       // address of the block of codes, for all heads
    i64 head;          // offset of this head's record in the block
    u32 to;            // number of tokens in the segment
    u32 unit;          // number of the segment among all segments
    u32 after;         // position of the next segment in `segments`
#if FP8_KEYS
    float scale;       // scale of keys in FP8
#else
    static constexpr float scale = 1;
#endif
    u8 state;          // NONE: there is no such segment; WHOLE: it has all 256 keys and no valid flags; else SOME
};

// Shared-memory swizzle: return the position at which 16-byte chunk number `chunk` of a key is stored. The
// swizzle avoids bank conflicts when lanes read the same chunk of two or four neighboring keys.
__device__ constexpr u32 placed(u32 chunk, u32 key) {
    return chunk ^ (CHUNKS == 1 ? key % 2 * 4 + (key & 2) : key % 2 + (key & 2) * 2);
}

// Add up the 32 keys of a warp with tensor cores, in float32. sums[d] becomes the sum of coordinate d over the
// keys, for d < 32 * C. Each matrix product adds up four keys: it multiplies their coordinates by a matrix of
// zeros and ones. Each column of this matrix adds up one coordinate: it has ones at this coordinate of each key.
//   read(words, i, tile): loads coordinates 8 c to 8 c + 7 of key i + lane % 4, where c = 8 tile + lane / 4, or
//     zeros if the key is not valid.
template <class Read>
__device__ __forceinline__ void add_up(float* sums, const Read& read) {
    int lane = threadIdx.x % 32, byte = lane / 4, t = lane % 4;
    u32 one = (DTYPE == 1 ? 0x3c00u : 0x3f80u) << byte % 2 * 16;
    u32 b0 = byte & 2 ? 0 : one, b1 = byte & 2 ? one : 0;
    float found[TILES][4] = {};
#pragma unroll(LOADS)
    for (int i = 0; i < GROUP; i += 4) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32 words[BYTE_WORDS] = {}, parts[PARTS][4];
            if (tile * 8 + 8 <= M || tile * 8 + byte < M) read(words, i, tile);
            split(parts, words);
#pragma unroll
            for (int p = PARTS - 1; p >= 0; p--)
                if (DTYPE == 1)
                    mma_halves(found[tile], parts[p][0], parts[p][1], parts[p][2], parts[p][3], b0,
                               b1);
                else
                    mma_bfloats(found[tile], parts[p][0], parts[p][1], parts[p][2], parts[p][3], b0,
                                b1);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        if (t < 2 && tile * 8 + byte < C * 4)
            reinterpret_cast<float4*>(sums)[(tile * 8 + byte) * 2 + t] = {
                found[tile][0], found[tile][1], found[tile][2], found[tile][3]};
}

// Upper limit of ‖y‖² for a rotated key y. If all coordinates of a key are at most check.LARGEST (2^48), then
// ‖y‖² is at most (2^49 D)², which is below this limit.
constexpr float TOO_LONG = 1.3e36f;

// Return the mean of coordinate d over the n valid keys of a segment. sums[w][d] is the sum of this coordinate
// over the keys of warp w.
__device__ __forceinline__ u16 mean_of(const float (&sums)[WARPS][C * 32], int d, int n) {
    double total = 0;
    for (int w = 0; w < WARPS; w++) total += sums[w][d];
    // dividing by the constant TOKENS, a power of two, compiles to a multiplication
    float mean = float(n == TOKENS ? total / TOKENS : total / max(n, 1));
    return to_bfloat16(fminf(fmaxf(mean, -float(LONGEST)), float(LONGEST)));
}

struct Arguments {
    const void* keys;     // DTYPE [B, G, N, D]
    const u8* valid;      // bool [B, N], or null if all keys are valid
    const i64* codes;     // [B, row]: addresses of blocks of codes; the record of KV head g begins at g · head_bytes
    const uint4* flips;   // [C, 4]: sign bits of the rotation's random signs s
    const float* hartley; // [ORDER, ORDER]: the rotation's Hartley matrix
    // Tables that map |u|, the absolute value of a normalized key's coordinate, to a magnitude level. The range
    // of |u| is divided into CELLS cells; each cell contains at most one boundary between two levels. The
    // tables follow each other in this order:
    //   [CELLS]: the boundary in each cell, divided by the upper end of the range; +inf if a cell has none.
    //   [CELLS, 2]: indices of the levels below and above the boundary.
    //   [LEVELS]: the magnitude levels, rounded to float16 if BITS is at most 3.
    const float* tables;
    int* wrong;           // [1]: set to 1 if a valid key is not finite or out of range, or null
    int* taken;           // [1]: counter of assigned segments, 0 before and after the launch, or null if each thread
                          // block has one segment at most
    i64 count;            // N, the number of keys
    i64 first;            // number of the block of codes that the first key begins
    i64 blocks;           // blocks of codes per head; the last one may be incomplete
    i64 kv_heads, batches;
    i64 keys_batch, keys_head, keys_token;  // strides
    i64 valid_batch;
    i64 row, head_bytes, weights, logs, magnitudes, center;
    const i64* due;       // PAGED: number of segments, followed by the number of each among all pages
    const i64* bases;     // PAGED: [layers, 2]: addresses of the codes and of the rows of each layer
    i64 layers, parts;    // PAGED: parts: segments per page
    i64 codes_page, codes_part, rows_page, rows_part;  // PAGED: bytes from one page, or one segment, to the next
    float size_scale;     // 1 divided by the largest |u| that has a cell of its own
    float root;           // 1 / √D
    const i64* key_scales;  // [layers]: address of the scale of each layer's keys, float32; only if FP8_KEYS
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
encode(const __grid_constant__ Arguments args) {
    __shared__ uint4 flip[C * 4];
    __shared__ float4 bases[C * 8];  // the rotated center with a minus sign, the start value of the sums
    __shared__ __align__(16) float sums[WARPS][C * 32];
    __shared__ __align__(16) u16 means[C * 32];
    __shared__ float hartley[ODD > 1 ? ORDER * ORDER : 1];
    __shared__ float edges[CELLS], levels[LEVELS];
    __shared__ Segment segments[3];  // the current segment, the next one, and the one after that
    __shared__ u8 indices[2 * CELLS];
    DYNAMIC_SHARED(memory);  // if STAGED: 32 keys of each warp
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    Shared stage = shared_place(memory);

    i64 step = args.keys_token * STORED;
#if PAGED
    u32 units = u32(*args.due * args.layers * args.kv_heads);
#else
    u32 units = u32(args.blocks * args.kv_heads * args.batches);
#endif
    // One thread looks up the address of each segment in memory. It does so while the segment two places before
    // is being encoded, to hide the latency of this lookup.
    auto plan = [&](u32 unit, Segment& found) {
        found.unit = unit, found.to = 0, found.state = NONE;
        if (unit >= units) return;
#if PAGED
        u32 g = unit % u32(args.kv_heads), rest = unit / u32(args.kv_heads), layer = rest % u32(args.layers);
        i64 segment = args.due[1 + rest / u32(args.layers)], page = segment / args.parts, part = segment % args.parts;
        found.block = reinterpret_cast<char*>(args.bases[2 * layer]) + page * args.codes_page + part * args.codes_part;
        found.head = g * args.head_bytes;
        found.keys = reinterpret_cast<const char*>(args.bases[2 * layer + 1]) + page * args.rows_page +
                     part * args.rows_part + g * args.keys_head * STORED;
#if FP8_KEYS
        found.scale = *reinterpret_cast<const float*>(args.key_scales[layer]);
#endif
        found.flags = nullptr, found.to = TOKENS, found.state = WHOLE;
#else
        i64 s = unit % u32(args.blocks), bg = unit / u32(args.blocks), token = s * TOKENS;
        i64 g = u32(bg) % u32(args.kv_heads), batch = u32(bg) / u32(args.kv_heads);
        copy_async<8>(shared_place(&found.block), args.codes + batch * args.row + args.first + s);
        found.head = g * args.head_bytes;
        i64 first_key = batch * args.keys_batch + g * args.keys_head + token * args.keys_token;
        found.keys = static_cast<const char*>(args.keys) + first_key * BYTES;
        found.flags = args.valid ? args.valid + batch * args.valid_batch + token : nullptr;
        found.to = u32(min(args.count - token, i64(TOKENS)));
        found.state = !args.valid && found.to == TOKENS ? WHOLE : SOME;
#endif
    };
    // Start copying eight keys of a segment to shared memory: keys number 8 · `half` to 8 · `half` + 7. Keys that are
    // missing or not valid become zeros. `piece` points to the first 16 bytes that this lane copies, and is
    // advanced by 8 keys.
    constexpr int PADDED = ROW / 16;    // 16-byte parts per key
    constexpr int ROWS = 32 / PADDED;   // keys that a warp copies per instruction
    u32 place = placed(lane % PADDED, lane / PADDED);
    Shared to_stage = hidden(stage + lane / PADDED * ROW + place * 16);
    auto first_of = [&](const Segment& segment) {
        return segment.keys + (warp * GROUP + lane / PADDED) * step + lane % PADDED * 16;
    };
    auto send = [&](const Segment& segment, u32 half, const char*& piece) {
        constexpr u32 BIT = placed(0, 2);  // the bit in which the positions of two keys, two apart, differ
        Shared to = to_stage + half * (HALF * ROW), other = to;
        // recomputed, because no register is left for it
        if (ROWS == 2) other += BIT * 16 - (hidden(place) & BIT) * 32;
        bool mine = D * BYTES == ROW || lane % PADDED * 16 < D * BYTES;
        if (segment.state == WHOLE) {
#pragma unroll
            for (int j = 0; j < HALF; j += ROWS, piece += ROWS * step)
                if (mine) copy_async<16>((ROWS == 2 && j & 2 ? other : to) + j * ROW, piece);
            return;
        }
#pragma unroll 1
        for (int j = 0; j < HALF; j += ROWS, piece += ROWS * step) {
            u32 id = half * HALF + j + lane / PADDED;
            bool in = id < segment.to;
            if (args.valid && in) in = segment.flags[id];
            if (mine) copy_async<16>((ROWS == 2 && j & 2 ? other : to) + j * ROW, piece, in);
        }
    };
    if (threadIdx.x < 3) segments[threadIdx.x].after = (threadIdx.x + 1) % 3;
    for (int i = threadIdx.x; i < C * 4; i += WARPS * 32) flip[i] = args.flips[i];
    if (ODD > 1)
        for (int i = threadIdx.x; i < ORDER * ORDER; i += WARPS * 32) hartley[i] = args.hartley[i];
    for (int i = threadIdx.x; i < CELLS; i += WARPS * 32) edges[i] = args.tables[i];
    for (int i = threadIdx.x; i < 2 * CELLS; i += WARPS * 32) indices[i] = u8(args.tables[CELLS + i]);
    for (int i = threadIdx.x; i < LEVELS; i += WARPS * 32) levels[i] = args.tables[3 * CELLS + i];
    if (threadIdx.x < 2) plan(blockIdx.x + threadIdx.x * gridDim.x, segments[threadIdx.x]);
    async_wait();
    __syncthreads();
    Tables tables;
    tables.edges = edges, tables.levels = levels, tables.indices = indices;
    tables.edge = edges[lane % CELLS];
    u32 index = indices[lane % (2 * CELLS)], half = u32(to_float16(levels[index])) << 16;
    tables.one = half | spread<4>(index) << 4, tables.two = half | spread<4>(index) << 5;
    uint4 b = factors(DTYPE == 1 ? 0x3c00 : 0x3f80);
    Exchange exchange = exchange_of(t);
    u32 width = t ? BITS * STRIDE : STRIDE;  // bytes from one key's codes to the next key's

    const char* coming = first_of(segments[0]);
    if (STAGED && (!PAGED || segments[0].state))
        for (u32 half = warp * 4; half < warp * 4 + 4; half++) send(segments[0], half, coming);
    for (u32 slot = 0; segments[slot].unit < units; slot = segments[slot].after) {
        const Segment& own = segments[slot];
        u32 to = min(own.to, u32((warp + 1) * GROUP));
        async_wait();
        __syncwarp();
        if (CENTERED && STAGED) {
            Shared keys = stage + (warp * GROUP + t) * ROW;
            add_up(sums[warp], [&](u32 (&words)[BYTE_WORDS], int i, int tile) {
#pragma unroll
                for (int r = 0; r < BYTE_WORDS / 4; r++)
                    of_stage(words, r, keys + i * ROW + tile * 8 * CHUNKS * 16 +
                                           placed(lane / 4 * CHUNKS + r, t) * 16);
            });
        } else if (CENTERED) {
            const char* keys = own.keys + (warp * GROUP + t) * step + lane / 4 * 8 * STORED;
            auto read = [&](u32 (&words)[BYTE_WORDS], int i, int tile) {
                load<false>(words, keys + i * step + tile * 64 * STORED, own.scale);
            };
            if (own.state == WHOLE)
                add_up(sums[warp], read);
            else
                add_up(sums[warp], [&](u32 (&words)[BYTE_WORDS], int i, int tile) {
                    u32 id = warp * GROUP + t + i;
                    if (id < own.to && (!args.valid || own.flags[id])) read(words, i, tile);
                });
        }
        // Wait until all warps have encoded the preceding segment and have added up the keys of this segment.
        bool real = CENTERED && threadIdx.x < own.to && (!args.valid || own.flags[threadIdx.x]);
        int n = __syncthreads_count(real);
        u32 unit = ~0u;  // no further segment
        if (threadIdx.x == WARPS * 32 - 1 && segments[own.after].unit < units)
            unit = 2 * gridDim.x + u32(atomicAdd(args.taken, 1));
        for (int c = warp; CENTERED && c < C; c += WARPS) {
            int d = c * 32 + lane;
            u16 x = mean_of(sums, d, n);
            // Check the center of the block for NaN and for values that are too large. The check of the keys
            // below is not enough: it sees only the differences between keys and center, and in a block with a
            // single key, this difference is 0.
            if (args.wrong && fabsf(from_bfloat16(x)) > float(LARGEST)) *args.wrong = 1;
            means[d] = x;
            if (d < D) reinterpret_cast<u16*>(own.block + own.head + args.center)[d] = x;
            __syncwarp();
            uint4 all = reinterpret_cast<const uint4*>(means)[c * 4 + t];
            u32 pairs[4] = {all.x, all.y, all.z, all.w};
            float rotated[2][4] = {};
            multiply<false>(rotated, pairs, DTYPE == 1 ? factors(0x3f80) : b, flip[c * 4 + t]);
#pragma unroll
            for (int n = 0; n < 2; n++)  // subtracting from 0 avoids −0, whose sign bit would count
                if (lane < 4)
                    bases[c * 8 + n * 4 + t] = {0 - rotated[n][0], 0 - rotated[n][1],
                                                0 - rotated[n][2], 0 - rotated[n][3]};
        }
        if (CENTERED) __syncthreads();
        const Segment& next = segments[own.after];
        if (threadIdx.x == WARPS * 32 - 1) {
            plan(unit, segments[next.after]);
            if (unit + 1 == units + gridDim.x) *args.taken = 0;  // all thread blocks have taken their last segment
        }

        u32 raw[C][BYTE_WORDS];
        // `__shfl_sync` returns each lane its own value here. It only keeps the compiler from computing `first` again
        // at every use.
        const char* first = own.keys + t * 8 * STORED;
        first = reinterpret_cast<const char*>(__shfl_sync(ALL, reinterpret_cast<u64>(first), lane));
        if (!STAGED) to = __shfl_sync(ALL, to, lane);
        auto fetch = [&](u32 half) {
            u32 id = min(half * HALF + lane / 4, to - 1);
            const char* key = first + id * step;
            Shared line = stage + (half * HALF + lane / 4) * ROW;
            if (!STAGED && args.valid && !own.flags[id]) {
#pragma unroll
                for (int i = 0; i < C * BYTE_WORDS; i++) raw[i / BYTE_WORDS][i % BYTE_WORDS] = 0;
                return;
            }
#pragma unroll
            for (int c = 0; c < C; c++)
                if (M % 4 == 0 || c * 4 + t < M) {
                    if (!STAGED) load<true>(raw[c], key + c * 32 * STORED, own.scale);
                    constexpr int OVER = 2 / CHUNKS;  // values of c whose coordinates are in the same 128 bytes of a
                                                      // key
#pragma unroll
                    for (int r = 0; STAGED && r < BYTE_WORDS / 4; r++)
                        of_stage(raw[c], r,
                                 line + c / OVER * 128 +
                                     placed((c % OVER * 4 + t) * CHUNKS + r, lane / 4) * 16);
                } else {
#pragma unroll
                    for (int r = 0; r < BYTE_WORDS; r++) raw[c][r] = 0;
                }
        };
        char* out = own.block + own.head + (t ? args.magnitudes + (t - 1) * STRIDE : 0);
        out = reinterpret_cast<char*>(__shfl_sync(ALL, reinterpret_cast<u64>(out), lane));
        if (AHEAD && warp * GROUP < to) fetch(warp * 4);

        coming = first_of(next);
        float mine = 0;
#pragma unroll 1
        for (u32 half = warp * 4; half < warp * 4 + 4; half++) {
            if (STAGED) to = own.to;
            bool any = half * HALF < to;
            if (STAGED || (!AHEAD && any)) fetch(half);
            if (STAGED && next.state) {
                __syncwarp();  // all lanes have read the keys that this copy overwrites
                send(next, half, coming);
            }
            if (!any) continue;
            Rotated y;
#pragma unroll
            for (int c = 0; c < C; c++) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float4 less = CENTERED ? bases[c * 8 + n * 4 + t] : float4{};
                    y[c][n][0] = less.x, y[c][n][1] = less.y;
                    y[c][n][2] = less.z, y[c][n][3] = less.w;
                }
                u32 parts[PARTS][4];
                split(parts, raw[c]);
#pragma unroll
                for (int p = PARTS - 1; p >= 0; p--)
                    multiply<DTYPE == 1>(y[c], parts[p], b, flip[c * 4 + t]);
            }
            if (AHEAD && (half + 1) * HALF < to) fetch(half + 1);
            if (!STAGED && half % 4 == 2 && warp * GROUP + lane < next.to) {
                const char* key = next.keys + (warp * GROUP + lane) * step;
#pragma unroll
                for (int i = 0; i < D * STORED; i += 128) to_l2(key + i);
            }
            finish(y, hartley);

            float squares = 0, longer = 1;
#pragma unroll
            for (int i = 0; i < C * 8; i++)
                squares = fmaf(y[i / 8][i / 4 % 2][i % 4], y[i / 8][i / 4 % 2][i % 4], squares);
            squares = quad_sum(squares);
            // If the squared norm ‖y‖² of a rotated key might overflow or underflow float32, scale y by a power
            // of two so that its largest coordinate is near 1.
            bool far = !(squares > 1e-24f && squares < 1e30f);
            if (__any_sync(ALL, far)) {
                // padding is zero here, so it does not count
                if (args.wrong && !(squares <= TOO_LONG)) *args.wrong = 1;
                float peak = 0;
#pragma unroll
                for (int i = 0; i < C * 8; i++)
                    peak = fmaxf(peak, fabsf(y[i / 8][i / 4 % 2][i % 4]));
                peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
                u32 octave = __float_as_uint(peak) >> 23;
                float power = far ? __uint_as_float(u32(max(254 - int(octave), 1)) << 23) : 1.0f;
                longer = 1.0f / power;
                squares = 0;
#pragma unroll
                for (int i = 0; i < C * 8; i++) {
                    float& x = y[i / 8][i / 4 % 2][i % 4];
                    x *= power;
                    squares = fmaf(x, x, squares);
                }
                squares = quad_sum(squares);
            }
            float inverse = squares > 0 ? rsqrtf(squares) : 0.0f, length = squares * inverse;
            float per = inverse * args.size_scale, aligned = 0;
            u32 rows[WORDS][(C + 1) / 2 * 2] = {};
#pragma unroll
            for (int c = 0; c < C; c++) {
                u32 words[WORDS];
                coded(words, aligned, y[c], per, tables);
#pragma unroll
                for (int w = 0; w < WORDS; w++)
                    rows[w][c] = M % 4 && c * 4 + t >= M ? 0 : words[w];
            }
            u32 key = half * HALF + lane / 4;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                u32 mine[C];
#pragma unroll
                for (int c = 0; c < C; c += 2) {
                    transpose(rows[w][c], rows[w][c + 1], exchange);
                    mine[c] = rows[w][c];
                    if (c + 1 < C) mine[c + 1] = rows[w][c + 1];
                }
                u32 plane = w * 4 + t;  // plane 0 has the signs
                char* to_row = out + key * width;
                if (w)
                    to_row = own.block + own.head + args.magnitudes + (key * BITS + plane - 1) * STRIDE;
                if (plane <= BITS && key < to) store_row(to_row, mine);
            }
            aligned = quad_sum(aligned) * inverse;
            float norm = fminf(length * longer * args.root, float(LONGEST));
            float weight = squares > 0 ? __fdividef(norm, aligned) : 0.0f;
            if (half % 4 == t) mine = weight;
            if (half % 4 < 3 && (half + 1) * HALF < to) continue;

            // Write the weights of up to 32 keys, one per lane of the warp.
            u32 id = half / 4 * GROUP + t * HALF + lane / 4;
            if (id < to) {
                int code = 0;
                if (mine > 0 && (!args.valid || own.flags[id])) {  // as kvindex.ops.codes.log_codes
                    u32 bits = __float_as_uint(mine);
                    float above = __log2f(__uint_as_float((bits & 0x7fffff) | 0x3f800000));
                    code = (int(bits >> 23) - 127) * STEPS + 32768 + __float2int_rn(above * STEPS);
                    code = min(max(code, 1), 65535);
                }
                char* record = own.block + own.head;
                reinterpret_cast<u8*>(record + args.weights)[half / 4 * GROUP + lane] =
                    u8(code >> 8);  // order of block_layout.places
                reinterpret_cast<u16*>(record + args.logs)[id] = u16(code);
            }
        }
    }
}
