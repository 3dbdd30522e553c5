// Exact candidates without the scan's list, the C best votes: where its threshold let fewer than C through, or more
// than the list holds (prepare_query.cu makes both all but sure not to happen). Slow: every block
// that runs it computes all votes of its group 8 times, and then those of its share of the keys once more. Apart
// from the callers' own code, which is to stay small.
// Compile-time: as votes.cuh.
#pragma once
#include "common/votes.cuh"

// What votes are computed from, for one group: as scan.cu gets it.
struct Voters {
    const i64* table;  // its row of the batch
    i64 head, bg, kv_heads;
    const u32* planes;
    const int* sums;
    const void* queries;
    const float* units;
    const int* factors;
    const u32* valid;  // its row of the batch
    i64 tokens;
    u32 shifts;
    Draw draw;
};

// Entries of 32 keys, from a multiple of 32 on: that of the lane's `own_key`, 0 for no valid key.
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

// The `target`-th best entry of all, target from 1. All 256 threads of a block call it.
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
