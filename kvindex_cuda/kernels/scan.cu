// Coarse stage of signed dots: which keys' votes are high (paper, B.2.1; ops.coarse, lists=group).
//
// vote = f · Σ_j s_j r_j + offset of the key's segment, the largest over the heads of the group.
// Σ s r = 2 Σ b r − Σ r for sign bits b, and Σ b r is the sum over the 8 bit planes of r of 2^p
// times a count of common bits, which the matrix unit makes for 16 keys, 128 bits and 8 columns at
// a time: 2 planes of 4 heads. Signs go in as they are stored; nothing is unpacked.
//
// Grid: any; warps walk over blocks of 256 keys. Reads D/8 + 1 bytes per key and 2 D per block,
// once; writes 8 bytes and adds to a histogram for each key at or above the threshold that
// `sample` has estimated, some 1.5 C. `exact` makes it right where that was too few or too many.
// Compile-time: D, GROUP, DTYPE (of queries), CENTRED.
#include "common.cuh"

constexpr int BYTES = D / 8;
constexpr int STRIDE = (BYTES + 3) / 4 * 4;  // of a key's signs
constexpr int WORDS = STRIDE / 4;
constexpr int QUADS = (WORDS + 3) / 4;
constexpr int SETS = (GROUP + 3) / 4;
constexpr int BUFFER = 128;  // entries that a warp holds back
constexpr int AHEAD = D <= 128 ? 4 : 2;  // of 32 keys, whose signs a warp loads at once

// A block's fields, per KV head: signs, weights, [logs,] magnitudes, centre (codes.py: layout).
struct Codes {
    const i64* table;  // addresses [B, row] of blocks
    i64 row, head, weights, centre;
};

// What a warp needs of the query: planes as fragments, and of its own head in each set the sum.
struct Group {
    u32 b[SETS][QUADS][4];
    int sums[SETS];
    i64 bg;
};

__device__ __forceinline__ void load(Group& group, const u32* fragments, const int* sums, i64 bg) {
    int lane = threadIdx.x % 32;
    group.bg = bg;
    const u32* mine = fragments + bg * (SETS * QUADS * 128) + lane;
#pragma unroll
    for (int i = 0; i < SETS * QUADS * 4; i++) (&group.b[0][0][0])[i] = mine[i * 32];
#pragma unroll
    for (int n = 0; n < SETS; n++) group.sums[n] = sums[bg * SETS * 4 + n * 4 + lane % 4];
}

// ⟨q, μ⟩ in votes for this lane's head in each set, LEAST where there is none; and as it is.
__device__ __forceinline__ void offsets_of(int (&offset)[SETS], const char* block,
                                           const Codes& codes, const void* queries,
                                           const float* units, i64 bg, float* products) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < SETS; n++) offset[n] = LEAST;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        int found = 0;
#if CENTRED
        const u16* centre = reinterpret_cast<const u16*>(block + codes.centre);
        float dot = 0;
        for (int j = lane; j < D; j += 32)
            dot += element(queries, (bg * GROUP + h) * D + j) * from_bfloat16(centre[j]);
        dot = warp_sum(dot);
        if (products && lane == 0) products[h] = dot;
        float votes = dot * units[bg * GROUP + h];
        found = __float2int_rn(fminf(fmaxf(votes, -1073741824.0f), 1073741824.0f));
#endif
        if (lane % 4 == h % 4) offset[h / 4] = found;
    }
}

// The factors of a block's keys, to shared memory: of keys 16 tile + row and 8 further as a pair.
__device__ __forceinline__ void factors_of(int2* pairs, const char* block, const Codes& codes,
                                           const int* factors) {
    int lane = threadIdx.x % 32;  // keys 8 lane to 8 lane + 7: half a tile
    uint2 bytes = __ldcs(reinterpret_cast<const uint2*>(block + codes.weights) + lane);
    int* side = reinterpret_cast<int*>(pairs + lane / 2 * 8) + lane % 2;
    __syncwarp();  // the last block's factors have been read
#pragma unroll
    for (int i = 0; i < 8; i++) side[2 * i] = factors[(i < 4 ? bytes.x : bytes.y) >> (i % 4 * 8) & 255];
    __syncwarp();
}

// The group's votes of 32 keys, one in each lane: key_of(tile), for an even tile.
__device__ __forceinline__ int key_of(int tile) {
    int lane = threadIdx.x % 32;
    return (tile + lane % 4 / 2) * 16 + lane % 2 * 8 + lane / 4;
}

