// Add up the attention weights of the resident rows (sink and window) for GROUP query heads of a KV head. The thread
// blocks that do this divide the rows among them. select_rows.cu and select_latents.cu merge their results
// (`with_residents` in row_budget.cuh). Used by prepare_query.cu and resident_latents.cu.
// The result does not depend on the order in which threads run. Reference: _resident_lse in
// kvindex/layer/retrieval.py.
//
// A team of SUM_LANES neighboring lanes reads the key of one row at a time, and loads the keys of its next
// SUM_AHEAD rows together. Each thread block reads its rows once: 2 D bytes per row for 16-bit numbers, usually
// from L2. Limited by the latency of these reads.
// Compile-time constants: D, GROUP, DTYPE, RAGGED (1: each sequence has its own count of rows), PAGED and FP8_PAGES (where
// the rows of an inference engine are, and in which format, as in attend.cu). D and the dimension
// of values are multiples of 8. With PAGED = 2, a key is read from the row cache if that has its row.
#pragma once
#include "common/common.cuh"
#if PAGED == 2
#include "common/row_cache.cuh"
#endif
#if FP8_PAGES
#include "common/fp8.cuh"
#endif

constexpr int SUM_LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32;
constexpr int SUM_TEAMS = 256 / SUM_LANES;                        // teams of a thread block
constexpr int SUM_CHUNKS = (D / 8 + SUM_LANES - 1) / SUM_LANES;   // chunks of 8 elements per lane
constexpr int SUM_AHEAD = SUM_CHUNKS > 1 ? 1 : DTYPE == 0 ? 2 : 4;  // rows that a team loads together
constexpr int SUM_WORDS = DTYPE == 0 && !FP8_PAGES ? 2 : 1;       // loads of 16 bytes (FP8_PAGES: 8) per chunk
constexpr int SUM_CHUNK_BYTES = FP8_PAGES ? 8 : DTYPE == 0 ? 32 : 16;

// Eight neighboring elements of a row, in the stored format.
struct Eight {
    uint4 words[SUM_WORDS];
    __device__ __forceinline__ float at(int i) const {
#if FP8_PAGES
        float four[4];  // divided by FP8_UNIT
        from_fp8(four, (&words[0].x)[i / 4]);
        return four[i % 4];
#elif DTYPE == 0
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
//     If PAGED, this is the number of the sequence too, and no sums are needed for a sequence that is not searched.
//   queries: the queries of the heads, DTYPE [GROUP, D].
//   to: receives the results, [GROUP].
//   staged: true if the newest token is in `args.token_keys` and counts as one more row.
//   split: number of this thread block among those that divide the rows.
//   memory: float32 [GROUP, D] in shared memory, and at least [GROUP, SUM_TEAMS, 2].
//   count: in shared memory. Receives the number of resident rows without the newest token.
template <class Arguments>
__device__ __forceinline__ void resident_sums(const Arguments& args, i64 bg, i64 batch, i64 entry, const void* queries,
                                              bool staged, int split, float* memory, i64* count, float2* to) {
    int team = threadIdx.x / SUM_LANES, member = threadIdx.x % SUM_LANES;
    if (threadIdx.x == 0) *count = __ldcg(args.resident_count + RAGGED * entry);
    for (int i = threadIdx.x; i < GROUP * D; i += 256) memory[i] = element(queries, i);
    __syncthreads();
#if PAGED
    // Sink and window are numbered together: row i is token i if it belongs to the sink, and otherwise i + later.
    int later = int(args.length[batch]), sinks = later ? int(args.sink) : 0, rows = later ? int(*count) : 0;
    i64 head = bg % args.kv_heads;
    float scale = args.scale;
#if FP8_PAGES
    scale *= FP8_UNIT * *args.key_scale;
#endif
    later -= sinks;
#else
    i64 width = D + args.value_dim;
    int known = int(*count), rows = int(min(*count + staged, args.room));
    float scale = args.scale;
#endif
    // Return whether row number `row` counts, and the address of its key. All lanes of a warp call this function.
    auto key_of = [&](int row, bool& seen) {
        seen = row < rows;
#if PAGED
        int id = !seen ? 0 : row < sinks ? row : later + row;
        i64 place = batch * args.row + id / TOKENS;
#if PAGED == 2
        int name = args.segments[place] * TOKENS + id % TOKENS;
        const int* tags = args.tags + head * args.cached;
        int slot = slot_of<SUM_LANES>(name, tag_of(name, tags, args.cached), args.cached);
        if (slot >= 0) return args.cache + (head * args.cached + slot) * args.row_bytes;
#endif
        return reinterpret_cast<const char*>(args.rows[place]) + head * args.rows_head_bytes + id % TOKENS * args.row_bytes;
#else
        seen = seen && args.resident_mask[batch * args.room + row];
        bool stored = row < known;
        i64 at = stored ? (bg * args.room + row) * width : bg * D;
        return static_cast<const char*>(stored ? args.resident : args.token_keys) + at * (DTYPE == 0 ? 4 : 2);
#endif
    };
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
            const char* key = key_of(own + from + a * step, seen[a]);
#pragma unroll
            for (int j = 0; j < SUM_CHUNKS; j++) {
                int chunk = member + j * SUM_LANES;
                if (chunk >= D / 8 || !seen[a]) continue;
                const char* from_key = key + chunk * SUM_CHUNK_BYTES;
#if FP8_PAGES
                uint2 half = __ldcg(reinterpret_cast<const uint2*>(from_key));
                chunks[a][j].words[0] = {half.x, half.y, 0, 0};
#else
#pragma unroll
                for (int w = 0; w < SUM_WORDS; w++)
                    chunks[a][j].words[w] = __ldcg(reinterpret_cast<const uint4*>(from_key) + w);
#endif
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
                float logit = dot * scale;
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
