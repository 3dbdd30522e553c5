// Rank a few entries by comparing all of them with each other. Used by select_rows.cu and row_budget.cuh.
// Compile-time constants: THREADS (of a thread block).
#pragma once
#include "common/common.cuh"

// For each of `many` entries, call use(i, n), where i is the number of the entry and n is the number of better
// entries (its rank). Eight threads count for one entry, and one of them calls `use`. All threads of the block
// call this function.
template <class Use>
__device__ __forceinline__ void in_order(const u64* entries, int many, Use use) {
    for (int at = threadIdx.x; at < (many + 3) / 4 * 32; at += THREADS) {
        int i = at / 8, better = 0;
        u64 mine = entries[min(i, many - 1)];
#pragma unroll 1
        for (int j = at % 8; j < many; j += 8) better += entries[j] > mine;
#pragma unroll
        for (int by = 1; by < 8; by *= 2) better += __shfl_xor_sync(ALL, better, by);
        if (at % 8 == 0 && i < many) use(i, better);
    }
}
