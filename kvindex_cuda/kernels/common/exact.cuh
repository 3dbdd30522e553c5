// Slow path of a search: find the C keys with the highest approximate scores (votes) by computing all votes
// again. It is needed if the list that scan.cu has written contains fewer than C keys, or if this list has
// overflowed. prepare_query.cu chooses the scan's threshold so that these two cases are very unlikely. On this
// path, each thread block computes the votes of all keys of its group 8 times, in the 8 passes of a radix select.
// Then it computes the votes of its own part of the keys once more.
// The functions are not inlined, to keep the code of the callers small.
// Compile-time constants: those of votes.cuh.
#pragma once
#include "common/votes.cuh"

// The inputs for computing the votes (approximate scores) of all keys for one group of query heads. The heads of
// a group share a KV head. The fields of this struct have the same names as the arguments of scan.cu.
struct Voters {
    const i64* table;  // table row of its sequence
    i64 head, bg, kv_heads;
    const u32* planes;
    const int* sums;
    const void* queries;
    const float* units;
    const int* factors;
    const u32* valid;  // valid bits of its sequence
    i64 tokens;
    u32 shifts;
    Sampling draw;
};

// Compute the entries of the 32 keys from number `first` on, one per lane. An entry packs the approximate score
// (vote) and the token id of a key. A lane returns the entry of key first + own_key(), or 0 if that key is not
// valid. `first` is a multiple of 32.
__device__ __forceinline__ u64 entry_of(const Voters& voters, const Group& group, u32 first) {
    u32 s = first / TOKENS;
    int part = first % TOKENS / 32, offsets[SETS][2];
    if (first >= voters.tokens) return 0;
    const char* codes = reinterpret_cast<const char*>(voters.table[s]) + voters.bg % voters.kv_heads * voters.head;
    Mean mean;
    load(mean, codes + CENTER);
    offsets_of<false>(offsets, mean, group, nullptr);
    Signs signs;
    load(signs, codes, part);
    const char* factors = reinterpret_cast<const char*>(voters.factors);
    u32 weights = load_weights(codes + WEIGHTS, part);
    int vote = vote_of(signs, weights, voters.shifts, group, offsets, factors, first + own_key());
    bool inside = first + own_key() < voters.tokens && voters.valid[i64(s) * 8 + part] >> own_key() & 1;
    return inside ? entry_of(vote, int(first) + own_key()) : 0;
}
__device__ __noinline__ u64 entry_alone(const Voters& voters, u32 first) {
    Group group;
    load(group, voters.queries, voters.planes, voters.sums, voters.units, voters.draw, voters.bg);
    return entry_of(voters, group, first);
}

// Return the entry with the `target`-th highest vote (approximate score) of all keys. An entry packs the vote
// and the token id of a key. All 256 threads of a block call this function.
__device__ __noinline__ u64 last_of_the_best(const Voters& voters, int target) {
    __shared__ int bins[256];
    Group group;
    load(group, voters.queries, voters.planes, voters.sums, voters.units, voters.draw, voters.bg);
    auto each = [&](auto use) {
        for (u32 first = threadIdx.x / 32 * 32; first < voters.tokens; first += 256) {
            u64 entry = entry_of(voters, group, first);
            if (entry) use(entry);
        }
    };
    return radix_cut(each, target, bins);
}