// This lane's words of the signs of 32 keys: rows lane / 4 and 8 further of two tiles.
struct Signs {
    u32 rows[4][QUADS];
};
__device__ __forceinline__ void load(Signs& signs, const char* block, int tile) {
    int lane = threadIdx.x % 32, t = lane % 4;
    const u32* mine = reinterpret_cast<const u32*>(block) + (tile * 16 + lane / 4) * WORDS + t;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            bool has = QUADS * 4 == WORDS || quad * 4 + t < WORDS;
            signs.rows[i][quad] = has ? __ldcs(mine + i * 8 * WORDS + quad * 4) : 0;
        }
}

__device__ __forceinline__ int votes_of(const Signs& signs, int tile, const Group& group,
                                        const int (&offset)[SETS], const int2* pairs) {
    int lane = threadIdx.x % 32;
    int best[4];  // of this lane's heads: tile, its lower rows, the next tile, its lower rows
#pragma unroll
    for (int next = 0; next < 2; next++) {
        int2 factor = pairs[(tile + next) * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < SETS; n++) {
            int dots[2] = {0, 0};
#pragma unroll
            for (int part = 0; part < 4; part++) {
                int c[4] = {0, 0, 0, 0};
#pragma unroll
                for (int quad = 0; quad < QUADS; quad++)
                    mma_bits(c, signs.rows[2 * next][quad], signs.rows[2 * next + 1][quad],
                             group.b[n][quad][part]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int odd = part == 3 ? -c[2 * half + 1] : c[2 * half + 1];  // the sign's plane
                    dots[half] += (c[2 * half] + 2 * odd) * (1 << (2 * part));
                }
            }
            int high = (2 * dots[0] - group.sums[n]) * factor.x + offset[n];  // of no head: LEAST
            int low = (2 * dots[1] - group.sums[n]) * factor.y + offset[n];
            best[2 * next] = n ? max(best[2 * next], high) : high;
            best[2 * next + 1] = n ? max(best[2 * next + 1], low) : low;
        }
    }
    // over the heads of the quad, each lane keeping one of the four
    bool second = lane & 1, later = lane & 2;
    int a = max(second ? best[1] : best[0], __shfl_xor_sync(ALL, second ? best[0] : best[1], 1));
    int b = max(second ? best[3] : best[2], __shfl_xor_sync(ALL, second ? best[2] : best[3], 1));
    return max(later ? b : a, __shfl_xor_sync(ALL, later ? a : b, 2));
}

__device__ __forceinline__ void load_factors(int* factors, const int* given) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) factors[i] = given[i];
    __syncthreads();
}

__device__ __forceinline__ bool is_valid(const u32* valid, i64 row, i64 batch, i64 block, int key) {
    return valid[(batch * row + block) * 8 + key / 32] >> (key % 32) & 1;
}

