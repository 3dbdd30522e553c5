// What the kernels share: types, conversions, the matrix instruction, orders, small reductions.
// Compiled by NVRTC for a GPU; by g++ with tests/cuda/emulator.h, which defines EMULATED.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

constexpr int TOKENS = 256;  // of a block of codes or rows, and of a segment (host_store.BLOCK)
constexpr int BINS = 2048;   // of a histogram of a list
constexpr unsigned ALL = 0xffffffffu;
constexpr int LEAST = -2147483647 - 1;
#define NEVER __int_as_float(int(0xff800000u))  // -inf, which NVRTC has no name for

#ifndef DTYPE
#define DTYPE 0  // of queries and rows: 0 float32, 1 float16, 2 bfloat16
#endif

__device__ __forceinline__ float from_bfloat16(u16 bits) {
    return __uint_as_float(u32(bits) << 16);
}

__device__ __forceinline__ float from_float16(u16 bits) {
    // exponent moved from bias 15 to 127 by a multiplication, which also makes subnormals right
    u32 sign = u32(bits & 0x8000) << 16;
    if ((bits & 0x7c00) == 0x7c00) return __uint_as_float(sign | 0x7f800000u | u32(bits & 0x3ff) << 13);
    float size = __uint_as_float(u32(bits & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112
    return __uint_as_float(sign | __float_as_uint(size));
}

// Element i of a tensor of DTYPE.
__device__ __forceinline__ float element(const void* data, i64 i) {
#if DTYPE == 0
    return static_cast<const float*>(data)[i];
#elif DTYPE == 1
    return from_float16(static_cast<const u16*>(data)[i]);
#else
    return from_bfloat16(static_cast<const u16*>(data)[i]);
#endif
}

__device__ __forceinline__ u16 to_bfloat16(float x) {  // nearest, ties to even
    u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ u16 to_float16(float x) {  // nearest, ties to even
    if (x != x) return 0x7e00;
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    float size = __uint_as_float(bits & 0x7fffffffu);
    if (size >= 65520.0f) return u16(sign | 0x7c00);
    if (size < 6.103515625e-05f) return u16(sign | u32(__float2int_rn(size * 16777216.0f)));
    u32 whole = __float_as_uint(size) - (112u << 23);
    return u16(sign | (whole + 0xfff + (whole >> 13 & 1)) >> 13);
}

__device__ __forceinline__ void store(void* data, i64 i, float x) {
#if DTYPE == 0
    static_cast<float*>(data)[i] = x;
#elif DTYPE == 1
    static_cast<u16*>(data)[i] = to_float16(x);
#else
    static_cast<u16*>(data)[i] = to_bfloat16(x);
#endif
}

// c += a b for bits, a of 16 x 128 and b of 128 x 8 (PTX, mma.m16n8k128 and.popc). Lane (row, t)
// holds bits 32 t to 32 t + 31 of rows `row` and `row + 8` of a, and of column `row` of b; of c
// columns 2 t and 2 t + 1 of both rows.
__device__ __forceinline__ void mma_bits(int (&c)[4], unsigned a0, unsigned a1, unsigned b) {
#ifdef EMULATED
    int lane = threadIdx.x % 32;
    for (int t = 0; t < 4; t++) {
        unsigned upper = __shfl_sync(ALL, a0, lane / 4 * 4 + t);
        unsigned lower = __shfl_sync(ALL, a1, lane / 4 * 4 + t);
        for (int side = 0; side < 2; side++) {
            unsigned column = __shfl_sync(ALL, b, (lane % 4 * 2 + side) * 4 + t);
            c[side] += __popc(upper & column);
            c[2 + side] += __popc(lower & column);
        }
    }
#else
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
#endif
}

// c += a b for float16, a of 16 x 16 and b of 16 x 8 (PTX, mma.m16n8k16). Lane (row, t) holds of a
// columns 2 t, 2 t + 1 (a0, a1) and 8 further (a2, a3) of rows `row` (a0, a2) and `row + 8`; of b
// rows 2 t, 2 t + 1 and 8 further of column `row`; of c columns 2 t, 2 t + 1 of both rows.
__device__ __forceinline__ void mma_halves(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                           unsigned a3, unsigned b0, unsigned b1) {
#ifdef EMULATED
    int lane = threadIdx.x % 32;
    for (int t = 0; t < 4; t++)
        for (int part = 0; part < 2; part++) {
            unsigned upper = __shfl_sync(ALL, part ? a2 : a0, lane / 4 * 4 + t);
            unsigned lower = __shfl_sync(ALL, part ? a3 : a1, lane / 4 * 4 + t);
            for (int side = 0; side < 2; side++) {
                unsigned column = __shfl_sync(ALL, part ? b1 : b0, (lane % 4 * 2 + side) * 4 + t);
                for (int i = 0; i < 32; i += 16) {
                    float y = from_float16(u16(column >> i));
                    c[side] += from_float16(u16(upper >> i)) * y;
                    c[2 + side] += from_float16(u16(lower >> i)) * y;
                }
            }
        }
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// A vote and an id as one word: the larger the better, equal votes by the lower id.
__device__ __forceinline__ u64 entry_of(int vote, int id) {
    return u64(u32(vote) ^ 0x80000000u) << 32 | ~u32(id);
}
__device__ __forceinline__ int vote_of(u64 entry) {
    return int(u32(entry >> 32) ^ 0x80000000u);
}
__device__ __forceinline__ int id_of(u64 entry) { return int(~u32(entry)); }

// Unsigned integers that order as floats do; -0 as 0.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}
template <class T>
__device__ __forceinline__ T warp_max(T x) {
    for (int step = 16; step; step /= 2) {
        T other = __shfl_xor_sync(ALL, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// Whether this block is the last of `blocks` to come here with this ticket; what the others wrote
// before is then visible. All threads call it.
static __device__ bool last_block(int* ticket, int blocks) {
    __shared__ int mine;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) mine = atomicAdd(ticket, 1);
    __syncthreads();
    bool last = mine == blocks - 1;
    __threadfence();
    __syncthreads();
    return last;
}

// Where a histogram's count from the top reaches `wanted`: the bin, and how many are in the bins
// above it. -1 and the total where it never does. All threads of a block call it.
struct Cut {
    int bin, above;
};
static __device__ Cut cut_of(const int* histogram, int wanted) {
    __shared__ int sums[1024];
    __shared__ Cut found;
    int threads = blockDim.x, each = BINS / threads, first = BINS - each * (threadIdx.x + 1);
    int mine = 0;
    for (int i = 0; i < each; i++) mine += __ldcg(histogram + first + i);
    sums[threadIdx.x] = mine;
    if (threadIdx.x == 0) found = {-1, 0};
    __syncthreads();
    for (int step = 1; step < threads; step *= 2) {  // inclusive, thread 0 has the best bins
        int add = int(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += add;
        __syncthreads();
    }
    int total = sums[threads - 1], before = sums[threadIdx.x] - mine;
    if (before < wanted && before + mine >= wanted) {
        for (int i = each - 1; i >= 0; i--) {
            int here = __ldcg(histogram + first + i);
            if (before + here >= wanted) {
                found = {first + i, before};
                break;
            }
            before += here;
        }
    }
    __syncthreads();
    Cut result = found;
    if (result.bin < 0) result.above = total;
    __syncthreads();
    return result;
}

// The word of the `rank`-th largest of the entries that `each` gives to a function, found 8 bits at
// a time: one block, 256 threads, 8 passes. bins: 256 ints of shared memory.
template <class Each>
__device__ u64 radix_cut(Each each, int rank, int* bins) {
    u64 prefix = 0;
    for (int digit = 56; digit >= 0; digit -= 8) {
        bins[threadIdx.x] = 0;
        __syncthreads();
        each([&](u64 entry) {
            if (digit == 56 || entry >> (digit + 8) == prefix >> (digit + 8))
                atomicAdd(bins + (entry >> digit & 255), 1);
        });
        __syncthreads();
        int bin = 255;
        for (; bin > 0 && bins[bin] < rank; bin--) rank -= bins[bin];
        prefix |= u64(bin) << digit;
        __syncthreads();
    }
    return prefix;
}

// A bin for a logarithm of a share, the larger the better: fine near 0, coarse far below.
__device__ __forceinline__ int bin_of(float share) {
    float x = fmaxf(-share, 0.0f);
    float bin = x < 8    ? x * 64
                : x < 32 ? 512 + (x - 8) * 32
                : x < 160 ? 1280 + (x - 32) * 4
                          : 1792 + (x - 160) * 0.125f;
    return BINS - 1 - int(fminf(bin, float(BINS - 1)));
}
