// Keys to codes in blocks, in one pass: centre off, normalise, rotate, code, log weight (paper, A.1
// to A.3; ops/{transform,codes}.py with block = D, kvindex_cuda/layout.py).
//
// Idea: R = (Q ⊗ H) diag(s) / √D is linear, so the matrix unit does four of H's stages of 8 keys at
// a time, on keys as they come: entries of H are ±1, float32 is the sum of 3 bfloat16, all exact,
// and the sum starts at minus the centre's, which the block has turned before. The other stages are
// sums in registers, and Q, of order p, is p² products. Four lanes share a key and a lane has whole
// bytes of coordinates. Then y = √D R (k − μ), u = y/‖y‖, w = ‖k − μ‖/⟨v, u⟩.
// A level's index: of |u|'s cell, one of equal ones that hold an edge at most, and of which side of
// the edge it is on. Up to 3 bits the tables are the registers of a warp's lanes.
//
// Grid: (blocks touched, G, B), 8 warps of 16 keys at a time. Reads a key once, 2 D bytes of centre
// per block; writes (1 + BITS) STRIDE + 3 bytes per key and 2 D per block. Bytes to a block go
// through shared memory, 16 at a time.
// Limited by issue slots (counted in the machine code of D = 128, 3 bits, 16-bit keys): 22
// instructions per coordinate and 2 more for what a block makes ready; 10 of them code it, 3 of
// those are shuffles, and 3 finish the rotation. That is 24 cycles of an SM per key: .87 ms for the
// 8.4 million keys of 8 heads on 132 SMs at 1.75 GHz, where their 2.73 GB take .60 ms at the
// measured rate of reading. On an H200 it takes 1.41 ms, .43 of that rate
// (benchmarks/results/append.json): what else limits it is not known yet. float32 keys take 1.4
// times as many instructions, 5 bits 1.5.
//
// As the reference but for rounding: sums are in float32, and the centre goes off after four
// stages, so that an error of y is in proportion to ‖k‖ + ‖μ‖. Keys from 2^120 on may overflow.
// Compile-time: D, BITS (of a magnitude), DTYPE (of the keys), WIDE (whether each key begins at a
// multiple of 16 bytes). Longer than most files: it is one kernel.
#include "common.cuh"

constexpr int POWER = D & -D, ODD = D / POWER;        // orders of H and Q
constexpr int M = D / 8, C = (M + 3) / 4;             // bytes of a plane; of them in a lane
constexpr int STRIDE = 4 * C;                         // of a plane in a block
constexpr int UNITS = POWER >= 32 ? POWER / 32 : 1;   // bytes of a lane that share a row of Q
constexpr int LANES = POWER >= 32 ? 1 : 32 / POWER;   // of the four that share a column of Q
constexpr int TERMS = POWER >= 32 ? ODD : C;          // rows of Q in a lane
constexpr int ORDER = TERMS * LANES;                  // of Q with zeros to fill the lanes
constexpr int PARTS = DTYPE == 0 ? 3 : 1;             // 16-bit numbers that make a coordinate
constexpr int LEVELS = 1 << BITS;
constexpr int WORDS = (BITS + 3) / 4;                 // of four planes' bytes each
constexpr int CELLS = BITS <= 3 ? 16 : 4 << BITS;     // so narrow that each has an edge at most
constexpr int WARPS = 8, TILE = 16;
constexpr double STEPS = 65536.0 / 12;                // of a log weight to an octave: codes.OCTAVES
constexpr int STAGE = TILE * STRIDE * (1 + BITS);     // bytes of a tile

// A turned key: of the lane's byte c, coordinate 4 n + i at [c][n][i].
typedef float Turned[C][2][4];

// c += a b for a of 16 x 16 and b of 16 x 8 bfloat16 (PTX, mma.m16n8k16; fragments as in
// `mma_halves`). Rows `row` and `row + 8` of a are pairs (0, 2) and (1, 3) of key `row`.
__device__ __forceinline__ void mma_bfloats(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                           u32 b1) {
#ifdef EMULATED
    emulator::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ float at_most_one(float x) {  // x ≥ 0
#ifdef EMULATED
    return fminf(x, 1.0f);
#else
    return __saturatef(x);
#endif
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

// Eight coordinates as pairs of 16-bit numbers, the most significant part first.
__device__ __forceinline__ void load(u32 (&pairs)[PARTS][4], const void* data, i64 i) {
#if DTYPE && WIDE
    uint4 all = *reinterpret_cast<const uint4*>(static_cast<const u16*>(data) + i);
    pairs[0][0] = all.x, pairs[0][1] = all.y, pairs[0][2] = all.z, pairs[0][3] = all.w;
#elif DTYPE
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const u16* from = static_cast<const u16*>(data) + i + 2 * r;
        pairs[0][r] = from[0] | u32(from[1]) << 16;
    }
#else
    float x[8];
#if WIDE
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
    float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#else
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = element(data, i + j);
#endif
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 low = __float_as_uint(x[2 * r]), high = __float_as_uint(x[2 * r + 1]);
            pairs[part][r] = (high & 0xffff0000u) | low >> 16;
            x[2 * r] -= __uint_as_float(low & 0xffff0000u);  // exact
            x[2 * r + 1] -= __uint_as_float(high & 0xffff0000u);
        }
#endif
}

