// The cache of rows (kvindex_cuda/row_cache.py): which of a step's rows lie in it, and places for
// the others.
#pragma once
#include "common.cuh"

constexpr int WAYS = 4;  // slots of a set

__device__ __forceinline__ int set_of(int id, i64 cached) {  // the first slot of its set
    return int(u32(id) * 2654435761u >> 12 & u32(cached / WAYS - 1)) * WAYS;
}
// That a set's tags and stamps will soon be read.
__device__ __forceinline__ void expect_look_up(int id, const int* tags, const int* stamps, i64 cached) {
    to_l2(tags + set_of(id, cached));
    to_l2(stamps + set_of(id, cached));
}

// What a set holds.
struct Set {
    int4 tags, stamps;
};
__device__ __forceinline__ Set set_at(int id, const int* tags, const int* stamps, i64 cached) {
    int first = set_of(id, cached);
    return {__ldcg(reinterpret_cast<const int4*>(tags + first)),
            __ldcg(reinterpret_cast<const int4*>(stamps + first))};
}

// Of one KV head, with `cached` rows of cache: ids [rows], below 2^31, each once; tags, stamps int32
// [cached], aligned to 16 bytes; clock int32; lookups int32 [2], asked and found; slots int32 [rows],
// at the row's place: 2 slot + 1 where it lies, 2 slot where it is to lie, −1 for nowhere. own: the
// set of a thread's first row, asked for before. SOME: ids below 0 are no rows, and get −1. All
// THREADS of a block call it.
template <int THREADS, bool SOME = false, class Ids>
__device__ __forceinline__ void look_up(Ids ids, int rows, const Set& own, int* tags, int* stamps,
                                        int* clock, int* lookups, int* slots, i64 cached) {
    int now = *clock + 1, hits = 0, none = 0, own_slot = -1;
    int own_stamps[WAYS] = {own.stamps.x, own.stamps.y, own.stamps.z, own.stamps.w};
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        int id = int(ids[i]), set = set_of(id, cached), slot = -1;
        if (SOME && id < 0) {
            slots[ids.place(i)] = -1;
            none++;
            continue;
        }
        int4 four = i == int(threadIdx.x) ? own.tags : __ldcg(reinterpret_cast<const int4*>(tags + set));
        slot = four.x == id   ? set
               : four.y == id ? set + 1
               : four.z == id ? set + 2
               : four.w == id ? set + 3
                              : -1;
        if (slot >= 0) stamps[slot] = now;
        hits += slot >= 0;
        slot = slot >= 0 ? 2 * slot + 1 : -1;
        slots[ids.place(i)] = slot;
        if (i == int(threadIdx.x)) own_slot = slot;
    }
    if (hits) atomicAdd(lookups + 1, hits);
    if (none) atomicAdd(lookups, -none);
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        bool is_own = i == int(threadIdx.x);
        int id = int(ids[i]), set = set_of(id, cached), place = ids.place(i);
        if ((is_own ? own_slot : slots[place]) >= 0 || (SOME && id < 0)) continue;
        for (int attempt = 0; attempt < WAYS; attempt++) {  // others may be quicker
            int way = 0, oldest = now;
#pragma unroll
            for (int w = 0; w < WAYS; w++) {
                int stamp = is_own && attempt == 0 ? own_stamps[w] : __ldcg(stamps + set + w);
                if (now - stamp > now - oldest) way = w, oldest = stamp;
            }
            if (oldest == now) break;  // all serve this step
            if (atomicCAS(stamps + set + way, oldest, now) != oldest) continue;
            tags[set + way] = id;
            slots[place] = 2 * (set + way);
            break;
        }
    }
    if (threadIdx.x == 0) {
        *clock = now;
        atomicAdd(lookups, rows);
    }
}
