// Votes of all keys by look-ups in a table of the query (paper, B.2.1; ops.coarse.votes), and how
// many keys have how many.
//
// The table lies in shared memory with four heads side by side. Tiers: as bytes, so that one look-up
// and one addition serve four heads, and a histogram for each head, by pieces of the tokens too, from
// which candidates.cu tells which of the ties at a head's cut have the lowest ids. Dots: as 16-bit
// numbers, times the factor of the subspace's weight, the largest over the heads of the group, and
// one histogram. Integers throughout: equal to the reference to the bit, given the same table.
// Grid: (splits, BG), 256 threads. Reads D / 8 bytes per key (and D / 8 of weights, 2 D per block of
// 256), writes 4 per key and four heads (dots: 4 in all), and counts.
// Limited by shared memory: M look-ups per key, random banks, some 3.5 cycles for a warp's 32 (dots:
// of 64 bits, and one for the factor, 10 in all): 65 µs for 1M keys of 8 KV heads at D = 128, and
// 180 µs (by count).
// Compile-time: D, GROUP, DTYPE (of queries), WIDE (0 tiers, 1 dots), CENTERED (dots alone).
#include "common/tier_votes.cuh"

constexpr int M = D / 8;
constexpr int WORDS = (M + 3) / 4;   // of a key's signs, and of its weights
constexpr int SETS = (GROUP + 3) / 4;
constexpr int RECORDS = CHUNK / TOKENS;
constexpr int ENTRY = WIDE ? 2 : 1;  // words

// The words of a thread's key of a block.
__device__ __forceinline__ void load(u32 (&words)[WORDS], const char* fields) {
    const u32* from = reinterpret_cast<const u32*>(fields) + threadIdx.x * WORDS;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
            uint4 all = reinterpret_cast<const uint4*>(from)[w / 4];
            words[w] = all.x, words[w + 1] = all.y, words[w + 2] = all.z, words[w + 3] = all.w;
        }
    } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = from[w];
    }
}

