// The cache of rows (kvindex_cuda/memory/row_cache.py): where a row lies in it, and a place for one that
// does not. Each team of lanes that has a row looks it up, and waits for no other.
//
// The slots of a set change hands by their stamps, of the step that used them last: twice its number,
// or one more if it gave the slot to another row. `now` is twice the number of this step. Whoever finds
// its row's tag puts `now` there and looks at what was there before. Whoever does not takes the slot
// with the oldest stamp from before `now`, by compare-and-swap to `now` + 1, then writes its tag, and its
// row once that has come. So in a step a slot passes once from an older stamp
//  - to `now`, by the row that lies there: no swap that expects an older stamp succeeds any more, and nobody
//    writes to what that row's warp reads, even if it began to read before it knew;
//  - to `now` + 1, by another row: the first finds that instead of an older stamp, throws away what it has
//    read, and is fetched, to be kept nowhere. A tag may therefore be read at any time of the step: the
//    stamp says whether it still holds.
// Several warps may want a row: parts of its heads, or sequences that share a cache and a text. All find it in a
// slot that lasts, for none of them undoes `now` + 1; of one that is taken now the others find it nowhere, or no
// row yet, and fetch it. Of parts the first alone takes slots, so that a row's id is in one slot at most: only one
// warp gives it one, and only where no tag was its. Sequences each take one, and leave the same row in both.
#pragma once
#include "common/common.cuh"

__device__ __forceinline__ int set_of(int id, i64 cached) {  // the first slot of its set
    return int(u32(id) * 2654435761u >> 12 & u32(cached / WAYS - 1)) * WAYS;
}
// That a set's tags and stamps will soon be read.
__device__ __forceinline__ void expect_look_up(int id, const int* tags, const int* stamps, i64 cached) {
    to_l2(tags + set_of(id, cached));
    to_l2(stamps + set_of(id, cached));
}

// Below, of one KV head with `cached` rows of cache: tags, stamps int32 [cached], aligned to 16
// bytes; id: of a row, below 2^31.

// Of the row's set, the tag of way lane % WAYS.
__device__ __forceinline__ int tag_of(int id, const int* tags, i64 cached) {
    return __ldcg(tags + set_of(id, cached) + threadIdx.x % WAYS);
}
// The slot whose tag is the row's, or −1, of each LANES lanes, which ask for one. tag: each lane's of `tag_of`; the
// first WAYS of them count, for others may have read it before or after another row took the slot. All lanes call it.
template <int LANES>
__device__ __forceinline__ int slot_of(int id, int tag, i64 cached) {
    u32 same = __ballot_sync(ALL, tag == id) >> threadIdx.x % 32 / LANES * LANES & ((1u << WAYS) - 1);
    return same ? set_of(id, cached) + __ffs(same) - 1 : -1;
}
// Twice the number of a step, which stays below 2^31: after 2^30 steps it begins anew, and slots with larger stamps
// keep the rows that they have.
__device__ __forceinline__ int now_of(int step) { return 2 * (step & (1 << 30) - 1); }
// Of a slot that has the row's tag the stamp before: it is used in this step. SHARED: several warps want the row.
template <bool SHARED>
__device__ __forceinline__ int use_slot(int* stamp, int now) {
    return SHARED ? atomicMax(stamp, now) : atomicExch(stamp, now);
}
// Whether a slot with that stamp is another row's since this step.
__device__ __forceinline__ bool is_taken(int before, int now) { return before == now + 1; }
// A slot for a row whose set lacks it, or −1 where all serve this step. One lane calls it.
__device__ __forceinline__ int take_slot(int id, int now, int* tags, int* stamps, i64 cached) {
    int first = set_of(id, cached);
    for (int attempt = 0; attempt < WAYS; attempt++) {  // others may be quicker
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