// The right factor: the stages of H over bits 0 and 2 of a coordinate's number and, where H has
// them, 3 and 4. Row (bit 2, lane of the quad, bit 0), column (lane of the quad, bit 0), for
// outputs with bit 2 clear; for the others b1 is negative. Bit 1 tells rows of the left factor
// apart. unit: 1 in 16 bits.
__device__ __forceinline__ u32 factor(u32 unit) {
    int t = threadIdx.x % 4, column = threadIdx.x % 32 / 4, to = column / 2;
    int both = POWER >= 32 ? 3 : POWER == 16 ? 1 : 0;  // bits of the lane that H mixes
    u32 one = (t & ~both) != (to & ~both) ? 0 : __popc(t & to & both) & 1 ? unit ^ 0x8000 : unit;
    return one | (column % 2 && one ? one ^ 0x8000 : one) << 16;
}

// The lane's byte of a key, float16 or bfloat16, added to what the matrix unit leaves.
template <bool HALVES>
__device__ __forceinline__ void multiply(float (&sums)[2][4], const u32 (&a)[4], u32 b,
                                         const uint4& flip) {
    u32 a0 = a[0] ^ flip.x, a1 = a[1] ^ flip.y, a2 = a[2] ^ flip.z, a3 = a[3] ^ flip.w;
    if (HALVES) {
        mma_halves(sums[0], a0, a1, a2, a3, b, b);
        mma_halves(sums[1], a0, a1, a2, a3, b, b ^ 0x80008000u);
    } else {
        mma_bfloats(sums[0], a0, a1, a2, a3, b, b);
        mma_bfloats(sums[1], a0, a1, a2, a3, b, b ^ 0x80008000u);
    }
}

// The other stages: bit 1, then bits 5 and up, then Q.
__device__ __forceinline__ void finish(Turned& y, const float* hartley) {
    auto stage = [](float& low, float& high) {
        float a = low, b = high;
        low = a + b, high = a - b;
    };
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) stage(y[c][i / 2][i % 2], y[c][i / 2][i % 2 + 2]);
#pragma unroll
    for (int step = 1; step < UNITS; step *= 2)
#pragma unroll
        for (int c = 0; c < C; c++)
            if (!(c & step))
#pragma unroll
                for (int i = 0; i < 8; i++) stage(y[c][i / 4][i % 4], y[c + step][i / 4][i % 4]);
    if (ODD == 1) return;
    int own = threadIdx.x % 4 * LANES / 4;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (ODD > 7) __syncwarp();  // keeps Q in shared memory: no registers are left for it
            float found[TERMS];
#pragma unroll
            for (int row = 0; row < ORDER; row++) {
                float sum = 0;
#pragma unroll
                for (int o = 0; o < TERMS; o++)
                    sum = fmaf(hartley[row * ORDER + o * LANES + own],
                               y[o * UNITS + unit][i / 4][i % 4], sum);
                if (LANES == 4) sum += __shfl_xor_sync(ALL, sum, 1);
                if (LANES >= 2) sum += __shfl_xor_sync(ALL, sum, 2);
                if (row % LANES == own) found[row / LANES] = sum;
            }
#pragma unroll
            for (int o = 0; o < TERMS; o++) y[o * UNITS + unit][i / 4][i % 4] = found[o];
        }
}

// Bit p of the index as byte p of a word, of four planes from `first` on.
__device__ __forceinline__ u32 spread(u32 index, int first) {
    return (index >> first & 15) * 0x00204081u & 0x01010101u;
}

struct Tables {
    const float *edges, *levels;  // in shared memory, as are the levels' indices
    const u8* indices;
    float edge, level;  // of this lane's cell, and side of a cell
    u32 planes;
};