// table int64 [B, row]: addresses of blocks, of KV head g at g · head; weights, center: of the layout;
// given uint32 [BG, SETS, M, 256, ENTRY], units float32 [BG, GROUP]: of query_table.cu; queries DTYPE [BG,
// GROUP, D]; factors int32 [256]; valid uint32 [B, row, 8], a bit per token; length int64 [1].
// Tiers: votes uint32 [BG, SETS, capacity], of four heads; totals int32 [BG, GROUP, POINTS], cleared
// before, and pieces int32 [BG, GROUP, PIECES, POINTS]: keys by votes. Dots: votes int32 [BG,
// capacity], LEAST for what is no key; totals int32 [BG, BINS] by coarse_bin, and tops uint32 [BG],
// the largest vote + 2^31, cleared before; products float32 [BG, row, GROUP]: ⟨q, μ⟩ of each block.
// Keys past the capacity are not seen.
extern "C" __global__ void __launch_bounds__(256, WIDE ? 2 : 4)
vote(const i64* table, i64 row, i64 head, i64 weights, i64 center, const uint4* given,
      const void* queries, const float* units, const int* given_factors, const u32* valid,
      const i64* length, u32* votes, int* totals, int* pieces, u32* tops, float* products,
      i64 capacity, i64 kv_heads) {
    DYNAMIC_SHARED(memory);  // 1 KB · ENTRY · M
    __shared__ int bins[WIDE ? BINS : 4 * POINTS];
    __shared__ int factors[WIDE ? 256 : 1], offsets[RECORDS][4];
    u32* entries = reinterpret_cast<u32*>(memory);
    i64 bg = blockIdx.y, batch = bg / kv_heads, tokens = min(i64(__ldcg(length)), capacity);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    table += batch * row;
    valid += batch * row * 8;
    if (WIDE) factors[threadIdx.x] = given_factors[threadIdx.x];
    i64 piece = WIDE ? CHUNK : piece_of(tokens), many = (tokens + piece - 1) / piece;
    after_previous();
    let_next_begin();
    if (i64(blockIdx.x) >= many) return;
    u32 top = 0;

    for (int set = 0; set < SETS; set++) {
        __syncthreads();
        for (int i = threadIdx.x; i < M * 64 * ENTRY; i += 256)
            reinterpret_cast<uint4*>(entries)[i] = __ldcg(given + (bg * SETS + set) * (M * 64 * ENTRY) + i);
        for (int i = threadIdx.x; i < (WIDE ? BINS : 4 * POINTS); i += 256) bins[i] = 0;
        __syncthreads();
        for (i64 p = blockIdx.x; p < many; p += gridDim.x) {
            for (i64 start = p * piece; start < min(tokens, (p + 1) * piece); start += CHUNK) {
                u32 ids[RECORDS][WORDS];
                const char* blocks[RECORDS];
                u32 real[RECORDS];
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
                    i64 s = start / TOKENS + i, key = start + i * TOKENS + threadIdx.x;
                    bool any = s * TOKENS < tokens;
                    blocks[i] = any ? reinterpret_cast<const char*>(table[s]) + bg % kv_heads * head : nullptr;
                    real[i] = any && key < tokens ? valid[s * 8 + warp] >> lane & 1 : 0;
                }
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
#pragma unroll
                    for (int w = 0; w < WORDS; w++) ids[i][w] = 0;
                    if (blocks[i]) load(ids[i], blocks[i]);
                }
#if WIDE
                __syncthreads();
                for (int item = warp; item < RECORDS * 4; item += 8) {
                    int i = item / 4, h = set * 4 + item % 4;
                    int offset = 0;
#if CENTERED
                    if (h < GROUP && start + i * TOKENS < tokens) {
                        const u32* mean = reinterpret_cast<const u32*>(
                            reinterpret_cast<const char*>(table[start / TOKENS + i]) + bg % kv_heads * head + center);
                        float dot = 0;
                        for (int j = lane; j < D / 2; j += 32) {
                            i64 at = (bg * GROUP + h) * D + 2 * j;
                            dot += element(queries, at) * __uint_as_float(mean[j] << 16);
                            dot += element(queries, at + 1) * __uint_as_float(mean[j] & 0xffff0000u);
                        }
                        dot = warp_sum(dot);
                        if (lane == 0) products[(bg * row + start / TOKENS + i) * GROUP + h] = dot;
                        float scaled = dot * __ldcg(units + bg * GROUP + h);
                        offset = __float2int_rn(fminf(fmaxf(scaled, -1073741824.0f), 1073741824.0f));
                    }
#endif
                    if (lane == 0) offsets[i][item % 4] = offset;
                }
                __syncthreads();
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
                    if (!blocks[i]) continue;
                    u32 logs[WORDS];
                    load(logs, blocks[i] + weights);
                    int sums[4] = {};
#pragma unroll
                    for (int b = 0; b < M; b++) {
                        u32 id = ids[i][b / 4] >> (b % 4 * 8) & 255;
                        uint2 entry = reinterpret_cast<const uint2*>(entries)[b * 256 + id];
                        int factor = factors[logs[b / 4] >> (b % 4 * 8) & 255];
                        sums[0] += short(entry.x) * factor, sums[1] += (int(entry.x) >> 16) * factor;
                        sums[2] += short(entry.y) * factor, sums[3] += (int(entry.y) >> 16) * factor;
                    }
                    int best = LEAST;
#pragma unroll
                    for (int h = 0; h < 4; h++)
                        if (set * 4 + h < GROUP) best = max(best, sums[h] + offsets[i][h]);
                    i64 key = start + i * TOKENS + threadIdx.x;
                    if (key >= tokens) continue;
                    int* vote = reinterpret_cast<int*>(votes) + bg * capacity + key;
                    if (set) best = max(best, *vote);
                    *vote = real[i] ? best : LEAST;
                    if (real[i] && set == SETS - 1) {
                        atomicAdd(bins + coarse_bin(best), 1);
                        top = max(top, u32(best) ^ 0x80000000u);
                    }
                }
#else
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
                    u32 sum = 0;
#pragma unroll
                    for (int b = 0; b < M; b++)
                        sum += entries[b * 256 + (ids[i][b / 4] >> (b % 4 * 8) & 255)];
                    i64 key = start + i * TOKENS + threadIdx.x;
                    if (key < tokens) votes[(bg * SETS + set) * capacity + key] = sum;
                    if (real[i])
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            if (set * 4 + h < GROUP) atomicAdd(bins + h * POINTS + (sum >> 8 * h & 255), 1);
                }
#endif
            }
#if !WIDE
            __syncthreads();
            for (int h = 0; h < 4 && set * 4 + h < GROUP; h++) {
                i64 at = bg * GROUP + set * 4 + h;
                int found = bins[h * POINTS + threadIdx.x];
                bins[h * POINTS + threadIdx.x] = 0;
                pieces[(at * PIECES + p) * POINTS + threadIdx.x] = found;
                if (found) atomicAdd(totals + at * POINTS + threadIdx.x, found);
            }
            __syncthreads();
#endif
        }
    }
#if WIDE
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += 256)
        if (bins[i]) atomicAdd(totals + bg * BINS + i, bins[i]);
    top = warp_max(top);
    if (lane == 0 && top) atomicMax(tops + bg, top);
#endif
}
