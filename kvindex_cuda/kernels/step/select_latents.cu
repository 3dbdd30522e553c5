// Select the k candidates with the highest attention weights, combined over the many query heads of a group
// (latent attention). Reference: select_rows in kvindex/pariskv/decode_step.py, kvindex.ops.group.agree.
//
// Each warp computes the combined attention weight of one candidate at a time, with the heads divided among its
// lanes. The thread block that finishes last selects the k candidates: it makes a histogram of the weights,
// finds the bin that contains the k-th best candidate, and sorts the candidates in this bin.
// With SAMPLING, rows are sampled at random (kvindex/ops/priority.py): candidates are ranked by the root mean
// square of the heads' attention weights, multiplied by noise. The (k + 1)-th candidate is the threshold, and
// each selected row gets a weight for the rows that it stands for.
// With COUNTS, the last thread block first chooses the smallest of COUNTS numbers of rows for which the expected
// error of attention is within a limit (row_budget.cuh). Attention weights are then those among all tokens that the
// query attends to, sink and window included.
// Compile-time constants: HEADS (query heads of the group), SOFTCAP, POLICY (0: mean_share, the mean attention
// weight of the heads; 1: max_share, the largest), SAMPLING, COUNTS (how many numbers of rows there are to choose
// from; 0: always k rows. Only with SAMPLING).
#include "common/attention_weights.cuh"
#if SAMPLING
#include "common/noise.cuh"
#endif
#if COUNTS
#define GROUP HEADS
#include "common/row_budget.cuh"
#endif

constexpr int HELD = 4;  // candidates that each thread of the last block keeps in registers
constexpr int SORTED = 2 * EDGE;  // rows that are sorted by their ids

struct Arguments {
    const float* estimates;       // written by estimate_latents.cu, as are totals, candidates and their counts, and
                                  // cuts
    const float* totals;
    const u64* candidates;
    const int* candidate_counts;
    const int2* cuts;
    const u32* seeds;             // [B]: seed of the noise, written by prepare_latents.cu, or null
    u64* words;                   // [B, capacity]: scores and ids of candidates
    float* candidate_weights;     // [B, capacity]: log weights of candidates; only if SAMPLING, as are weights
    int* histogram;               // [B, BINS]: number of candidates by score, cleared before the launch
    int* tickets;                 // [B] APART: counts finished thread blocks, cleared before the launch
    i64* ids;                     // [B, k]: ids of the selected rows, ascending (if more than 2,048, in any order); the
                                  // first `found` are set
    float* scores;                // [B, k]: their group scores
    float* weights;               // [B, k]: logarithm of the number of keys that a row stands for
    int* found;                   // [B]: number of selected rows
    i64* found_sum;               // [B]: increased by `found`, or null
    const float* variances;       // [B]: largest allowed variance of the attention weights; only if COUNTS, as are
                                  // resident_parts, limit_lse and found_histogram
    const float2* resident_parts;  // [B, resident_splits, HEADS]: written by resident_latents.cu
    const float* limit_lse;       // [B, HEADS]: log Σ exp of the logits of further tokens that the query attends to,
                                  // or null
    i64* found_histogram;         // [most_found + 1]: entry n counts the KV heads that got n rows, and the last entry
                                  // those that got `most_found` or more; or null
    i64 resident_splits, most_found;
    i64 k, capacity;
    float scale, softcap, temper;  // temper: factor for the logarithms of weights
};

