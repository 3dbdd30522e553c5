// Keys to codes in blocks: center made and taken off, normalize, rotate, code, log weight (paper, A.1
// to A.3; ops/{transform,codes}.py with block = D, pariskv/block_layout.py), so that keys come from memory
// once and a block's codes are a function of its keys.
//
// How a key is rotated and coded: rotated.cuh.
//
// Grid: as many blocks as there is room for, 8 warps; a block takes segments (256 tokens of a head)
// as it is done with others (those of a multiprocessor are not equally fast), a warp 32 keys of one.
// Where a segment's keys fit (STAGED; dynamic shared memory: 256 ROW bytes), they come by copies that
// go on while the segment before is coded: as soon as a warp has 8 keys in registers, it sends for 8 of
// the next segment's to the same place. A segment's keys are added up there, which the matrix unit does
// with ones on the other side (an instruction for 256 coordinates); then the block makes the center and
// codes. Elsewhere a warp adds up what it loads, and loads again from L1 or L2 to code; before the last
// 8 keys are coded, the next segment's are sent for. The last segment may lack keys: it is made of
// those that are there.
// From memory a key is read once; written are (1 + BITS) STRIDE + 3 bytes per key and 2 D per 256.
// Limited by issue slots and the pipe of shuffles (counted in the machine code of D = 128, 3 bits,
// 16-bit keys): 1,450 instructions of a warp per 16 keys, 1,330 of them to code and to send, the rest
// for centers and what a segment needs. Between the two barriers of a segment all warps of a block wait
// for its center; other blocks code meanwhile.
// Times are in benchmarks/results/append.json. float32 keys take 1.4 times as many instructions.
//
// As the reference but for rounding: sums are in float32, and the center goes off after four
// stages, so that an error of y is in proportion to ‖k‖ + ‖μ‖. Keys from 2^120 on may overflow.
// Compile-time: D, BITS (of a magnitude), DTYPE (of the keys), WIDE (whether each key begins at a
// multiple of 16 bytes), RESIDENT (blocks of a multiprocessor), CENTERED (whether blocks have centers), PAGED
// (whether keys are those of an engine's pages: of each layer and head the segments that `due` names, whole ones).
// Longer than most files: it is one kernel.
#include "common/rotated.cuh"

constexpr int CHUNKS = BYTES / 2;                     // of 16 bytes, in a byte of coordinates
constexpr int ROW = (D * BYTES + 127) / 128 * 128;    // of a key in shared memory
constexpr bool STAGED = WIDE && ROW <= 256 && TOKENS * ROW * RESIDENT <= 200 << 10;  // keys go there
constexpr bool AHEAD = !STAGED && C * BYTE_WORDS <= 16;     // registers hold the next keys
constexpr int LOADS = STAGED ? 4 : 8;                 // of four keys, in flight to be added up
constexpr int HALF = 8, GROUP = 32;                   // keys at a time; whose weights lie together
constexpr int TILES = (M + 7) / 8;                    // of 8 bytes
constexpr int STEPS = 65536 / OCTAVES;                // of a log weight to an octave

