// Rerank candidates whose codes have one weight per subspace of 8 coordinates: estimate the product of query
// and key (ParisKV paper, B.2.2, equation 10). Reference: tiered_votes.rerank_blocks in kvindex/pariskv,
// kvindex.ops.rerank.estimate.
//
// As in rerank.cu, codes are decoded to float16 in registers and multiplied on tensor cores, with two float16
// numbers per query coordinate. Because each subspace has its own weight, its sum is needed separately. One
// product of 16 coordinates covers two subspaces. Four of its columns (one per head) have the query's
// coordinates of the even subspace, the other four columns have those of the odd subspace, and all other
// operands are zeros. A lane gets the sums of one subspace and multiplies them by the weight of this subspace.
//
// Grid: (splits, BG), 256 threads; a warp processes 16 candidates at a time.
// Reads the signs, magnitudes and weights of each candidate (with D = 128 and 3 bits: 16 + 48 + 32 bytes, in 4
// sectors) and writes 4 GROUP bytes.
// Limited by the latency of scattered reads. At most a third of the issue slots are in use (measured with
// Nsight Compute), at about 25 instructions of a warp per candidate (counted).
// Compile-time constants: D, BITS (of a magnitude), GROUP (query heads per KV head), SOFTCAP.
#include "common/levels.cuh"
#include "common/attention_weights.cuh"

constexpr int M = D / 8;
constexpr int WORDS = (M + 3) / 4;                     // words of a key's signs, and of each plane of its magnitudes
constexpr int STEPS = (M + 1) / 2;
constexpr int SETS = (GROUP + 3) / 4;                  // sets of 4 query heads
constexpr int SPAN = STEPS;                            // words of a key's weights, two bfloat16 numbers each

// The code of one key. Four neighboring lanes process a key together, and each of them loads the whole code.
// Lane t of the four (0 to 3) uses coordinates 2 t and 2 t + 1 of each subspace of 8 coordinates.
struct Key {
    u32 signs[WORDS], planes[BITS > 0 ? BITS : 1][WORDS], weights[SPAN];
};
template <int COUNT>
__device__ __forceinline__ void fetch(u32 (&words)[COUNT], const u32* from) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int w = 0; w < COUNT; w += 4) {
            uint4 all = __ldg(reinterpret_cast<const uint4*>(from + w));
            words[w] = all.x, words[w + 1] = all.y, words[w + 2] = all.z, words[w + 3] = all.w;
        }
    } else {
#pragma unroll
        for (int w = 0; w < COUNT; w++) words[w] = __ldg(from + w);
    }
}
__device__ __forceinline__ void load(Key& found, const char* block, i64 weights, i64 magnitudes, int key) {
    fetch(found.signs, reinterpret_cast<const u32*>(block) + key * WORDS);
    fetch(found.weights, reinterpret_cast<const u32*>(block + weights) + key * SPAN);
#pragma unroll
    for (int p = 0; p < BITS; p++)
        fetch(found.planes[p], reinterpret_cast<const u32*>(block + magnitudes) + (key * BITS + p) * WORDS);
}

// From each byte of a word, extract bits 2 t and 2 t + 1, where t = lane % 4. They become the lowest bits of
// the byte's two nibbles.
__device__ __forceinline__ u32 nibbles(u32 word) {
    word >>= threadIdx.x % 4 * 2;
    return (word & 0x01010101) | (word << 3 & 0x10101010);
}

// Decode two coordinates in each of the four subspaces whose bits are in word number `w` of a key's codes.
// pairs[i] becomes the coordinates 2 t and 2 t + 1 of subspace 4 * w + i, as two float16 numbers, where
// t = lane % 4.
__device__ __forceinline__ void decode(u32 (&pairs)[4], const Key& key, int w, const Levels& levels) {
    u32 indices = 0, signs = nibbles(~key.signs[w]), two[2];
    if (BITS == 3) {
#pragma unroll
        for (int p = 0; p < BITS; p++) indices |= nibbles(key.planes[p][w]) << p;
        four(two, indices, signs, levels);
        pairs[0] = two[0], pairs[1] = two[1];
        four(two, indices >> 16, signs >> 16, levels);
        pairs[2] = two[0], pairs[3] = two[1];
        return;
    }
    int shift = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int at = i / 2 * 8 + shift + i % 2, level = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++) level |= (key.planes[p][w] >> at & 1) << p;
        u32 value = levels.table[level] | (signs >> 4 * i & 1) << 15;
        pairs[i / 2] = i % 2 ? pairs[i / 2] | value << 16 : value;
    }
}