// Grid: (thread blocks per sequence, B), THREADS threads. Reads 8 + 4 HEADS bytes per candidate, writes 8 bytes per candidate.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
select_latents(const __grid_constant__ Arguments args) {
    __shared__ float totals[HEADS];
    __shared__ u64 edge[EDGE];
    __shared__ __align__(16) int selected[SORTED];
    __shared__ float selected_scores[SORTED];
    __shared__ int bins[256], edges, taken;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 b = blockIdx.y;
    after_previous();
    let_next_begin();
    int n = __ldcg(args.candidate_counts + b * APART);
    const float* estimates = args.estimates + b * args.capacity * HEADS;
    const u64* candidates = args.candidates + b * args.capacity;
    u64* words = args.words + b * args.capacity;
    int* histogram = args.histogram + b * BINS;
#if COUNTS
    for (int h = warp; h < HEADS; h += THREADS / 32) {  // one part of the resident rows per lane
        float2 part = {NEVER, 0};
        if (lane < int(args.resident_splits))
            part = __ldcg(args.resident_parts + (b * args.resident_splits + lane) * HEADS + h);
        const float* more = args.limit_lse ? args.limit_lse + b * HEADS + h : nullptr;
        float total = with_residents(__ldcg(args.totals + b * HEADS + h), part, more);
        if (lane == 0) totals[h] = total;
    }
#else
    for (int h = threadIdx.x; h < HEADS; h += THREADS) totals[h] = __ldcg(args.totals + b * HEADS + h);
#endif
    if (threadIdx.x == 0) edges = taken = 0;
    for (int i = threadIdx.x; i < SORTED; i += THREADS) selected[i] = 2147483647;  // larger than any row
#if SAMPLING
    __shared__ float selected_weights[SORTED], edge_weights[EDGE], threshold;
    u32 seed = __ldcg(args.seeds + b);
    int least = __ldcg(&args.cuts[b].x);
    float* candidate_weights = args.candidate_weights + b * args.capacity;
    if (threadIdx.x == 0) threshold = NEVER;
#endif
    __syncthreads();
    constexpr int EACH = (HEADS + 31) / 32;
#pragma unroll 2
    for (int i = blockIdx.x * (THREADS / 32) + warp; i < n; i += gridDim.x * (THREADS / 32)) {
        float each[EACH], best = NEVER, sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int h = j * 32 + lane;
            each[j] = NEVER;
            if (h < HEADS) each[j] = capped(__ldcg(estimates + i64(i) * HEADS + h), args.scale, args.softcap) - totals[h];
            best = fmaxf(best, each[j]);
        }
        float value = warp_max(best);
#if SAMPLING || POLICY == 0
        constexpr float POWER = SAMPLING ? 2 : 1;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (each[j] > NEVER) sum += exp2f((each[j] - value) * (POWER * LOG2E));
        value += log2f(warp_sum(sum) * (1.0f / HEADS)) * (1 / (POWER * LOG2E));
#endif
        if (lane) continue;
        u64 entry = __ldcg(candidates + i);
#if SAMPLING
        value += noise_of(id_of(entry), seed) * NATS;
        candidate_weights[i] = log_weight(vote_of(entry), id_of(entry), seed, least);
#endif
        words[i] = u64(ordered(value)) << 32 | u32(entry);
        atomicAdd(histogram + bin_of(value), 1);
    }
    if (!last_block(args.tickets + b * APART, gridDim.x)) return;

    auto value_of = [](u64 word) { return from_ordered(u32(word >> 32)); };
    i64* ids = args.ids + b * args.k;
    float* scores = args.scores + b * args.k;
    int asked = int(args.k) + SAMPLING;  // the priority of the last one is the threshold
    auto weight_of = [&](int i) {
#if SAMPLING
        return __ldcg(candidate_weights + i);
#else
        return 0.0f;
#endif
    };
    u64 held[HELD];  // loaded while the threshold is found
    float held_weights[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = j * THREADS + threadIdx.x;
        held[j] = i < n ? __ldcg(words + i) : 0, held_weights[j] = i < n ? weight_of(i) : 0;
    }
    Cut cut = {-1, 0};
    if (!COUNTS) cut = cut_of<false, THREADS>(histogram, asked);
#if SAMPLING
    float temper = args.temper;
#endif
#if COUNTS
    __shared__ Budget budget;
    auto every = [&](auto inside, auto use) {
        auto one = [&](u64 word, float weight) {
            int bin = bin_of(value_of(word));
            if (inside(bin)) use(word, bin, weight);
        };
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (j * THREADS + threadIdx.x < n) one(held[j], held_weights[j]);
#pragma unroll 1
        for (int i = HELD * THREADS + threadIdx.x; i < n; i += THREADS) one(__ldcg(words + i), weight_of(i));
    };
    float variance = args.variances[b];
    Choice choice = choose_rows<false>(budget, histogram, int(args.k), variance, edge, edges, bins, seed, every);
    asked = choice.rows + 1, cut = choice.cut;
    if (temper < 1) temper = 1 - 1 / sqrtf(float(choice.rows));
