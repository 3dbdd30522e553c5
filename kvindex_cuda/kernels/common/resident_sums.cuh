// Add up the attention weights of the resident rows (sink and window) for GROUP query heads of a KV head. The thread
// blocks that do this divide the rows among them. select_rows.cu and select_latents.cu merge their results
// (`with_residents` in row_budget.cuh). Used by prepare_query.cu and resident_latents.cu.
// The result does not depend on the order in which threads run. Reference: _resident_lse in
// kvindex/layer/retrieval.py.
//
// A team of SUM_LANES neighboring lanes reads the key of one row at a time, and loads the keys of its next
// SUM_AHEAD rows together. Each thread block reads its rows once: 2 D bytes per row for 16-bit numbers, usually
// from L2. Limited by the latency of these reads.
// Compile-time constants: D, GROUP, DTYPE, RAGGED (1: each sequence has its own count of rows). D and the dimension
// of values are multiples of 8.
#pragma once
#include "common/common.cuh"

constexpr int SUM_LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
constexpr int SUM_TEAMS = 256 / SUM_LANES;                        // teams of a thread block
constexpr int SUM_CHUNKS = (D / 8 + SUM_LANES - 1) / SUM_LANES;   // chunks of 8 elements per lane
constexpr int SUM_AHEAD = SUM_CHUNKS > 1 ? 1 : DTYPE == 0 ? 2 : 4;  // rows that a team loads together
constexpr int SUM_WORDS = DTYPE == 0 ? 2 : 1;                     // loads of 16 bytes per chunk

// Eight neighboring elements of a row, in the stored format.
struct Eight {
    uint4 words[SUM_WORDS];
    __device__ __forceinline__ float at(int i) const {
#if DTYPE == 0
        return __uint_as_float((&words[0].x)[i]);
#elif DTYPE == 1
        return from_float16(u16((&words[0].x)[i / 2] >> (i % 2 * 16)));
#else
        return from_bfloat16(u16((&words[0].x)[i / 2] >> (i % 2 * 16)));
#endif
    }
};

// Compute the largest logit and the sum of exp(logit − largest) of this thread block's rows, for each of GROUP heads.
// All threads of the block call this function.
//   bg: number of the KV head, among those of all sequences.
//   batch: number of its sequence.
//   entry: with RAGGED, which count of rows applies. Several tokens of a sequence have a count each.
//   queries: the queries of the heads, DTYPE [GROUP, D].
//   to: receives the results, [GROUP].
//   staged: true if the newest token is in `args.token_keys` and counts as one more row.
//   split: number of this thread block among those that divide the rows.
//   memory: float32 [GROUP, D] in shared memory, and at least [GROUP, SUM_TEAMS, 2].
//   count: in shared memory. Receives the number of resident rows without the newest token.
template <class Arguments>
__device__ __forceinline__ void resident_sums(const Arguments& args, i64 bg, i64 batch, i64 entry, const void* queries,
                                              bool staged, int split, float* memory, i64* count, float2* to) {
    i64 width = D + args.value_dim;
    int team = threadIdx.x / SUM_LANES, member = threadIdx.x % SUM_LANES;
    if (threadIdx.x == 0) *count = __ldcg(args.resident_count + RAGGED * entry);
    for (int i = threadIdx.x; i < GROUP * D; i += 256) memory[i] = element(queries, i);
    __syncthreads();
    int known = int(*count), rows = int(min(*count + staged, args.room));
    float peak[GROUP], total[GROUP];
#pragma unroll
    for (int h = 0; h < GROUP; h++) peak[h] = NEVER, total[h] = 0;

    int step = int(args.resident_splits) * SUM_TEAMS;
    // All teams of a warp iterate equally often, because they exchange values.
    int own = split * SUM_TEAMS + team, first = own - threadIdx.x % 32 / SUM_LANES;
    for (int from = 0; first + from < rows; from += step * SUM_AHEAD) {
        Eight chunks[SUM_AHEAD][SUM_CHUNKS] = {};
        bool seen[SUM_AHEAD];
#pragma unroll
        for (int a = 0; a < SUM_AHEAD; a++) {
            int row = own + from + a * step;
            bool stored = row < known;
            seen[a] = row < rows && args.resident_mask[batch * args.room + row];
#pragma unroll
            for (int j = 0; j < SUM_CHUNKS; j++) {
                int chunk = member + j * SUM_LANES;
                if (chunk >= D / 8 || !seen[a]) continue;
                i64 at = stored ? (bg * args.room + row) * width : bg * D;
                const void* rows_of = stored ? args.resident : args.token_keys;
                const char* from_key = static_cast<const char*>(rows_of) + (at + chunk * 8) * (DTYPE == 0 ? 4 : 2);
#pragma unroll
                for (int w = 0; w < SUM_WORDS; w++)
                    chunks[a][j].words[w] = __ldcg(reinterpret_cast<const uint4*>(from_key) + w);
            }
        }
#pragma unroll
        for (int a = 0; a < SUM_AHEAD; a++) {
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                float dot = 0;
#pragma unroll
                for (int j = 0; j < SUM_CHUNKS; j++) {
                    int chunk = member + j * SUM_LANES;
                    if (chunk >= D / 8) continue;
                    const float4* q = reinterpret_cast<const float4*>(memory + h * D + chunk * 8);
                    float4 low = q[0], high = q[1];
                    const Eight& x = chunks[a][j];
                    dot += x.at(0) * low.x + x.at(1) * low.y + x.at(2) * low.z + x.at(3) * low.w;
                    dot += x.at(4) * high.x + x.at(5) * high.y + x.at(6) * high.z + x.at(7) * high.w;
                }
#pragma unroll
                for (int by = SUM_LANES / 2; by; by /= 2) dot += __shfl_xor_sync(ALL, dot, by);
                float logit = dot * args.scale;
                if (args.softcap > 0) logit = args.softcap * tanhf(logit / args.softcap);
                if (!seen[a]) continue;
                float highest = fmaxf(peak[h], logit);
                total[h] = total[h] * expf(peak[h] - highest) + expf(logit - highest);
                peak[h] = highest;
            }
        }
    }
    auto parts = reinterpret_cast<float2(*)[GROUP]>(memory);
    __syncthreads();
    if (member == 0)
#pragma unroll
        for (int h = 0; h < GROUP; h++) parts[team][h] = {peak[h], total[h]};
    __syncthreads();
    if (threadIdx.x < GROUP) {
        float highest = NEVER, sum = 0;
        for (int t = 0; t < SUM_TEAMS; t++) highest = fmaxf(highest, parts[t][threadIdx.x].x);
        for (int t = 0; t < SUM_TEAMS; t++) {
            float2 part = parts[t][threadIdx.x];
            if (part.y > 0) sum += part.y * expf(part.x - highest);
        }
        to[threadIdx.x] = {highest, sum};
    }
}
