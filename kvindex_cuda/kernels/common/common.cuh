// Functions that all kernels share: types, conversions, tensor core instructions, asynchronous copies,
// histograms, and synchronization between thread blocks and between kernels.
//
// These constants come from kvindex_cuda/runtime/constants.py: TOKENS (tokens of a block), BINS (bins of a
// histogram), APART (distance of two counters, in int32), LONGEST (largest norm) and OCTAVES (range of log
// weights, in powers of two). NVRTC compiles this file for a GPU; g++ compiles it with tests/cuda/emulator.h,
// which defines EMULATED, for tests on a CPU.
// This file is longer than most: kernels include one header, and functions that are not called cost nothing.
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

constexpr unsigned ALL = 0xffffffffu;
constexpr int LEAST = -2147483647 - 1;
#define NEVER __int_as_float(int(0xff800000u))  // -inf; NVRTC has no name for it

__device__ __forceinline__ float from_bfloat16(u16 bits) {
    return __uint_as_float(u32(bits) << 16);
}

// Convert float16 to float32. Subnormal float16 numbers are converted exactly even if the compiler flushes
// subnormal float32 numbers to zero, as NVRTC does when CuPy calls it.
__device__ __forceinline__ float from_float16(u16 bits) {
#ifdef EMULATED
    u32 sign = u32(bits & 0x8000) << 16, exponent = bits >> 10 & 31, size = u32(bits & 0x7fff) << 13;
    size = exponent == 31 ? size | 0x7f800000u
           : exponent     ? size + (112u << 23)
                          : __float_as_uint(float(bits & 0x3ff) * 5.9604644775390625e-08f);  // 2^-24
    return __uint_as_float(sign | size);
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#endif
}

// Convert two packed float16 numbers to float32. `.x` is the number in the lower 16 bits.
__device__ __forceinline__ float2 from_float16s(u32 pair) {
#ifdef EMULATED
    return {from_float16(u16(pair)), from_float16(u16(pair >> 16))};
#else
    float2 both;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
        : "=f"(both.x), "=f"(both.y) : "r"(pair));
    return both;
#endif
}

// Load element i of a tensor of type DTYPE.
__device__ __forceinline__ float element(const void* data, i64 i) {
#if DTYPE == 0
    return static_cast<const float*>(data)[i];
#elif DTYPE == 1
    return from_float16(static_cast<const u16*>(data)[i]);
#else
    return from_bfloat16(static_cast<const u16*>(data)[i]);
#endif
}