// codes: table, row, head, weights, centre. fragments, sums, queries, units: of `ask`, queries as
// [BG, GROUP, D]. factors int32 [256]; valid uint32 [B, row, 8], a bit per token; length int64 [1].
// thresholds, shifts int32 [BG]: of `sample`. counts int32 [BG]; list uint64 [BG, capacity];
// histogram int32 [BG, BINS]: of (vote − threshold) >> shift. products float32 [BG, row, GROUP]:
// ⟨q, μ⟩ of each block.
extern "C" __global__ void __launch_bounds__(256, GROUP <= 4 && D <= 128 ? 3 : 2)
scan(const i64* table, i64 row, i64 head, i64 weights, i64 centre, const u32* fragments,
     const int* sums, const void* queries, const float* units, const int* given_factors,
     const u32* valid, const i64* length, const int* thresholds, const int* shifts, int* counts,
     u64* list, int* histogram, float* products, i64 capacity, i64 groups, i64 kv_heads) {
    __shared__ int factors[256];
    __shared__ int2 pairs[8][128];
    __shared__ u64 buffers[8][BUFFER];
    load_factors(factors, given_factors);
    Codes codes = {table, row, head, weights, centre};
    int lane = threadIdx.x % 32, held = 0;
    u64* buffer = buffers[threadIdx.x / 32];
    i64 tokens = *length, blocks = (tokens + TOKENS - 1) / TOKENS;
    // each warp takes neighbouring blocks, so that it changes its group once or never
    i64 warps = i64(gridDim.x) * 8, warp = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    i64 work = blocks * groups, first = work * warp / warps, stop = work * (warp + 1) / warps;
    Group group;
    group.bg = -1;
    int threshold = 0, shift = 0;

    auto flush = [&]() {
        __syncwarp();
        int base = lane == 0 ? atomicAdd(counts + group.bg, held) : 0;
        base = __shfl_sync(ALL, base, 0);
        for (int i = lane; i < held; i += 32) {
            u64 entry = buffer[i];
            if (base + i < capacity) list[group.bg * capacity + base + i] = entry;
            u32 above = u32(vote_of(entry)) - u32(threshold);
            atomicAdd(histogram + group.bg * BINS + min(above >> shift, u32(BINS - 1)), 1);
        }
        held = 0;
        __syncwarp();
    };

    for (i64 item = first; item < stop; item++) {
        i64 bg = item / blocks, s = item % blocks, batch = bg / kv_heads;
        if (bg != group.bg) {
            if (held) flush();
            load(group, fragments, sums, bg);
            threshold = thresholds[bg];
            shift = shifts[bg];
        }
        const char* block = reinterpret_cast<const char*>(table[batch * row + s]) + bg % kv_heads * head;
        int offset[SETS];
        offsets_of(offset, block, codes, queries, units, bg, products + (bg * row + s) * GROUP);
        int2* mine = pairs[threadIdx.x / 32];
        factors_of(mine, block, codes, factors);
        for (int first_tile = 0; first_tile < 16; first_tile += 2 * AHEAD) {
            Signs signs[AHEAD];  // so many loads in flight
#pragma unroll
            for (int i = 0; i < AHEAD; i++) load(signs[i], block, first_tile + 2 * i);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int tile = first_tile + 2 * i;
                int vote = votes_of(signs[i], tile, group, offset, mine);
                if (!__any_sync(ALL, vote >= threshold)) continue;
                int key = key_of(tile);
                i64 id = s * TOKENS + key;
                bool in = vote >= threshold && id < tokens && is_valid(valid, row, batch, s, key);
                u32 all = __ballot_sync(ALL, in);
                if (in) buffer[held + __popc(all & ((1u << lane) - 1))] = entry_of(vote, int(id));
                held += __popc(all);
                if (held > BUFFER - 32) flush();
            }
        }
    }
    if (held) flush();
}

// A threshold from the votes of some keys: that which 1.5 C of all keys are expected to reach.
// Grid: (splits, BG), 256 threads. Reads 32 keys in each of SAMPLED / 32 blocks, evenly spread;
// the last block of a group sorts out the order statistic. Where 1.5 C is not less than the valid
// keys, or the sample is too small to tell, all keys are wanted.
// votes int32 [BG, SAMPLED]; wanted int32 [B]: C; counted int32 [B]: valid keys.
constexpr int SAMPLED = 4096;

extern "C" __global__ void __launch_bounds__(256)
sample(const i64* table, i64 row, i64 head, i64 weights, i64 centre, const u32* fragments,
       const int* sums, const void* queries, const float* units, const int* given_factors,
       const u32* valid, const i64* length, const int* wanted, const int* counted, int* votes,
       int* tickets, int* thresholds, int* shifts, i64 kv_heads) {
    __shared__ int factors[256];
    __shared__ int2 pairs[8][128];
    __shared__ int bins[256];
    load_factors(factors, given_factors);
    Codes codes = {table, row, head, weights, centre};
    i64 bg = blockIdx.y, batch = bg / kv_heads, tokens = *length;
    i64 blocks = (tokens + TOKENS - 1) / TOKENS;
    int lane = threadIdx.x % 32;
    Group group;
    load(group, fragments, sums, bg);
    int* mine = votes + bg * SAMPLED;
    for (int i = blockIdx.x * 8 + threadIdx.x / 32; i < SAMPLED / 32; i += gridDim.x * 8) {
        i64 s = blocks * i / (SAMPLED / 32);
        // of a block that is drawn several times other tiles each time; else any
        int tile = 2 * (blocks < SAMPLED / 32 ? i * 3 % 8 : int(u32(i) * 2654435761u >> 29));
        const char* block = reinterpret_cast<const char*>(table[batch * row + s]) + bg % kv_heads * head;
        int offset[SETS], key = key_of(tile);
        offsets_of(offset, block, codes, queries, units, bg, nullptr);
        factors_of(pairs[threadIdx.x / 32], block, codes, factors);
        Signs signs;
        load(signs, block, tile);
        int vote = votes_of(signs, tile, group, offset, pairs[threadIdx.x / 32]);
        bool in = s * TOKENS + key < tokens && is_valid(valid, row, batch, s, key);
        mine[i * 32 + lane] = in ? vote : LEAST;
    }
    if (!last_block(tickets + bg, gridDim.x)) return;

    int found = 0, top = LEAST;
    for (int i = threadIdx.x; i < SAMPLED; i += 256) {
        int vote = __ldcg(mine + i);
        found += vote != LEAST;
        top = max(top, vote);
    }
    __shared__ int counts[8], tops[8];
    found = warp_sum(found);
    top = warp_max(top);
    if (lane == 0) counts[threadIdx.x / 32] = found, tops[threadIdx.x / 32] = top;
    __syncthreads();
    found = 0;
    for (int i = 0; i < 8; i++) found += counts[i], top = max(top, tops[i]);
    i64 all = counted[batch];
    int rank = all ? int(3 * i64(wanted[batch]) * found / (2 * all)) + 8 : found;
    u32 prefix = 0;  // of the ordered vote, the rank-th from the top, found digit by digit
    if (rank < found && 3 * i64(wanted[batch]) < 2 * all)
        for (int digit = 24; digit >= 0; digit -= 8) {
            bins[threadIdx.x] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < SAMPLED; i += 256) {
                u32 key = u32(__ldcg(mine + i)) ^ 0x80000000u;
                if (digit == 24 || key >> (digit + 8) == prefix >> (digit + 8))
                    atomicAdd(bins + (key >> digit & 255), 1);
            }
            __syncthreads();
            int bin = 255;
            for (; bin > 0 && bins[bin] < rank; bin--) rank -= bins[bin];
            prefix |= u32(bin) << digit;
            __syncthreads();
        }
    if (threadIdx.x == 0) {
        int threshold = int(prefix ^ 0x80000000u);
        if (threshold == LEAST) threshold++;  // no key has LEAST
        u32 range = top > threshold ? u32(top) - u32(threshold) : 0;
        int bits = 32 - __clz(int(range));
        thresholds[bg] = threshold;
        shifts[bg] = max(0, bits - 11);
    }
}

