// Lookup and replacement of rows in a cache in device memory. The cache contains rows that are stored on the
// host (kvindex_cuda/memory/row_cache.py). Each team of lanes that needs a row looks it up, or chooses a slot
// for a row that is not in the cache. Teams do not wait for each other.
//
// The cache is set-associative, with WAYS slots per set. Every slot has a time stamp: twice the number of the
// step that used it last, plus one if that step gave the slot to another row. `now` is twice the number of
// the current step. A team that finds its row's tag writes `now` to the stamp, and looks at the previous
// stamp. A team that does not find the tag takes the slot with the oldest stamp before `now`, with a
// compare-and-swap to `now` + 1. It then writes its tag and, once the row has arrived, the row. So in each
// step, a slot's stamp changes once from an older value:
//  - to `now`, by a team that uses the row in the slot. Then no compare-and-swap that expects an older stamp
//    succeeds any more, so nobody overwrites the row that this team reads, even if it started to read before
//    it knew.
//  - to `now` + 1, by a team with another row. Then a team that wanted the old row finds `now` + 1 as the
//    previous stamp, discards what it has read, and fetches the row from the host without caching it.
// Therefore tags may be read at any time of the step: the stamp decides whether they were still right.
//
// Several teams may need the same row: parts of a group's heads, or sequences that share a cache and a
// prefix. If the row is in a slot, all find it, and the slot stays valid, because none of them undoes `now` +
// 1. If the row is being inserted, the other teams find no tag, or no row yet, and fetch it themselves. Of
// several parts, only the first takes slots, so that a row is in one slot at most: only one team inserts it,
// and only if its tag was not there. Sequences may each take a slot, and then store the same row twice.
#pragma once
#include "common/common.cuh"

__device__ __forceinline__ int set_of(int id, i64 cached) {  // number of the set's first slot
    return int(u32(id) * 2654435761u >> 12 & u32(cached / WAYS - 1)) * WAYS;
}
// Prefetch a set's tags and stamps.
__device__ __forceinline__ void expect_look_up(int id, const int* tags, const int* stamps, i64 cached) {
    to_l2(tags + set_of(id, cached));
    to_l2(stamps + set_of(id, cached));
}

// The functions below have these arguments, for one KV head with a cache of `cached` rows:
//   id: number of the row that is looked up, below 2^31.
//   tags, stamps: int32 [cached], aligned to 16 bytes.

// The tag of way lane % WAYS in the row's set.
__device__ __forceinline__ int tag_of(int id, const int* tags, i64 cached) {
    return __ldcg(tags + set_of(id, cached) + threadIdx.x % WAYS);
}
// Return the slot whose tag is `id`, or −1. Each team of LANES lanes looks up one row. `tag` is the result of
// `tag_of` in each lane. Only the tags of a team's first WAYS lanes count, because other lanes may have read
// a tag before or after another row took the slot. All lanes of the warp call this function.
template <int LANES>
__device__ __forceinline__ int slot_of(int id, int tag, i64 cached) {
    u32 same = __ballot_sync(ALL, tag == id) >> threadIdx.x % 32 / LANES * LANES & ((1u << WAYS) - 1);
    return same ? set_of(id, cached) + __ffs(same) - 1 : -1;
}
// Return the time stamp of a step: twice its number, modulo 2^31. After 2^30 steps, stamps start again at 0,
// and slots with larger stamps keep their rows.
__device__ __forceinline__ int now_of(int step) { return 2 * (step & (1 << 30) - 1); }
// Mark the slot that contains a row as used in this step, and return the slot's previous stamp. SHARED is
// true if several warps may need the same row.
template <bool SHARED>
__device__ __forceinline__ int use_slot(int* stamp, int now) {
    return SHARED ? atomicMax(stamp, now) : atomicExch(stamp, now);
}
// Return true if this step has already given the slot to another row. `before` is the slot's previous stamp.
__device__ __forceinline__ bool is_taken(int before, int now) { return before == now + 1; }
// Choose a slot for a row whose set does not contain it, and write the row's tag. Return −1 if this step uses
// all slots of the set. One lane calls this function.
__device__ __forceinline__ int take_slot(int id, int now, int* tags, int* stamps, i64 cached) {
    int first = set_of(id, cached);
    for (int attempt = 0; attempt < WAYS; attempt++) {  // retried, because another team may take the slot first
        int4 four = __ldcg(reinterpret_cast<const int4*>(stamps + first));
        int way = 0, oldest = now;
#pragma unroll
        for (int w = 0; w < WAYS; w++) {
            int stamp = w == 0 ? four.x : w == 1 ? four.y : w == 2 ? four.z : four.w;
            if (now - stamp > now - oldest) way = w, oldest = stamp;
        }
        if (oldest == now) break;
        if (atomicCAS(stamps + first + way, oldest, now + 1) != oldest) continue;
        tags[first + way] = id;
        return first + way;
    }
    return -1;
}
