// Which of the rows that a caller chose lie in the cache of rows, as `agree` finds for its own.
//
// Grid: BG, 256 threads. Reads 8 bytes per row and a set of the cache; limited by latency.
// Compile-time: nothing.
#include "cache.cuh"

constexpr int THREADS = 256;

struct Given {
    const i64* ids;
    __device__ __forceinline__ int operator[](int i) const { return int(ids[i]); }
    __device__ __forceinline__ int place(int i) const { return i; }
};

// ids int64 [BG, k], below 0 for none; tags, stamps int32 [BG, cached]; clocks int32 [BG]; lookups
// int32 [BG, 2]; slots int32 [BG, k].
extern "C" __global__ void __launch_bounds__(THREADS)
given(const i64* ids, int* tags, int* stamps, int* clocks, int* lookups, int* slots, i64 cached, i64 k) {
    i64 bg = blockIdx.x;
    Given rows = {ids + bg * k};
    tags += bg * cached, stamps += bg * cached;
    Set own = {};
    if (threadIdx.x < k && rows[threadIdx.x] >= 0) own = set_at(rows[threadIdx.x], tags, stamps, cached);
    look_up<THREADS, true>(rows, int(k), own, tags, stamps, clocks + bg, lookups + 2 * bg, slots + bg * k, cached);
}