// The level of |u|, whose planes are added to `words`. x: |u| by the scale of the edges.
__device__ __forceinline__ float coded(u32 (&words)[WORDS + 1], float x, const Tables& tables) {
    if (BITS == 0) return tables.levels[0];
    u32 cell = __float_as_uint(fmaf(x, CELLS - 1, 12582912.0f));  // rounded: in the lowest bits
#if BITS <= 3
    float edge = __shfl_sync(ALL, tables.edge, int(cell));
    int side = int(__funnelshift_l(__float_as_uint(edge - x), cell, 1));  // 2 cell + (x > edge)
    words[0] = 2 * words[0] + __shfl_sync(ALL, tables.planes, side);
    return __shfl_sync(ALL, tables.level, side);
#else
    float edge = tables.edges[cell & (CELLS - 1)];
    u32 side = __funnelshift_l(__float_as_uint(edge - x), cell, 1) & (2 * CELLS - 1);
    u32 index = tables.indices[side];
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = 2 * words[w] + spread(index, 4 * w);
    return tables.levels[index];
#endif
}

// keys DTYPE [B, G, N, D], strides sb, sg, sn; valid bool [B, N], row stride vb, or null; centres
// bfloat16 [B, G, S, D], strides cb, cg, cs, or null; references float32 [B, G]; table int64
// [B, row]: addresses of blocks; flips uint32 [C, 4, 4]: sign bits of s; hartley float32
// [ORDER, ORDER]; tables float32: CELLS edges by the scale (+inf for none), 2 CELLS indices of
// levels, by cell and side; LEVELS levels. start: id of the first key; head, weights, logs,
// magnitudes, centre: of the layout; scale: 1 / the largest |u| that is told apart; root: 1 / √D.
extern "C" __global__ void __launch_bounds__(WARPS * 32, D <= 128 ? 2 : 1)
encode(const void* data, const u8* valid, const u16* centres, const float* references,
       const i64* table, const uint4* flips, const float* given_hartley, const float* given,
       i64 count, i64 start, i64 sb, i64 sg, i64 sn, i64 vb, i64 cb, i64 cg, i64 cs, i64 row,
       i64 head, i64 weights, i64 logs, i64 magnitudes, i64 centre, float scale, float root) {
    __shared__ __align__(16) u8 stages[WARPS][STAGE];
    __shared__ __align__(16) uint4 flip[C * 4];
    __shared__ float4 bases[C * 8];  // minus the centre after the matrix unit
    __shared__ float hartley[ODD > 1 ? ORDER * ORDER : 1];
    __shared__ float edges[CELLS], levels[LEVELS];
    __shared__ u8 indices[2 * CELLS];
    i64 g = blockIdx.y, batch = blockIdx.z, s = start / TOKENS + blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    char* block = reinterpret_cast<char*>(table[batch * row + s]) + g * head;
    const u16* mean = centres ? centres + batch * cb + g * cg + s * cs : nullptr;

    for (int i = threadIdx.x; i < C * 4; i += WARPS * 32) flip[i] = flips[i];
    if (ODD > 1)
        for (int i = threadIdx.x; i < ORDER * ORDER; i += WARPS * 32) hartley[i] = given_hartley[i];
    for (int i = threadIdx.x; i < CELLS; i += WARPS * 32) edges[i] = given[i];
    for (int i = threadIdx.x; i < 2 * CELLS; i += WARPS * 32) indices[i] = u8(given[CELLS + i]);
    for (int i = threadIdx.x; i < LEVELS; i += WARPS * 32) levels[i] = given[3 * CELLS + i];
    for (int i = threadIdx.x; i < D; i += WARPS * 32)
        reinterpret_cast<u16*>(block + centre)[i] = mean ? mean[i] : 0;
    if (warp == 0) {
        u32 b = factor(0x3f80);  // bfloat16, as the centre
#pragma unroll
        for (int c = 0; c < C; c++) {
            u32 pairs[4] = {};
            if (mean && c * 4 + t < M)
                for (int r = 0; r < 4; r++) {
                    const u16* from = mean + (c * 4 + t) * 8 + 2 * r;
                    pairs[r] = from[0] | u32(from[1]) << 16;
                }
            float sums[2][4] = {};
            multiply<false>(sums, pairs, b, flips[c * 4 + t]);
#pragma unroll
            for (int n = 0; n < 2; n++)  // from 0: no −0, whose sign would count
                if (lane < 4)
                    bases[c * 8 + n * 4 + t] = {0 - sums[n][0], 0 - sums[n][1], 0 - sums[n][2],
                                                0 - sums[n][3]};
        }
    }
    __syncthreads();

    u32 b = factor(DTYPE == 1 ? 0x3c00 : 0x3f80);
    Tables tables;
    tables.edges = edges, tables.levels = levels, tables.indices = indices;
    tables.edge = edges[lane % CELLS], tables.level = levels[indices[lane]];
    tables.planes = spread(indices[lane], 0);
    float reference = references[batch * gridDim.y + g], inverted = 1.0f / reference;
    u8* stage = stages[warp];
    i64 offset = s * TOKENS - start;  // of the block's first token among the keys
    int begin = int(max(-offset, i64(0))), end = int(min(count - offset, i64(TOKENS)));
    i64 base = batch * sb + g * sg;

    for (int tile = warp; tile < TOKENS / TILE; tile += WARPS) {
        int from = max(begin - tile * TILE, 0), to = min(end - tile * TILE, TILE);
        if (from >= to) continue;
        float weight[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int key = lane / 4 + 8 * k;
            i64 i = offset + tile * TILE + key, at = base + i * sn + t * 8;
            bool in = key >= from && key < to;
            if (valid && in) in = valid[batch * vb + i];
            Turned y;
#pragma unroll
            for (int c = 0; c < C; c++) {
                u32 parts[PARTS][4] = {};
                if (in && c * 4 + t < M) load(parts, data, at + c * 32);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float4 less = bases[c * 8 + n * 4 + t];
                    y[c][n][0] = less.x, y[c][n][1] = less.y;
                    y[c][n][2] = less.z, y[c][n][3] = less.w;
                }
#pragma unroll
                for (int p = PARTS - 1; p >= 0; p--)
                    multiply<DTYPE == 1>(y[c], parts[p], b, flip[c * 4 + t]);
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
            float per = inverse * scale, aligned = 0;
            u8* mine = stage + key * STRIDE + t;
            u8* planes = stage + TILE * STRIDE + key * (BITS * STRIDE) + t;
#pragma unroll
            for (int c = 0; c < C; c++) {
                u32 words[WORDS + 1] = {}, negative = 0;
#pragma unroll
                for (int j = 7; j >= 0; j--) {
                    float x = y[c][j / 4][j % 4], size = fabsf(x);
                    float level = coded(words, at_most_one(size * per), tables);
                    aligned = fmaf(size, level, aligned);
                    negative = __funnelshift_l(__float_as_uint(x), negative, 1);
                }
                bool pad = M % 4 && c * 4 + t >= M;
                mine[c * 4] = pad ? 0 : u8(~negative);
#pragma unroll
                for (int p = 0; p < BITS; p++)
                    planes[p * STRIDE + c * 4] = pad ? 0 : u8(words[p / 4] >> (p % 4 * 8));
            }
            aligned = quad_sum(aligned) * inverse;
            float norm = fminf(length * longer * root, 1152921504606846976.0f);  // LONGEST
            weight[k] = squares > 0 ? __fdividef(norm, aligned) : 0.0f;
        }
        // lanes 0 and 1 of a quad answer for its two keys
        float mine = t ? weight[1] : weight[0];
        int key = lane / 4 + 8 * t, code = 0;
        if (mine > 0) {  // ops.codes.log_codes; the exponent apart, for the logarithm's precision
            u32 ratio = __float_as_uint(fmaxf(mine * inverted, 6.103515625e-05f));
            double power = int(ratio >> 23) - 127;
            power += log2f(__uint_as_float((ratio & 0x7fffff) | 0x3f800000));
            code = mine < reference ? int(fmax(rint(power * STEPS + 65535.0), 1.0)) : 65535;
            code = min(code, 65535);
        }
        if (t < 2 && key >= from && key < to) {
            int id = tile * TILE + key, place = id / 32 * 32 + id % 8 * 4 + id % 32 / 8;
            reinterpret_cast<u8*>(block + weights)[place] = u8(code >> 8);  // layout.places
            reinterpret_cast<u16*>(block + logs)[id] = u16(code);
        }
        __syncwarp();
        char* signs = block + tile * (TILE * STRIDE);
        char* sizes = block + magnitudes + tile * (TILE * STRIDE * BITS);
        if (from == 0 && to == TILE) {
            const uint4* whole = reinterpret_cast<const uint4*>(stage);
            uint4* to_signs = reinterpret_cast<uint4*>(signs);
            uint4* to_sizes = reinterpret_cast<uint4*>(sizes);
            for (int i = lane; i < STRIDE; i += 32) to_signs[i] = whole[i];
            for (int i = lane; i < STRIDE * BITS; i += 32) to_sizes[i] = whole[STRIDE + i];
        } else {
            const u32* part = reinterpret_cast<const u32*>(stage);
            u32* to_signs = reinterpret_cast<u32*>(signs);
            u32* to_sizes = reinterpret_cast<u32*>(sizes);
            for (int i = from * C + lane; i < to * C; i += 32) to_signs[i] = part[i];
            for (int i = from * C * BITS + lane; i < to * C * BITS; i += 32)
                to_sizes[i] = part[TILE * C + i];
        }
        __syncwarp();
    }
}
