// Rotate keys and convert them to codes, with four lanes per key (ParisKV paper, A.1 to A.3). Used by
// encode.cu.
//
// Let k be a key, and μ the center of its block. Three quantities are computed from them:
//   y = √D R (k − μ), the rotated key;
//   u = y / ‖y‖, its direction, which is stored as signs and levels. Let v be the numbers that decoding returns;
//   ‖k − μ‖ / ⟨v, u⟩, the weight of the key.
// The rotation is R = (Q ⊗ H) diag(s) / √D with a Hadamard matrix H of order POWER, a Hartley matrix Q of order
// ODD (D = POWER · ODD), and random signs s.
//
// Tensor cores compute four butterfly stages of H for 8 keys at a time, on the keys as they are stored.
// Products are exact, because the entries of H are ±1, and a float32 number is the sum of three bfloat16
// numbers. The sums start at minus the rotated center, which subtracts it. The remaining stages of H, and Q,
// are computed in registers. Each lane has whole groups of 8 coordinates of its key.
//
// To find the magnitude level of |u|, its range is divided into equal cells with at most one boundary between
// two levels each. The cell and the side of the boundary give the level. With up to 3 bits, these tables are in
// the registers of a warp and are read with shuffles.
// At the end, lanes exchange bytes so that each lane writes 16 bytes at once.
// Compile-time constants: D, BITS (of a magnitude), DTYPE (of the keys).
#pragma once
#include "common/common.cuh"

constexpr int POWER = D & -D, ODD = D / POWER;        // orders of H and of Q
constexpr int M = D / 8, C = (M + 3) / 4;             // bytes of a plane of bits, one per 8 coordinates; those of a
                                                      // lane
constexpr int STRIDE = 4 * C;                         // bytes of a plane in a block of codes
constexpr int UNITS = POWER >= 32 ? POWER / 32 : 1;   // a lane's groups of 8 coordinates that belong to the same matrix
                                                      // row of Q
constexpr int LANES = POWER >= 32 ? 1 : 32 / POWER;   // lanes, out of four, that share a column of Q
constexpr int TERMS = POWER >= 32 ? ODD : C;          // matrix rows of Q in a lane
constexpr int ORDER = TERMS * LANES;                  // order of Q with zeros added to fill the lanes
constexpr int PARTS = DTYPE == 0 ? 3 : 1;             // 16-bit numbers that represent a coordinate
constexpr int BYTES = DTYPE == 0 ? 4 : 2;             // bytes of a coordinate
constexpr int BYTE_WORDS = DTYPE == 0 ? 8 : 4;              // words of 8 coordinates
constexpr int LEVELS = 1 << BITS;
constexpr int WORDS = (BITS + 4) / 4;                 // words for a byte of signs and a byte of each plane
constexpr int CELLS = BITS <= 3 ? 16 : 4 << BITS;     // cells, so narrow that each contains at most one edge

// A lane's coordinates of a rotated key. Element [c][n][i] is coordinate 4 n + i of the lane's c-th group of 8.
typedef float Rotated[C][2][4];

// Matrix product of bfloat16 numbers on the tensor cores (mma.m16n8k16): c += a b. A lane passes the same fragments
// of a, b and c as to the function `mma_halves`, which explains them.
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

// Split eight coordinates into 16-bit numbers, two per word. A float32 coordinate becomes three bfloat16
// numbers that add up to it exactly, the most significant one in pairs[0].
__device__ __forceinline__ void split(u32 (&pairs)[PARTS][4], const u32 (&words)[BYTE_WORDS]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (DTYPE) {
            pairs[0][r] = words[r];
            continue;
        }
        float x = __uint_as_float(words[BYTE_WORDS / 4 * r]);
        float y = __uint_as_float(words[BYTE_WORDS / 4 * r + 1]);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            u32 low = __float_as_uint(x) & 0xffff0000u, high = __float_as_uint(y) & 0xffff0000u;
            pairs[part][r] = high | low >> 16;
            x -= __uint_as_float(low), y -= __uint_as_float(high);
        }
    }
}

// Return this lane's fragment of a matrix with the entries 1, −1 and 0. The matrix is the right operand of a tensor
// core product. One such product computes several butterfly stages of the Hadamard transform H.
//   unit: the number 1 in the 16-bit floating point format of the product.
__device__ __forceinline__ u32 factor(u32 unit) {
    int t = threadIdx.x % 4, column = threadIdx.x % 32 / 4, to = column / 2;
    int both = POWER >= 32 ? 3 : POWER == 16 ? 1 : 0;  // bits of the lane number that H mixes
    u32 one = (t & ~both) != (to & ~both) ? 0 : __popc(t & to & both) & 1 ? unit ^ 0x8000 : unit;
    return one | (column % 2 && one ? one ^ 0x8000 : one) << 16;
}