__device__ __forceinline__ u16 to_bfloat16(float x) {  // round to nearest, ties to even
    u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ u16 to_float16(float x) {  // round to nearest, ties to even
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

// Tensor core product of bits, mma.m16n8k128 with .and.popc: c[i][j] += number of 1 bits that row i of a and
// column j of b have in common. Fragments, with r = lane / 4 and t = lane % 4:
//   a0, a1: bits 32 t to 32 t + 31 of rows r and r + 8 of a.
//   b: bits 32 t to 32 t + 31 of column r of b.
//   c[0] to c[3]: elements (r, 2 t), (r, 2 t + 1), (r + 8, 2 t), (r + 8, 2 t + 1) of c.
__device__ __forceinline__ void mma_bits(int (&c)[4], unsigned a0, unsigned a1, unsigned b) {
#ifdef EMULATED
    emulator::mma_m16n8k128_b1(c, a0, a1, b);
#else
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
#endif
}

// Tensor core product of bytes, mma.m16n8k32: c += a b with unsigned a [16, 32] and signed b [32, 8].
// Fragments, with r = lane / 4 and t = lane % 4:
//   a0, a1: columns 4 t to 4 t + 3 of rows r and r + 8 of a.
//   a2, a3: columns 4 t + 16 to 4 t + 19 of rows r and r + 8 of a.
//   b0, b1: rows 4 t to 4 t + 3, and rows 4 t + 16 to 4 t + 19, of column r of b.
//   c[0] to c[3]: elements (r, 2 t), (r, 2 t + 1), (r + 8, 2 t), (r + 8, 2 t + 1) of c.
__device__ __forceinline__ void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                          u32 b1) {
#ifdef EMULATED
    emulator::mma_m16n8k32_u8s8(c, a0, a1, a2, a3, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Tensor core product of float16 or (BRAIN) bfloat16 numbers, mma.m16n8k16: c += a b with a [16, 16] and b [16,
// 8]. Fragments, with r = lane / 4 and t = lane % 4:
//   a0, a1: columns 2 t and 2 t + 1 of rows r and r + 8 of a.
//   a2, a3: columns 2 t + 8 and 2 t + 9 of rows r and r + 8 of a.
//   b0, b1: rows 2 t and 2 t + 1, and rows 2 t + 8 and 2 t + 9, of column r of b.
//   c[0] to c[3]: elements (r, 2 t), (r, 2 t + 1), (r + 8, 2 t), (r + 8, 2 t + 1) of c.
template <bool BRAIN = false>
__device__ __forceinline__ void mma_halves(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                           unsigned a3, unsigned b0, unsigned b1) {
#ifdef EMULATED
    auto decode = [](u16 bits) { return BRAIN ? from_bfloat16(bits) : from_float16(bits); };
    emulator::mma_m16n8k16(c, a0, a1, a2, a3, b0, b1, decode);
#else
    if (BRAIN)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Return a b + c, always with one multiply-add instruction. For a constant power of two, the compiler might
// choose a shift and an addition instead.
__device__ __forceinline__ int mad(int a, int b, int c) {
#ifdef EMULATED
    return a * b + c;
#else
    int sum;
    asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

// Convert a pointer to shared memory to a 32-bit address. The empty asm statement stops the compiler from
// repeating the conversion at every use.
#ifdef EMULATED
typedef u64 Shared;
#else
typedef u32 Shared;
#endif
__device__ __forceinline__ Shared shared_place(const void* address) {
#ifdef EMULATED
    return reinterpret_cast<u64>(address);
#else
    Shared place = u32(__cvta_generic_to_shared(address));
    asm volatile("" : "+r"(place));
    return place;
#endif
}
__device__ constexpr bool is_shared(Shared) { return true; }
__device__ constexpr bool is_shared(const char*) { return false; }

// Load 4 or 16 bytes from global memory (first overload) or shared memory (second overload).
template <class T>
__device__ __forceinline__ T load_from(const char* place) {
    return *reinterpret_cast<const T*>(place);
}
template <class T>
__device__ __forceinline__ T load_from(Shared place) {
#ifdef EMULATED
    return *reinterpret_cast<const T*>(place);
#else
    if constexpr (sizeof(T) == 16) {
        T words;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(place));
        return words;
    } else {
        static_assert(sizeof(T) == 4);
        u32 word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(place));
        return T(word);
    }
#endif
}

__device__ __forceinline__ u64 load_pair(Shared place) {
#ifdef EMULATED
    return *reinterpret_cast<const u64*>(place);
#else
    u64 pair;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(pair) : "r"(place));
    return pair;
#endif
}
__device__ __forceinline__ void store_pair(Shared place, u32 low, u32 high) {
#ifdef EMULATED
    *reinterpret_cast<u64*>(place) = u64(high) << 32 | low;
#else
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(place), "r"(low), "r"(high));
#endif
}

// Set some low bits of an address that are 0.
__device__ __forceinline__ const char* with_bits(const char* place, u32 bits) { return place + bits; }
__device__ __forceinline__ Shared with_bits(Shared place, u32 bits) { return place | bits; }

// Load four 8 x 8 matrices of 16-bit numbers from shared memory into tensor core fragments (ldmatrix .x4). Lane
// l passes the address of row l % 8 of matrix l / 8. From each of the four matrices, lane l receives columns 2
// t and 2 t + 1 of row l / 4, where t = l % 4.
__device__ __forceinline__ void load_rows(u32 (&words)[4], Shared place) {
#ifdef EMULATED
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        u64 from = __shfl_sync(ALL, place, i * 8 + lane / 4);
        words[i] = reinterpret_cast<const u32*>(from)[lane % 4];
    }
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place));
#endif
}