#endif
    auto select = [&](u64 word, float weight) {
        int slot = atomicAdd(&taken, 1), id = id_of(word);
        if (slot < SORTED)
            selected[slot] = id, selected_scores[slot] = value_of(word);
        else
            ids[slot] = id, scores[slot] = value_of(word);
#if SAMPLING
        (slot < SORTED ? selected_weights + slot : args.weights + b * args.k + slot)[0] = weight;
#endif
    };
    // If SAMPLING, the k + 1 rows with the best scores are found, but the last of them is not selected. Its score
    // becomes the threshold of the sampling.
    auto take = [&](u64 word, float weight, bool last) {
#if SAMPLING
        if (last) threshold = value_of(word);
        if (last) return;
#endif
        select(word, weight);
    };
    auto divide = [&](u64 word, float weight) {
        int bin = bin_of(value_of(word));
        if (bin > cut.bin) select(word, weight);
        if (bin != cut.bin) return;
        int slot = atomicAdd(&edges, 1);
        if (slot >= EDGE) return;
        edge[slot] = word;
#if SAMPLING
        edge_weights[slot] = weight;
#endif
    };
#pragma unroll
    for (int j = 0; j < HELD; j++)
        if (j * THREADS + threadIdx.x < n) divide(held[j], held_weights[j]);
#pragma unroll 1
    for (int i = HELD * THREADS + threadIdx.x; i < n; i += THREADS) divide(__ldcg(words + i), weight_of(i));
    __syncthreads();
    int rank = asked - cut.above;
    if (edges <= EDGE) {
        for (int i = threadIdx.x; i < edges; i += THREADS) {
            int better = 0;
            float weight = 0;
            for (int j = 0; j < edges; j++) better += edge[j] > edge[i];
#if SAMPLING
            weight = edge_weights[i];
#endif
            if (better < rank) take(edge[i], weight, better == rank - 1);
        }
    } else {  // nearly all rows have equal scores: a slow path
        auto all = [&](auto use) {
            for (int i = threadIdx.x; i < n; i += THREADS) use(__ldcg(words + i));
        };
        u64 last = radix_cut(all, asked, bins);
        for (int i = threadIdx.x; i < n; i += THREADS) {
            u64 word = __ldcg(words + i);
            if (bin_of(value_of(word)) == cut.bin && word >= last) take(word, weight_of(i), word == last);
        }
    }
    __syncthreads();
    int rows = taken, sorted = min(rows, SORTED);
#if SAMPLING
    // Log weight of a sampled row: `temper` · max(−log π₁, −log π₂). Here π₁ is the probability with which the
    // key became a candidate, and π₂ the probability with which the candidate was selected. The factor `temper`
    // is 1 for unbiased weights, and smaller for tempered sampling.
    float* weights = args.weights + b * args.k;
    auto weigh = [&](float& weight, int id, float score) {
        weight = fmaxf(weight, threshold - (score - noise_of(id, seed) * NATS)) * temper;
    };
    for (int i = SORTED + threadIdx.x; i < rows; i += THREADS) weigh(weights[i], int(ids[i]), scores[i]);
    for (int i = threadIdx.x; i < sorted; i += THREADS) weigh(selected_weights[i], selected[i], selected_scores[i]);
    __syncthreads();
#endif
    if (threadIdx.x == 0) {
        args.found[b] = rows;
        if (args.found_sum) args.found_sum[b] += rows;
#if COUNTS
        if (args.found_histogram)
            atomicAdd(reinterpret_cast<u64*>(args.found_histogram + min(i64(rows), args.most_found)), u64(1));
#endif
    }
    // Sort the selected rows by token id, so that attention always adds them up in the same order. Four lanes
    // per row count the rows with lower ids.
    for (int at = threadIdx.x; at < (sorted + 7) / 8 * 32; at += THREADS) {
        int i = at / 4, id = selected[i], place = 0;
#pragma unroll 4
        for (int j = at % 4 * 4; j < sorted; j += 16) {
            int4 four = *reinterpret_cast<const int4*>(selected + j);
            place += (four.x < id) + (four.y < id) + (four.z < id) + (four.w < id);
        }
        place += __shfl_xor_sync(ALL, place, 1);
        place += __shfl_xor_sync(ALL, place, 2);
        if (at % 4 == 0 && i < sorted) ids[place] = id, scores[place] = selected_scores[i];
#if SAMPLING
        if (at % 4 == 0 && i < sorted) weights[place] = selected_weights[i];
#endif
    }
}
