// A cache in device memory for rows (key and value of a token) that are stored on the host: lookup and
// replacement (kvindex_cuda/memory/row_cache.py). A team of neighboring lanes that needs a row looks it up. If
// the row is not in the cache, the team chooses a slot for it. Teams do not wait for each other.
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
// Prefetch into L2 the tags and time stamps of the cache set that row `id` maps to.
__device__ __forceinline__ void expect_look_up(int id, const int* tags, const int* stamps, i64 cached) {
    to_l2(tags + set_of(id, cached));
    to_l2(stamps + set_of(id, cached));
}

// Arguments of the functions below, for one KV head with a cache of `cached` rows:
//   id: id of the row that is looked up, below 2^31.
//   tags, stamps: int32 [cached], aligned to 16 bytes; the row id and the time stamp of each slot.

// Row `id` can only be in one set of the cache, which has WAYS slots. Return the tag of one slot of this set: the
// slot with the number lane % WAYS.
__device__ __forceinline__ int tag_of(int id, const int* tags, i64 cached) {
    return __ldcg(tags + set_of(id, cached) + threadIdx.x % WAYS);
}
// Return the cache slot that contains row `id`, or −1 if no slot contains it. All lanes of a warp call this
// function, and LANES neighboring lanes look up one row together. `tag` is the tag that `tag_of` returned in
// this lane. A set of the cache has WAYS slots, so the first WAYS of the LANES lanes have the tags of all slots
// in the set. The other lanes have loaded the same tags again, perhaps at another time. Their tags are ignored.
template <int LANES>
__device__ __forceinline__ int slot_of(int id, int tag, i64 cached) {
    u32 same = __ballot_sync(ALL, tag == id) >> threadIdx.x % 32 / LANES * LANES & ((1u << WAYS) - 1);
    return same ? set_of(id, cached) + __ffs(same) - 1 : -1;
}
// Return the time stamp `now` of a decode step: twice the step's number, modulo 2^31. After 2^30 steps, stamps
// start again at 0.
__device__ __forceinline__ int now_of(int step) { return 2 * (step & (1 << 30) - 1); }
// Record that this decode step uses a slot of the row cache: set the slot's time stamp to `now`, and return its
// previous time stamp. SHARED must be true if several warps may use the same slot in one step.
template <bool SHARED>
__device__ __forceinline__ int use_slot(int* stamp, int now) {
    return SHARED ? atomicMax(stamp, now) : atomicExch(stamp, now);
}
// Return true if this decode step has already written another row to a cache slot. `before` is the time stamp
// that the slot had before `use_slot`.
__device__ __forceinline__ bool is_taken(int before, int now) { return before == now + 1; }
// Choose the least recently used slot of a set for a new row, and write the row's tag. Return −1 if this decode
// step uses all slots of the set. One lane calls this function.
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