// Asynchronous bulk copies to shared memory (cp.async.bulk, from compute capability 9.0; on older GPUs the
// copies are synchronous). Call `expect` with the number of bytes, then `copy`, then `wait`, which returns when
// all these bytes have arrived. For the n-th wait on a barrier (n = 0, 1, …), pass the parity n % 2. Addresses
// and sizes are multiples of 16. Each warp uses barriers of its own.
#if defined(EMULATED) || __CUDA_ARCH__ >= 900
#define ASYNCHRONOUS 1
#else
#define ASYNCHRONOUS 0
#endif
__device__ __forceinline__ void begin_barrier(Shared barrier) {  // called by one lane
#ifdef EMULATED
    *reinterpret_cast<u64*>(barrier) = 0;
#elif ASYNCHRONOUS
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;"
                 :: "r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void expect(Shared barrier, u32 bytes) {  // called by one lane
#if !defined(EMULATED) && ASYNCHRONOUS
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes)
                 : "memory");
#endif
}
// Start an asynchronous bulk copy to shared memory. The hexadecimal constant selects the L2 policy evict_first
// (CUTLASS has the same constant). All lanes of a warp call this function.
__device__ __forceinline__ void copy(Shared to, const void* from, u32 bytes, Shared barrier) {
#ifdef EMULATED
    auto pointer = [](Shared place) { return reinterpret_cast<void*>(place); };
    if (threadIdx.x % 32 == 0) emulated_copy(pointer(to), from, bytes, pointer(barrier));
#elif ASYNCHRONOUS
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;"
                     :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(0x12F0000000000000ull)
                     : "memory");
#else
    for (u32 i = threadIdx.x % 32; i < bytes / 16; i += 32) {
        uint4 words = __ldcs(static_cast<const uint4*>(from) + i);
        store_pair(to + i * 16, words.x, words.y), store_pair(to + i * 16 + 8, words.z, words.w);
    }
#endif
}
__device__ __forceinline__ void wait(Shared barrier, u32 parity) {  // called by all lanes
#ifdef EMULATED
    emulated_wait(reinterpret_cast<u64*>(barrier), parity);
#elif ASYNCHRONOUS
    u32 done;
    do
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    while (!done);
#else
    __syncwarp();
#endif
}