// Return this lane's fragments of two matrices. The tensor cores multiply keys by these matrices to compute
// butterfly stages of the Hadamard transform. Fields x and y of the result belong to the first matrix, z and w to
// the second. Fields x, y and z have the same value, but a separate shuffle computes each of them, so that the
// compiler does not know that they are equal. If it knew, it would copy registers before every product.
__device__ __forceinline__ uint4 factors(u32 unit) {
    u32 b = factor(unit);
    u32 y = __shfl_sync(ALL, b, threadIdx.x % 32), z = __shfl_xor_sync(ALL, b, 0);
    return {b, y, z, __shfl_up_sync(ALL, b, 0) ^ 0x80008000u};
}

// Multiply eight 16-bit coordinates of a key, `a`, by the two matrices in `b` (the right operands of two tensor
// core products), and add the products to `sums`. The signs of the coordinates are first flipped where `flip`
// has a 1.
template <bool HALVES>
__device__ __forceinline__ void multiply(float (&sums)[2][4], const u32 (&a)[4], const uint4& b,
                                         const uint4& flip) {
    u32 a0 = a[0] ^ flip.x, a1 = a[1] ^ flip.y, a2 = a[2] ^ flip.z, a3 = a[3] ^ flip.w;
    if (HALVES) {
        mma_halves(sums[0], a0, a1, a2, a3, b.x, b.y);
        mma_halves(sums[1], a0, a1, a2, a3, b.z, b.w);
    } else {
        mma_bfloats(sums[0], a0, a1, a2, a3, b.x, b.y);
        mma_bfloats(sums[1], a0, a1, a2, a3, b.z, b.w);
    }
}

// Compute the rest of the rotation in registers: first the butterfly stages of the Hadamard matrix that the
// tensor cores have not computed, then the product with the Hartley matrix Q.
__device__ __forceinline__ void finish(Rotated& y, const float* hartley) {
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
            if (ODD > 7) __syncwarp();  // the barrier keeps Q in shared memory, because no registers are left for it
            float entry[TERMS];
#pragma unroll
            for (int row = 0; row < ORDER; row++) {
                float sum = 0;
#pragma unroll
                for (int o = 0; o < TERMS; o++)
                    sum = fmaf(hartley[row * ORDER + o * LANES + own],
                               y[o * UNITS + unit][i / 4][i % 4], sum);
                if (LANES == 4) sum += __shfl_xor_sync(ALL, sum, 1);
                if (LANES >= 2) sum += __shfl_xor_sync(ALL, sum, 2);
                if (row % LANES == own) entry[row / LANES] = sum;
            }
#pragma unroll
            for (int o = 0; o < TERMS; o++) y[o * UNITS + unit][i / 4][i % 4] = entry[o];
        }
}

// Spread the lowest four bits of a number: bit p moves to bit WIDTH · p.
template <int WIDTH>
__device__ __forceinline__ u32 spread(u32 index) {
    constexpr u32 STEP = (1u << WIDTH) / 2, ONES = WIDTH == 8 ? 0x01010101u : 0x1111u;
    return (index & 15) * (1 + STEP + STEP * STEP + STEP * STEP * STEP) & ONES;
}

__device__ __forceinline__ float upper_half(u32 word) {
#ifdef EMULATED
    return from_float16(u16(word >> 16));
#else
    float x;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, high;\n\t}"
        : "=f"(x) : "r"(word));
    return x;
#endif
}

struct Tables {
    const float *edges, *levels;  // in shared memory, as are the levels' indices
    const u8* indices;
    float edge;  // edge of this lane's cell
    u32 one, two;  // for this lane's side of a cell: level in the upper half, index in digits; then the same with the
                   // index doubled
};