// Eight coordinates as they lie in memory. LAST: nobody reads them again.
template <bool LAST>
__device__ __forceinline__ void load(u32 (&words)[BYTE_WORDS], const char* at) {
#if WIDE
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

// A place of which the compiler does not know what it is, or that it was computed before.
__device__ __forceinline__ Shared hidden(Shared place) {
#ifndef EMULATED
    asm volatile("" : "+r"(place));
#endif
    return place;
}

// The r-th four words of a lane's byte of coordinates.
__device__ __forceinline__ void of_stage(u32 (&words)[BYTE_WORDS], int r, Shared at) {
    uint4 all = load_from<uint4>(at);
    words[4 * r] = all.x, words[4 * r + 1] = all.y;
    words[4 * r + 2] = all.z, words[4 * r + 3] = all.w;
}

// A segment of a head, of which a block of threads codes the keys: what they need of it now and
// then, for no registers are left for it.
enum { NONE, SOME, WHOLE };
struct Segment {
    const char* keys;  // of its first token
    const u8* flags;   // likewise, or null
    char* block;       // of all heads
    i64 head;          // where the head begins in it
    u32 to;            // tokens that are there
    u32 unit;          // its number, of all
    u32 after;         // where the next one lies
    u8 state;          // NONE: no such segment; WHOLE: all keys are there, and there are no flags
};

// Where a key's 16 bytes of this number lie among those of its row in shared memory: such that the
// lanes that read at once, of two keys or of four, find them in different banks.
__device__ constexpr u32 placed(u32 chunk, u32 key) {
    return chunk ^ (CHUNKS == 1 ? key % 2 * 4 + (key & 2) : key % 2 + (key & 2) * 2);
}

// Sums of a warp's 32 keys, to `sums` [C * 32]. The left factor has a byte of four keys in two rows
// as it lies in memory: words 0 and 2 in one, 1 and 3 in the other. The right one adds up each
// coordinate of such a row in a column of its own. Products are exact, sums float32.
// read(words, i, tile): byte `tile * 8 + lane / 4` of key `i + lane % 4`, zeros for an invalid one.
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

// Above ‖y‖² of every key whose coordinates are allowed (check.LARGEST, 2^48): (2^49 D)² at most.
constexpr float TOO_LONG = 1.3e36f;

// The mean of coordinate d of a segment's n valid keys, of the warps' sums.
__device__ __forceinline__ u16 mean_of(const float (&sums)[WARPS][C * 32], int d, int n) {
    double total = 0;
    for (int w = 0; w < WARPS; w++) total += sums[w][d];
    float mean = float(n == TOKENS ? total / TOKENS : total / max(n, 1));  // a product, as a rule
    return to_bfloat16(fminf(fmaxf(mean, -float(LONGEST)), float(LONGEST)));
}

struct Arguments {
    const void* keys;     // DTYPE [B, G, N, D]
    const u8* valid;      // bool [B, N], or null
    const i64* codes;     // [B, row]: addresses of blocks, of KV head g at g · head_bytes
    const uint4* flips;   // [C, 4]: sign bits of s
    const float* hartley; // [ORDER, ORDER]
    const float* tables;  // CELLS edges by the scale (+inf for none), 2 CELLS indices of levels, by cell and side,
                          // LEVELS levels, float16 for 3 bits at most
    int* wrong;           // [1]: set to 1 where a valid key is not finite or out of range, or null
    int* taken;           // [1]: 0, also afterwards, or null where there are no more segments than blocks
    i64 count;            // N
    i64 first;            // block of the first key, which begins it
    i64 blocks;           // of a head, of which the last may lack keys
    i64 kv_heads, batches;
    i64 keys_batch, keys_head, keys_token;  // strides
    i64 valid_batch;
    i64 row, head_bytes, weights, logs, magnitudes, center;
    const i64* due;       // PAGED: how many segments, then each one's number, counted over all pages
    const i64* bases;     // PAGED: [layers, 2]: addresses of codes and of rows
    i64 layers, parts;    // PAGED: segments of a page
    i64 codes_page, codes_part, rows_page, rows_part;  // PAGED: bytes from a page, a segment to the next one
    float size_scale;     // 1 by the largest |u| that is told apart
    float root;           // 1 / √D
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
encode(const __grid_constant__ Arguments args) {
    __shared__ uint4 flip[C * 4];
    __shared__ float4 bases[C * 8];  // minus the center after the matrix unit
    __shared__ __align__(16) float sums[WARPS][C * 32];
    __shared__ __align__(16) u16 means[C * 32];
    __shared__ float hartley[ODD > 1 ? ORDER * ORDER : 1];
    __shared__ float edges[CELLS], levels[LEVELS];
    __shared__ Segment segments[3];  // this one, the next, and the one after it
    __shared__ u8 indices[2 * CELLS];
    DYNAMIC_SHARED(memory);  // if STAGED, each warp's 32 keys
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    Shared stage = shared_place(memory);

    i64 step = args.keys_token * BYTES;
#if PAGED
    u32 units = u32(*args.due * args.layers * args.kv_heads);
#else
    u32 units = u32(args.blocks * args.kv_heads * args.batches);
#endif
    // One thread plans a segment while the second before it is coded, for its address comes from memory.
    auto plan = [&](u32 unit, Segment& found) {
        found.unit = unit, found.to = 0, found.state = NONE;
        if (unit >= units) return;
#if PAGED
        u32 g = unit % u32(args.kv_heads), rest = unit / u32(args.kv_heads), layer = rest % u32(args.layers);
        i64 segment = args.due[1 + rest / u32(args.layers)], page = segment / args.parts, part = segment % args.parts;
        found.block = reinterpret_cast<char*>(args.bases[2 * layer]) + page * args.codes_page + part * args.codes_part;
        found.head = g * args.head_bytes;
        found.keys = reinterpret_cast<const char*>(args.bases[2 * layer + 1]) + page * args.rows_page +
                     part * args.rows_part + g * args.keys_head * BYTES;
        found.flags = nullptr, found.to = TOKENS, found.state = WHOLE;
#else
        i64 s = unit % u32(args.blocks), bg = unit / u32(args.blocks), token = s * TOKENS;
        i64 g = u32(bg) % u32(args.kv_heads), batch = u32(bg) / u32(args.kv_heads);
        copy_piece<8>(shared_place(&found.block), args.codes + batch * args.row + args.first + s);
        found.head = g * args.head_bytes;
        i64 first_key = batch * args.keys_batch + g * args.keys_head + token * args.keys_token;
        found.keys = static_cast<const char*>(args.keys) + first_key * BYTES;
        found.flags = args.valid ? args.valid + batch * args.valid_batch + token : nullptr;
        found.to = u32(min(args.count - token, i64(TOKENS)));
        found.state = !args.valid && found.to == TOKENS ? WHOLE : SOME;
#endif
    };
    // Eight of a segment's keys, the half-th, on their way to shared memory, zeros for those that are
    // not there. piece: where this lane's first 16 bytes of them are, which is moved on.
    constexpr int PADDED = ROW / 16, ROWS = 32 / PADDED;  // pieces of a row; rows at a time
    u32 place = placed(lane % PADDED, lane / PADDED);
    Shared to_stage = hidden(stage + lane / PADDED * ROW + place * 16);
    auto first_of = [&](const Segment& segment) {
        return segment.keys + (warp * GROUP + lane / PADDED) * step + lane % PADDED * 16;
    };
    auto send = [&](const Segment& segment, u32 half, const char*& piece) {
        constexpr u32 BIT = placed(0, 2);  // in which places of rows 2 apart differ
        Shared to = to_stage + half * (HALF * ROW), other = to;
        if (ROWS == 2) other += BIT * 16 - (hidden(place) & BIT) * 32;  // no register is left for it
        bool mine = D * BYTES == ROW || lane % PADDED * 16 < D * BYTES;
        if (segment.state == WHOLE) {
#pragma unroll
            for (int j = 0; j < HALF; j += ROWS, piece += ROWS * step)
                if (mine) copy_piece<16>((ROWS == 2 && j & 2 ? other : to) + j * ROW, piece);
            return;
        }
#pragma unroll 1
        for (int j = 0; j < HALF; j += ROWS, piece += ROWS * step) {
            u32 id = half * HALF + j + lane / PADDED;
            bool in = id < segment.to;
            if (args.valid && in) in = segment.flags[id];
            if (mine) copy_piece<16>((ROWS == 2 && j & 2 ? other : to) + j * ROW, piece, in);
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
    pieces_wait();
    __syncthreads();
    Tables tables;
    tables.edges = edges, tables.levels = levels, tables.indices = indices;
    tables.edge = edges[lane % CELLS];
    u32 index = indices[lane % (2 * CELLS)], half = u32(to_float16(levels[index])) << 16;
    tables.one = half | spread<4>(index) << 4, tables.two = half | spread<4>(index) << 5;
    uint4 b = factors(DTYPE == 1 ? 0x3c00 : 0x3f80);
    Exchange exchange = exchange_of(t);
    u32 width = t ? BITS * STRIDE : STRIDE;  // from a key's to the next one's

    const char* coming = first_of(segments[0]);
    if (STAGED && (!PAGED || segments[0].state))
        for (u32 half = warp * 4; half < warp * 4 + 4; half++) send(segments[0], half, coming);
    for (u32 slot = 0; segments[slot].unit < units; slot = segments[slot].after) {
        const Segment& own = segments[slot];
        u32 to = min(own.to, u32((warp + 1) * GROUP));
        pieces_wait();
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
            const char* keys = own.keys + (warp * GROUP + t) * step + lane / 4 * 8 * BYTES;
            auto read = [&](u32 (&words)[BYTE_WORDS], int i, int tile) {
                load<false>(words, keys + i * step + tile * 64 * BYTES);
            };
            if (own.state == WHOLE)
                add_up(sums[warp], read);
            else
                add_up(sums[warp], [&](u32 (&words)[BYTE_WORDS], int i, int tile) {
                    u32 id = warp * GROUP + t + i;
                    if (id < own.to && (!args.valid || own.flags[id])) read(words, i, tile);
                });
        }
        // all keys of the segment before are coded, all of this one added up
        bool real = CENTERED && threadIdx.x < own.to && (!args.valid || own.flags[threadIdx.x]);
        int n = __syncthreads_count(real);
        u32 unit = ~0u;  // none
        if (threadIdx.x == WARPS * 32 - 1 && segments[own.after].unit < units)
            unit = 2 * gridDim.x + u32(atomicAdd(args.taken, 1));
        for (int c = warp; CENTERED && c < C; c += WARPS) {
            int d = c * 32 + lane;
            u16 x = mean_of(sums, d, n);
            // so a key that is its block's only one, and leaves nothing to look at, is seen
            if (args.wrong && fabsf(from_bfloat16(x)) > float(LARGEST)) *args.wrong = 1;
            means[d] = x;
            if (d < D) reinterpret_cast<u16*>(own.block + own.head + args.center)[d] = x;
            __syncwarp();
            uint4 all = reinterpret_cast<const uint4*>(means)[c * 4 + t];
            u32 pairs[4] = {all.x, all.y, all.z, all.w};
            float rotated[2][4] = {};
            multiply<false>(rotated, pairs, DTYPE == 1 ? factors(0x3f80) : b, flip[c * 4 + t]);
#pragma unroll
            for (int n = 0; n < 2; n++)  // from 0: no −0, whose sign would count
                if (lane < 4)
                    bases[c * 8 + n * 4 + t] = {0 - rotated[n][0], 0 - rotated[n][1],
                                                0 - rotated[n][2], 0 - rotated[n][3]};
        }
        if (CENTERED) __syncthreads();
        const Segment& next = segments[own.after];
        if (threadIdx.x == WARPS * 32 - 1) {
            plan(unit, segments[next.after]);
            if (unit + 1 == units + gridDim.x) *args.taken = 0;  // all blocks have asked for the last time
        }

        u32 raw[C][BYTE_WORDS];
        // a shuffle hides where an address comes from, which the compiler would compute each time
        const char* first = own.keys + t * 8 * BYTES;
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
                    if (!STAGED) load<true>(raw[c], key + c * 32 * BYTES);
                    constexpr int OVER = 2 / CHUNKS;  // values of c that share 128 bytes of a row
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
                __syncwarp();  // the keys that lay there are read
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
                for (int i = 0; i < D * BYTES; i += 128) to_l2(key + i);
            }
            finish(y, hartley);

            float squares = 0, longer = 1;
#pragma unroll
            for (int i = 0; i < C * 8; i++)
                squares = fmaf(y[i / 8][i / 4 % 2][i % 4], y[i / 8][i / 4 % 2][i % 4], squares);
            squares = quad_sum(squares);
            // out of float32's range: y by a power of two that brings its largest to 1
            bool far = !(squares > 1e-24f && squares < 1e30f);
            if (__any_sync(ALL, far)) {
                if (args.wrong && !(squares <= TOO_LONG)) *args.wrong = 1;  // padding is zero here
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
                u32 plane = w * 4 + t;  // 0 of signs
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

            // weights of up to 32 keys, one of each lane
            u32 id = half / 4 * GROUP + t * HALF + lane / 4;
            if (id < to) {
                int code = 0;
                if (mine > 0 && (!args.valid || own.flags[id])) {  // ops.codes.log_codes
                    u32 bits = __float_as_uint(mine);
                    float above = __log2f(__uint_as_float((bits & 0x7fffff) | 0x3f800000));
                    code = (int(bits >> 23) - 127) * STEPS + 32768 + __float2int_rn(above * STEPS);
                    code = min(max(code, 1), 65535);
                }
                char* record = own.block + own.head;
                reinterpret_cast<u8*>(record + args.weights)[half / 4 * GROUP + lane] =
                    u8(code >> 8);  // block_layout.places
                reinterpret_cast<u16*>(record + args.logs)[id] = u16(code);
            }
        }
    }
}
