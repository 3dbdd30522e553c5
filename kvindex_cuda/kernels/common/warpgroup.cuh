// Multiply matrices of bytes with a warpgroup (wgmma): four warps multiply the sign bits of 64 keys, in
// registers, by rounded queries in shared memory.
//
// Needs compute capability 9.0 and code compiled for sm_90a. Each warp has 16 rows of the left-hand matrix,
// with the fragments of `mma_bytes`. The right-hand matrix is K-major without swizzle: 16 bytes of a column are
// contiguous, and the next column follows; the next 16 bytes of all columns are `PIECE` bytes later.
#pragma once
#include "common/byte_votes.cuh"

constexpr int CHUNK = COLUMNS_OF % 64 == 0 ? 64 : COLUMNS_OF % 32 == 0 ? 32 : 16;  // columns of one product

// Call `warpgroup_begin` before a group of `multiply_bytes` calls (it orders register accesses), and
// `warpgroup_commit` after the group.
__device__ __forceinline__ void warpgroup_begin() {
#ifndef EMULATED
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void warpgroup_commit() {
#ifndef EMULATED
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Wait until at most COUNT of the most recently committed groups of products (wgmma commit groups) are
// unfinished. The sums of all earlier groups may then be read.
template <int COUNT>
__device__ __forceinline__ void warpgroup_wait(int (&sums)[CHUNK / 8][1][4]) {
#ifndef EMULATED
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) asm volatile("" : "+r"(sums[i / 4][0][i % 4])::"memory");
#endif
}

// Make this thread's writes to shared memory visible to wgmma instructions after the next barrier.
__device__ __forceinline__ void show_to_warpgroup() {
#ifndef EMULATED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Multiply sign bits by rounded queries: sums = a b if `first`, else sums += a b. `a` is this warp's fragment
// of the left-hand matrix. `b` is the shared-memory address of the first of CHUNK columns of the right-hand
// matrix. All four warps of a warpgroup call this function.
__device__ __forceinline__ void multiply_bytes(int (&sums)[CHUNK / 8][1][4], const u32 (&a)[4], Shared b, bool first) {
#ifdef EMULATED
    int lane = threadIdx.x % 32;
    for (int n = 0; n < CHUNK / 8; n++) {
        Shared at = b + (n * 8 + lane / 4) * 16 + lane % 4 * 4;
        for (int i = 0; i < 4; i++) sums[n][0][i] = first ? 0 : sums[n][0][i];
        mma_bytes(sums[n][0], a[0], a[1], a[2], a[3], load_from<u32>(at), load_from<u32>(at + PIECE));
    }
#else
    // The matrix descriptor of wgmma consists of three numbers, in units of 16 bytes: the address of the first
    // column, the distance to the next 16 bytes of a column, and the distance to the next 8 columns.
    u64 right = u64(b >> 4 & 0x3fff) | u64(PIECE >> 4) << 16 | u64(128 >> 4) << 32;
#define FOUR(n) "+r"(sums[n][0][0]), "+r"(sums[n][0][1]), "+r"(sums[n][0][2]), "+r"(sums[n][0][3])
#define FACTORS_GIVEN "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(int(!first))
    if constexpr (CHUNK == 16)
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %13, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7}, "
                     "{%8,%9,%10,%11}, %12, p;\n\t}"
                     : FOUR(0), FOUR(1) : FACTORS_GIVEN);
    else if constexpr (CHUNK == 32)
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %21, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
                     "%14,%15}, {%16,%17,%18,%19}, %20, p;\n\t}"
                     : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : FACTORS_GIVEN);
    else
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
                     "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p;\n\t}"
                     : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7) : FACTORS_GIVEN);
#undef FOUR
#undef FACTORS_GIVEN
#endif
}