// Look up x, a coordinate's absolute value scaled to [0, 1], in the tables of magnitude levels. They divide [0,
// 1] into cells, each with at most one boundary (`edge`) between two levels. Return 2 · cell + (x > edge).
__device__ __forceinline__ u32 side_of(float x, const Tables& tables) {
    // cell = round(x · (CELLS - 1)). The fmaf adds 1.5 · 2^23, which rounds the product to an integer. This integer
    // is then in the lowest bits of the float.
    u32 cell = __float_as_uint(fmaf(x, CELLS - 1, 12582912.0f));
    float edge = BITS <= 3 ? __shfl_sync(ALL, tables.edge, int(cell))
                           : tables.edges[cell & (CELLS - 1)];
    return __funnelshift_l(__float_as_uint(edge - x), cell, 1);  // 2 cell + (x > edge)
}

// Encode eight coordinates y of a rotated key as 1 + BITS bytes, packed into `words`. The first byte has the
// signs. Each other byte is one bit plane of the magnitudes: bit j of plane p is bit p of the magnitude of
// coordinate j. A magnitude is the number of a level. Add Σ |y_j| · level_j to `aligned`.
__device__ __forceinline__ void coded(u32 (&words)[WORDS], float& aligned, const float (&y)[2][4],
                                      float per, const Tables& tables) {
    u32 digits[2] = {};  // digits of four coordinates each: signs, planes; higher bits are shifted out
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = 0;
#pragma unroll
    for (int j = 7; j >= 0; j -= 2) {
        u32 pair = 0;
#pragma unroll
        for (int i = j; i > j - 2; i--) {
            float x = y[i / 4][i % 4], size = fabsf(x), level;
            u32 sign = __float_as_uint(x);
            if (BITS == 0) {
                level = tables.levels[0];
            } else if (BITS <= 3) {
                int side = int(side_of(at_most_one(size * per), tables));
                u32 entry = __shfl_sync(ALL, i % 2 ? tables.two : tables.one, side);
                level = upper_half(entry), pair += entry;
            } else {
                u32 side = side_of(at_most_one(size * per), tables) & (2 * CELLS - 1);
                u32 index = tables.indices[side];
                level = tables.levels[index];
                index = __funnelshift_l(sign, index, 1);
#pragma unroll
                for (int w = 0; w < WORDS; w++)
                    words[w] = 2 * words[w] + spread<8>(index >> 4 * w);
            }
            if (BITS <= 3) digits[j / 4] = __funnelshift_l(sign, digits[j / 4], 1);
            aligned = fmaf(size, level, aligned);
        }
        digits[j / 4] += pair;
    }
    if (BITS <= 3) {
        u32 even = (digits[0] & 0x0f0f0f0fu) | (digits[1] << 4 & 0xf0f0f0f0u);  // signs and plane 1
        u32 odd = (digits[0] >> 4 & 0x0f0f0f0fu) | (digits[1] & 0xf0f0f0f0u);   // planes 0 and 2
        words[0] = __byte_perm(even, odd, 0x5140);
    }
    words[0] ^= 0xff;
}

// Selectors of the byte permutations (`__byte_perm`) in the function `transpose`. Four lanes process a key; t is
// the number of the lane.
struct Exchange {
    u32 two, one, order;
};
__device__ __forceinline__ Exchange exchange_of(int t) {
    u32 order = t == 0 ? 0x6240 : t == 1 ? 0x2604 : t == 2 ? 0x4062 : 0x0426;
    return {t & 2 ? 0x7632u : 0x5410u, t & 1 ? 0x7531u : 0x6420u, order};
}

// Transpose two matrices of 4 x 4 bytes among four neighboring lanes, which hold one matrix in their words `a`
// and the other in their words `b`: byte i of lane r moves to byte r of lane i.
__device__ __forceinline__ void transpose(u32& a, u32& b, const Exchange& by) {
    u32 same = __byte_perm(a, b, by.two), other = __byte_perm(a, b, by.two ^ 0x2222);
    other = __shfl_xor_sync(ALL, other, 2);
    u32 mine = __byte_perm(same, other, by.one), others = __byte_perm(same, other, by.one ^ 0x1111);
    others = __shfl_xor_sync(ALL, others, 1);
    a = __byte_perm(mine, others, by.order), b = __byte_perm(mine, others, by.order + 0x1111);
}

__device__ __forceinline__ void store_row(char* to, const u32 (&row)[C]) {
    if (C % 4 == 0)
#pragma unroll
        for (int c = 0; c < C / 4 * 4; c += 4)
            reinterpret_cast<uint4*>(to)[c / 4] = {row[c], row[c + 1], row[c + 2], row[c + 3]};
    else
#pragma unroll
        for (int c = 0; c < C; c++) reinterpret_cast<u32*>(to)[c] = row[c];
}
