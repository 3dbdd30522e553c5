// A cache in device memory for rows (key and value of a token) that are stored on the host: lookup and
// replacement (kvindex_cuda/memory/row_cache.py). A team of lanes that needs a row looks it up; if it is not in
// the cache, the team chooses a slot for it. Teams do not wait for each other.
//
// The cache is set-associative, with WAYS slots per set. A slot has a tag, the id of its row, and a time stamp.
// In decode step number n, `now` is 2 n.
//   - Hit: a team that finds the tag of its row sets the stamp of the slot to `now`, and checks the old stamp.
//   - Miss: a team sets the oldest stamp of the set to `now` + 1 with a compare-and-swap, writes the tag and,
//     once the row has arrived from the host, the row.
//
// In each step, the stamp of a slot changes only once from an older value. After a hit, no compare-and-swap can
// succeed any more, so nobody overwrites the row in this step. If a slot was replaced first, a hit finds the
// old stamp `now` + 1; the team then discards what it has read, and reads the row from the host. Therefore tags
// may be read at any time of a step: the stamp decides whether they were still right.
//
// Several teams may need the same row, for example for different heads. If a team is still inserting the row,
// the others read it from the host. If the heads of a group are divided into parts, only the first part inserts
// rows, so each row is in one slot at most. Sequences that share a cache may each insert the same row.
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

// Arguments of the functions below, for one KV head with a cache of `cached` rows:
//   id: id of the row that is looked up, below 2^31.
//   tags, stamps: int32 [cached], aligned to 16 bytes.

// The tag of way lane % WAYS in the row's set.
__device__ __forceinline__ int tag_of(int id, const int* tags, i64 cached) {
    return __ldcg(tags + set_of(id, cached) + threadIdx.x % WAYS);
}
// Return the slot with tag `id`, or −1. A team of LANES lanes looks up one row; `tag` is the result of `tag_of`
// in each lane. Only the first WAYS lanes of a team count: the others have read the same tags, perhaps at
// another time. All lanes of the warp call this function.
template <int LANES>
__device__ __forceinline__ int slot_of(int id, int tag, i64 cached) {
    u32 same = __ballot_sync(ALL, tag == id) >> threadIdx.x % 32 / LANES * LANES & ((1u << WAYS) - 1);
    return same ? set_of(id, cached) + __ffs(same) - 1 : -1;
}
// Return the time stamp `now` of a step: twice its number, modulo 2^31. After 2^30 steps, stamps start again at
// 0.
__device__ __forceinline__ int now_of(int step) { return 2 * (step & (1 << 30) - 1); }
// Record that this step uses a slot, and return the slot's previous stamp. SHARED: several warps may use the
// same slot.
template <bool SHARED>
__device__ __forceinline__ int use_slot(int* stamp, int now) {
    return SHARED ? atomicMax(stamp, now) : atomicExch(stamp, now);
}
// Return true if this step has already replaced the row in the slot. `before` is the slot's previous stamp.
__device__ __forceinline__ bool is_taken(int before, int now) { return before == now + 1; }
// Choose the least recently used slot of a set for a new row, and write the row's tag. Return −1 if this step
// uses all slots of the set. One lane calls this function.
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