// Copy SIZE bytes (4, 8 or 16) from global to shared memory, asynchronously (cp.async). Both addresses must be
// multiples of SIZE. If `in` is false, zeros are written instead. `async_wait` returns when all asynchronous
// copies of the calling thread have arrived.
template <int SIZE>
__device__ __forceinline__ void copy_async(Shared to, const void* from) {
#ifdef EMULATED
    emulated_copy_async(reinterpret_cast<void*>(to), from, SIZE, true);
#else
    if constexpr (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :: "r"(to), "l"(from), "n"(SIZE) : "memory");
#endif
}
template <int SIZE>
__device__ __forceinline__ void copy_async(Shared to, const void* from, bool in) {
#ifdef EMULATED
    emulated_copy_async(reinterpret_cast<void*>(to), from, SIZE, in);
#else
    static_assert(SIZE == 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
#endif
}
__device__ __forceinline__ void async_wait() {
#ifdef EMULATED
    emulated_async_wait();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Commit groups of cp.async copies, and wait for them. A group is the set of copies that this thread has
// started since its previous `async_commit`. `async_wait_but<COUNT>` waits for all groups except the last
// COUNT.
__device__ __forceinline__ void async_commit() {
#ifdef EMULATED
    emulated_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int COUNT>
__device__ __forceinline__ void async_wait_but() {
#ifdef EMULATED
    emulated_async_wait(COUNT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}

// Prefetch a line from memory into L2.
__device__ __forceinline__ void to_l2(const void* address) {
#ifndef EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Prefetch `bytes` bytes, a multiple of 16, into L2 (cp.async.bulk.prefetch). Before compute capability 9.0
// this does nothing.
__device__ __forceinline__ void to_l2(const void* address, u32 bytes) {
#if !defined(EMULATED) && ASYNCHRONOUS
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// Return the histogram bin of a vote (approximate score of a key): (vote - base) / 2^shift, clamped to 0 … BINS
// - 1.
__device__ __forceinline__ int bin_of(int vote, int base, int shift) {
    return vote < base ? 0 : int(min((u32(vote) - u32(base)) >> shift, u32(BINS - 1)));
}

// Pack the vote (approximate score) and the token id of a key into a 64-bit integer, an "entry". Entries are
// ordered by vote; of equal votes, the entry with the lower token id is larger.
__device__ __forceinline__ u64 entry_of(int vote, int id) {
    return u64(u32(vote) ^ 0x80000000u) << 32 | ~u32(id);
}
__device__ __forceinline__ int vote_of(u64 entry) {
    return int(u32(entry >> 32) ^ 0x80000000u);
}
__device__ __forceinline__ int id_of(u64 entry) { return int(~u32(entry)); }

// Map a float to an unsigned integer that has the same order, also for subnormal numbers. -0 and 0 are equal.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// The inverse of `ordered`.
__device__ __forceinline__ float from_ordered(u32 bits) {
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
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

// The kernels of a decode step overlap (programmatic dependent launch, from compute capability 9.0): a kernel
// starts before the previous kernel has ended, and waits for it in `after_previous`. Before that call, a kernel
// must not write to global memory, and must not read what the previous kernel writes.
// `let_next_begin` allows the next kernel to start. If every thread block calls it after `after_previous`, then
// all kernels before the previous one have ended when a kernel starts. Data that was written in the same step
// is read from L2 (`__ldcg`), because L1 may be stale.
__device__ __forceinline__ void after_previous() {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Count the thread blocks that have finished. Return true in the last of the `blocks` thread blocks, so that it
// can combine the results of all thread blocks. `ticket` is the counter in global memory, 0 before the first
// call. All threads of a thread block call this function. The last thread block sees what other thread blocks
// wrote before their calls, because thread 0 performs an atomic release and acquire between barriers.
static __device__ bool last_block(int* ticket, int blocks) {
    __shared__ int mine;
    __syncthreads();
    if (threadIdx.x == 0) {
#ifdef EMULATED
        mine = atomicAdd(ticket, 1);
#else
        asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(mine) : "l"(ticket) : "memory");
#endif
    }
    __syncthreads();
    bool last = mine == blocks - 1;
    __syncthreads();
    return last;
}

// With `signal` and `await`, a kernel can wait until the previous kernel has finished its work for one group of
// query heads, instead of waiting for the end of the whole kernel. The previous kernel calls `signal` when a
// thread block or warp has finished its work for a group. `await` returns after `signalers` calls of `signal`.
// All writes before `signal` are then visible.
//
// This cannot deadlock, because a kernel starts only when all thread blocks of the previous kernel are running.
// A kernel that uses `await` may call `let_next_begin` at its beginning: prepare_query.cu and earlier kernels
// have ended by then, because scan.cu waits for them. Each kernel still calls `after_previous` before it ends,
// so that the end of a kernel implies the end of all kernels before it.
//
// The counters are int32 [3, BG] APART, cleared by the first kernel of a step. For each group, the first
// counter counts finished warps of the scan, and the second counts finished thread blocks of the rerank. The
// third is 1 once the rows of the group are selected.
__device__ __forceinline__ void signal(int* counter) {  // called by one thread, after a barrier
#ifdef EMULATED
    atomicAdd(counter, 1);
#else
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
#endif
}
__device__ __forceinline__ void await(const int* counter, int signalers) {  // called by all threads of a block
    if (threadIdx.x == 0) {
#ifdef EMULATED
        while (*static_cast<const volatile int*>(counter) < signalers) __nanosleep(20);
#else
        int signaled;
        do
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(signaled) : "l"(counter) : "memory");
        while (signaled < signalers);
#endif
    }
    __syncthreads();
}

// Append to a list that all thread blocks share: reserve room for the `count` items of this thread, and return
// the position of the first one. `filled` is the length of the list. All BLOCK_THREADS threads of a block call
// this function.
template <int BLOCK_THREADS>
__device__ __forceinline__ int room_for(int count, int* filled) {
    __shared__ int sums[BLOCK_THREADS / 32 + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = count;
    for (int step = 1; step < 32; step *= 2) {
        int add = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += add;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    int total = 0, mine = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_THREADS / 32; i++) {
        if (i == warp) mine = total;
        total += sums[i];
    }
    if (threadIdx.x == 0) sums[BLOCK_THREADS / 32] = total ? atomicAdd(filled, total) : 0;
    __syncthreads();
    int start = sums[BLOCK_THREADS / 32];
    __syncthreads();
    return start + mine + before - count;
}

// The part of a histogram that one thread reads: BINS / BLOCK_THREADS neighboring bins. Thread 0 reads the
// highest bins. The histogram is aligned to 16 bytes. It is in shared memory if the template argument SHARED is
// true, else in global memory.
template <int BLOCK_THREADS>
struct Bins {
    static constexpr int EACH = BINS / BLOCK_THREADS;
    static_assert(EACH % 4 == 0, "16 bytes are read at once");
    int4 fours[EACH / 4];
    __device__ __forceinline__ int operator[](int i) const { return (&fours[i / 4].x)[i % 4]; }
};
template <bool SHARED, int BLOCK_THREADS>
__device__ __forceinline__ Bins<BLOCK_THREADS> bins_of(const int* histogram) {
    Bins<BLOCK_THREADS> bins;
    const int4* from = reinterpret_cast<const int4*>(histogram + BINS - bins.EACH * (threadIdx.x + 1));
#pragma unroll
    for (int i = 0; i < bins.EACH / 4; i++) bins.fours[i] = SHARED ? from[i] : __ldcg(from + i);
    return bins;
}

// The function `cut_of` finds the histogram bin that contains the `wanted`-th largest entry, and returns this
// struct. All threads of a block call it.
//   bin: number of that bin, or -1 if the histogram has fewer than `wanted` entries.
//   above: number of entries in higher bins, or of all entries if `bin` is -1.
struct Cut {
    int bin, above;
};
template <int BLOCK_THREADS>
__device__ __forceinline__ Cut cut_of(const Bins<BLOCK_THREADS>& bins, int wanted) {
    __shared__ int sums[32];
    __shared__ Cut found;
    constexpr int EACH = Bins<BLOCK_THREADS>::EACH;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = BINS - EACH * (threadIdx.x + 1);
    int mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) mine += bins[i];
    auto running = [&](int sum) {  // sum over the lanes up to this one
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int add = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += add;
        }
        return sum;
    };
    int before = running(mine);
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    int upto = running(lane < BLOCK_THREADS / 32 ? sums[lane] : 0), total = __shfl_sync(ALL, upto, 31);
    int earlier = __shfl_sync(ALL, upto, warp ? warp - 1 : 0);
    before += (warp ? earlier : 0) - mine;
    if (before < wanted && before + mine >= wanted)
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--) {
            if (before < wanted && before + bins[i] >= wanted) found = {first + i, before};
            before += bins[i];
        }
    __syncthreads();
    if (wanted <= 0 || total < wanted) return {-1, total};
    return found;
}
template <bool SHARED = false, int BLOCK_THREADS = 256>
__device__ Cut cut_of(const int* histogram, int wanted) {
    return cut_of(bins_of<SHARED, BLOCK_THREADS>(histogram), wanted);
}

// Return the `rank`-th largest of a set of 64-bit words, by a radix select with 8 passes of 8 bits. All threads
// of a block call this function, with 256 ints of shared memory in `bins`. The argument `each` is a function:
// each(use) calls use(word) for all words of this thread.
template <class Each>
__device__ u64 radix_cut(Each each, int rank, int* bins) {
    u64 prefix = 0;
    for (int digit = 56; digit >= 0; digit -= 8) {
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
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

// Return the histogram bin for an attention weight whose natural logarithm is `share`. Larger weights are in
// higher bins. Each unit of the logarithm has 48 bins above -32, and 4 bins below.
__device__ __forceinline__ int bin_of(float share) {
    float bin = share > -32 ? share * -48 : 1408 - share * 4;
    return BINS - 1 - int(fminf(fmaxf(bin, 0.0f), float(BINS - 1)));
}