// The list made right: where the threshold let fewer than C through, or more than the list holds,
// the C best are found by their words, 8 bits at a time. One block per group, and slow: all votes
// are computed 9 times. Returns at once where the list is good.
extern "C" __global__ void __launch_bounds__(256)
exact(const i64* table, i64 row, i64 head, i64 weights, i64 centre, const u32* fragments,
      const int* sums, const void* queries, const float* units, const int* given_factors,
      const u32* valid, const i64* length, const int* wanted, const int* counted, int* thresholds,
      int* shifts, int* counts, u64* list, int* histogram, i64 capacity, i64 kv_heads) {
    __shared__ int factors[256];
    __shared__ int2 pairs[8][128];
    __shared__ int bins[256];
    __shared__ int written;
    i64 bg = blockIdx.x, batch = bg / kv_heads, tokens = *length;
    int target = min(wanted[batch], counted[batch]), have = counts[bg];
    if (have >= target && have <= capacity) return;
    load_factors(factors, given_factors);
    Codes codes = {table, row, head, weights, centre};
    i64 blocks = (tokens + TOKENS - 1) / TOKENS;
    Group group;
    load(group, fragments, sums, bg);
    // every valid key's entry, to `use`
    auto each = [&](auto use) {
        for (i64 s = threadIdx.x / 32; s < blocks; s += 8) {
            const char* block = reinterpret_cast<const char*>(table[batch * row + s]) + bg % kv_heads * head;
            int offset[SETS];
            offsets_of(offset, block, codes, queries, units, bg, nullptr);
            factors_of(pairs[threadIdx.x / 32], block, codes, factors);
            for (int tile = 0; tile < 16; tile += 2) {
                Signs signs;
                load(signs, block, tile);
                int vote = votes_of(signs, tile, group, offset, pairs[threadIdx.x / 32]);
                i64 id = s * TOKENS + key_of(tile);
                if (id < tokens && is_valid(valid, row, batch, s, key_of(tile)))
                    use(entry_of(vote, int(id)));
            }
        }
    };
    u64 prefix = radix_cut(each, target, bins);
    if (threadIdx.x == 0) written = 0;
    for (int i = threadIdx.x; i < BINS; i += 256) histogram[bg * BINS + i] = 0;
    __syncthreads();
    each([&](u64 entry) {
        if (target && entry >= prefix) list[bg * capacity + atomicAdd(&written, 1)] = entry;
    });
    if (threadIdx.x == 0) {
        counts[bg] = target;
        thresholds[bg] = vote_of(prefix);
        shifts[bg] = 31;
        histogram[bg * BINS] = target;
    }
}