struct Arguments {
    const i64* codes;              // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                                   // head_bytes
    const uint2* operands;         // [BG, SETS, STEPS, 32]: written by query_table.cu, as is `ups`
    const float* ups;              // [BG, GROUP]
    const float* levels;           // [LEVELS]
    const int* candidate_counts;   // [BG] APART: written by candidates.cu, as is `candidates`
    const u64* candidates;         // [BG, capacity]
    float* estimates;              // [BG, capacity, GROUP]: estimated products of query and key
    u64* buckets;                  // [BG, GROUP, BUCKETS]: sums of exponentials over the candidates (attention_weights.cuh),
                                   // cleared before the launch
    i64 row, head_bytes, weights, magnitudes, capacity, kv_heads;
    float scale, softcap;
};

extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
rerank_blocks(const __grid_constant__ Arguments args) {
    const i64* table = args.codes;
    const u64* kept = args.candidates;
    float* estimates = args.estimates;
    u64* buckets = args.buckets;
    __shared__ u16 halves[LEVELS];
    __shared__ uint2 query_operands[SETS * STEPS * 32];
    i64 bg = blockIdx.y, batch = bg / args.kv_heads;
    int lane = threadIdx.x % 32, t = lane % 4, step = gridDim.x * 128;
    int start = (blockIdx.x * 8 + threadIdx.x / 32) * 16;
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(args.levels[i]);
    table += batch * args.row;
    kept += bg * args.capacity;
    estimates += bg * args.capacity * GROUP;
    buckets += bg * GROUP * BUCKETS;
    after_previous();
    let_next_begin();
    for (int i = threadIdx.x; i < SETS * STEPS * 32; i += 256)
        query_operands[i] = __ldcg(args.operands + bg * (SETS * STEPS * 32) + i);
    float down[SETS][2];
#pragma unroll
    for (int i = 0; i < SETS * 2; i++) {
        int h = i / 2 * 4 + t % 2 * 2 + i % 2;
        down[i / 2][i % 2] = h < GROUP ? 1 / __ldcg(args.ups + bg * GROUP + h) : 0.0f;
    }
    int n = args.candidate_counts[bg * APART];
    __syncthreads();
    Levels levels = levels_of(halves);
    Exponentials sums[SETS][2];
    bool later = t >= 2;  // this lane has the odd subspaces, and at the end the key 8 rows below

    auto entry_at = [&](int first) { return lane < 16 && first + lane < n ? kept[first + lane] : 0; };
    auto block_of = [&](u64 entry) {
        return entry ? u64(table[id_of(entry) / TOKENS]) + bg % args.kv_heads * args.head_bytes : 0;
    };
    u64 entry = entry_at(start), block = block_of(entry);
    for (; start < n; start += step) {
        u64 next = entry_at(start + step), next_block = block_of(next);
        Key keys[2];
        int ids[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int from = half * 8 + lane / 4;
            const char* at = reinterpret_cast<const char*>(__shfl_sync(ALL, block, from));
            ids[half] = __shfl_sync(ALL, entry ? id_of(entry) : -1, from);
            keys[half] = Key{};
            if (ids[half] >= 0) load(keys[half], at, args.weights, args.magnitudes, ids[half] % TOKENS);
        }
        float found[SETS][4] = {};
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 upper[4], lower[4];
            decode(upper, keys[0], w, levels);
            decode(lower, keys[1], w, levels);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = w * 2 + i;
                if (at >= STEPS) continue;
                float weight[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 both = keys[half].weights[at];  // where M is odd, the padding has operands of 0
                    weight[half] = __uint_as_float(later ? both & 0xffff0000u : both << 16);
                }
#pragma unroll
                for (int set = 0; set < SETS; set++) {
                    uint2 q = query_operands[(set * STEPS + at) * 32 + lane];
                    bool even = lane < 16;
                    float c[4] = {0, 0, 0, 0};
                    mma_halves(c, upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1],
                               even ? q.x : 0, even ? 0 : q.x);
                    mma_halves(c, upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1],
                               even ? q.y : 0, even ? 0 : q.y);
#pragma unroll
                    for (int j = 0; j < 4; j++) found[set][j] += weight[j / 2] * c[j];
                }
            }
        }
        int row_of = (later ? 8 : 0) + lane / 4, id = later ? ids[1] : ids[0];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float given = later ? found[set][side] : found[set][2 + side];
                float sum = (later ? found[set][2 + side] : found[set][side]) + __shfl_xor_sync(ALL, given, 2);
                int h = set * 4 + t % 2 * 2 + side;
                if (h >= GROUP || id < 0) continue;
                sum *= down[set][side];
                estimates[i64(start + row_of) * GROUP + h] = sum;
                sums[set][side].add(buckets + h * BUCKETS, capped(sum, args.scale, args.softcap));
            }
        entry = next, block = next_block;
    }
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int h = set * 4 + t % 2 * 2 + side;
            sums[set][side].flush<2>(buckets + (h < GROUP ? h : 0) * BUCKETS);
        }
}
