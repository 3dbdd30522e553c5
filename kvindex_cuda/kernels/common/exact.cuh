// Find exactly the C keys with the highest votes, where C is the number of candidates, without the list of
// scan.cu. This is needed if fewer than C keys reached the scan's threshold, or if more keys did than the
// list can store; prepare_query.cu chooses the threshold so that both are very unlikely. This search is slow:
// every thread block that calls it computes all votes of its group 8 times, and then once more the votes of the keys
// that it is assigned. These functions are not inlined, because
// the callers' own code has to stay small.
// Compile-time constants: those of votes.cuh.
#pragma once
#include "common/votes.cuh"

// Inputs for the votes of one group (the query heads that share a KV head). The fields are arguments of
// scan.cu.
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

// Compute the entries (vote and token id) of keys `first` to `first + 31`; `first` is a multiple of 32. A
// lane returns the entry of key `first + own_key()`, or 0 if that key is not valid.
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

// Return the `target`-th best entry of all keys, where 1 is the best. All 256 threads of a block call this
// function.
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
