// Select the k candidates with the highest attention weights, combined over the query heads of a group, for
// attention to read. Reference: select_rows in kvindex/pariskv/decode_step.py, kvindex.ops.group.agree.
//
// 1. Find the candidates, the C entries with the highest approximate scores (votes). All entries in higher
// histogram bins than the C-th best entry are candidates. Entries in the same bin as that entry are sorted.
// 2. For each head, compute log Σ exp of the estimated logits of all candidates. A logit minus this number is
// the logarithm of the candidate's estimated attention weight.
// 3. Combine the heads, make a histogram of the combined weights, find the bin that contains the k-th best
// candidate, and sort that bin.
// With SAMPLING, rows are sampled at random (kvindex/ops/priority.py): candidates are ranked by the root mean
// square of the heads' attention weights, multiplied by noise. The (k + 1)-th candidate is the threshold, and
// each selected row gets a weight for the rows that it stands for.
// With COUNTS, each KV head gets the smallest of COUNTS numbers of rows for which the expected error of attention is
// within a limit (row_budget.cuh). The number is chosen between steps 2 and 3, before any row is read, and replaces
// k. Attention weights are then those among all tokens that the query attends to, sink and window included.
//
// Limited by latency: a chain of dependent reads and barriers, with few thread blocks.
// This file is longer than most because it is one kernel, whose steps process entries that stay in registers.
// Compile-time constants: GROUP (query heads per KV head), SOFTCAP, POLICY (0: mean_share, the mean attention
// weight of the heads; 1: max_share, the largest), SAMPLING, COUNTS (how many numbers of rows there are to choose
// from; 0: always k rows. Only with SAMPLING).
#include "common/row_cache.cuh"
#include "common/attention_weights.cuh"
#include "common/in_order.cuh"
#if SAMPLING
#include "common/noise.cuh"
#endif

// Load the estimates of one candidate for all heads.
__device__ __forceinline__ void load_row(float (&row)[GROUP], const float* from) {
    constexpr int ONCE = GROUP % 4 == 0 ? 4 : GROUP % 2 == 0 ? 2 : 1;
    struct __align__(4 * ONCE) Some {
        float each[ONCE];
    };
#pragma unroll
    for (int i = 0; i < GROUP / ONCE; i++) {
        Some some = reinterpret_cast<const Some*>(from)[i];
#pragma unroll
        for (int j = 0; j < ONCE; j++) row[i * ONCE + j] = some.each[j];
    }
}

// buckets of a head that each lane loads
constexpr int OWN = BUCKETS / 32;
__device__ __forceinline__ void load_sums(u64 (&sums)[OWN], const u64* buckets) {
#pragma unroll
    for (int i = 0; i < OWN; i++) sums[i] = __ldcg(buckets + threadIdx.x % 32 * OWN + i);
}

// Return log Σ exp(logit) over all C candidates of a head, in every lane. The candidates are in two groups. The
// second group are the candidates in the histogram bin that contains the C-th best coarse score. The first
// group are the candidates in higher bins: rerank.cu has already added up their exponentials in the buckets
// `mine` (attention_weights.cuh). The argument `each` is a function that iterates over the second group:
// each(use) calls use(logit) for each candidate of the lane.
template <class Each>
__device__ __forceinline__ float log_sum(const u64 (&mine)[OWN], Each each) {
    int lane = threadIdx.x % 32, top = -1;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (mine[i]) top = lane * OWN + i;
    float peak = NEVER;  // the largest logit in the threshold's bin, in octaves
    each([&](float logit) { peak = fmaxf(peak, logit * LOG2E); });
    top = warp_max(top);
    peak = warp_max(peak);
    float octaves = fmaxf(top < 0 ? NEVER : 16.0f * (top - BUCKETS / 2 + 1), peak), sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (mine[i])
            sum += float(mine[i]) * exp2f(16.0f * (lane * OWN + i - BUCKETS / 2) - FRACTION_BITS - octaves);
    u64 edge = 0;
    each([&](float logit) { edge += u64(exp2f(logit * LOG2E - octaves) * 4294967296.0f); });
    sum = warp_sum(sum) + float(warp_sum(edge)) * (1 / 4294967296.0f);
    return (log2f(sum) + octaves) * (1 / LOG2E);
}

// A candidate's score for all query heads that share a KV head (a group). If the group has one head and rows are
// not sampled, `value` is the estimated inner product. Otherwise it is the logarithm of the combined attention
// weight (kvindex/ops/group.py). `bin` is the histogram bin of the attention weight.
struct GroupScore {
    float value;
    int bin;
};
__device__ __forceinline__ GroupScore group_score(const float (&estimates)[GROUP], const float* totals,
                                         float scale, float softcap) {
    float each[GROUP], best = NEVER;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        each[h] = capped(estimates[h], scale, softcap) - totals[h];
        best = fmaxf(best, each[h]);
    }
    if (GROUP == 1 && !SAMPLING) return {estimates[0], bin_of(best)};
#if SAMPLING
    float sum = 0;
#pragma unroll
    for (int h = 0; h < GROUP; h++) sum += exp2f((each[h] - best) * (2 * LOG2E));
    best += __log2f(sum * (1.0f / GROUP)) * (0.5f / LOG2E);
#elif POLICY == 0
    float sum = 0;
#pragma unroll
    for (int h = 0; h < GROUP; h++) sum += exp2f((each[h] - best) * LOG2E);
    best += __log2f(sum * (1.0f / GROUP)) * (1 / LOG2E);
#endif
    return {best, bin_of(best)};
}

constexpr int ROWS = 2 * EDGE;      // rows that are sorted by their ids
constexpr bool EARLY = GROUP <= 4;  // true if registers store all estimates from the start
constexpr int SOME = EARLY ? ENTRIES : GROUP <= 8 ? 4 : 1;  // entries whose estimates are loaded at a time
static_assert(GROUP <= THREADS / 32, "a warp for each head");

#if COUNTS
#include "common/row_budget.cuh"
#endif

struct Arguments {
    const float* estimates;
    const u64* buckets;
    const int* wanted;
    const int* counted;
    const int* bases;
    const int* shifts;
    const int* counts;
    const u64* candidates;
    const int* candidate_counts;
    const int2* cuts;
    const u64* edge;
    const float* edge_estimates;
    const int* edge_counts;
    u64* finalists;         // [BG, capacity]: what each thread block passes to the last one
    int* finalist_counts;   // [BG] APART: number of finalists, cleared before the launch
    int* tickets;           // [BG] APART: counts finished thread blocks, cleared before the launch
    i64* ids;               // [BG, k]: ids of the selected rows, ascending (if more than 2,048, in any order); the
                            // first `found` are set
    float* scores;          // [BG, k]: their group scores
    int* found;             // [BG]: number of selected rows
    i64* found_sum;         // [BG]: increased by `found`, or null
    const int* tags;        // [BG, cached]: rows in the cache that attend.cu will use, one id per slot (row_cache.py;
                            // `cached` is 0 without a cache)
    const int* stamps;      // [BG, cached]: time stamps of these slots
    float* finalist_weights;  // [BG, capacity]: only if SAMPLING, as are weights and seeds
    float* weights;         // [BG, k]: logarithm of the number of keys that a row stands for
    const u32* seeds;       // [BG]: seed of the noise
    const float* variances;       // [BG]: largest allowed variance of the attention weights; only if COUNTS, as are
                                  // resident_parts, limit_lse and found_histogram
    const float2* resident_parts;  // [BG, resident_splits, GROUP]: written by prepare_query.cu (resident_sums.cuh)
    const float* limit_lse;       // [BG, GROUP]: log Σ exp of the logits of further tokens that the query attends to,
                                  // or null
    i64* found_histogram;         // [most_found + 1]: entry n counts the KV heads that got n rows, and the last entry
                                  // those that got `most_found` or more; or null
    i64 resident_splits, most_found;
    int* signals;           // counts finished thread blocks of the previous kernel, and is set once a group's rows are
                            // selected (common.cuh)
    i64 cached;
    i64 signalers;          // thread blocks per group of the previous kernel, or 0 if that kernel does not signal
    i64 k, capacity, kv_heads;
    float scale, softcap, temper;  // temper: factor for the logarithms of weights
};

// Grid: (BG, splits), THREADS threads; splits · THREADS · ENTRIES must be at least `capacity`, the largest
// number of list entries that a group can have. Thread blocks without list entries end immediately.
// The kernel reads 8 + 4 GROUP bytes for each list entry. rerank.cu or rerank_blocks.cu has written these
// entries. If a group has several thread blocks, each passes its k best candidates to the thread block that
// finishes last. This thread block selects the k best candidates of the group.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
select_rows(const __grid_constant__ Arguments args) {
    const float* estimates = args.estimates;
    const u64* buckets = args.buckets;
    const u64* kept = args.candidates;
    const u64* all_edge = args.edge;
    const float* edge_estimates = args.edge_estimates;
    u64* finalists = args.finalists;
    i64* ids = args.ids;
    float* scores = args.scores;
    __shared__ float totals[GROUP];
    __shared__ __align__(16) int histogram[BINS];
    __shared__ u64 edge[EDGE];
    __shared__ int order[EDGE];  // order of the entries in the threshold's bin, best first; also used for digits
    __shared__ __align__(16) int selected[ROWS];
    __shared__ float selected_scores[ROWS];
    __shared__ u64 least;
    __shared__ int edges, taken;
#if SAMPLING
    // Shared memory for random sampling. `selected_weights`: log weights of the selected rows, from the earlier
    // phase in which the rows were sampled as candidates. `threshold`: all selected rows have higher scores.
    __shared__ float selected_weights[ROWS], threshold;
    float* edge_weights = reinterpret_cast<float*>(order);
    if (threadIdx.x == 0) threshold = NEVER;
    u32 seed = __ldcg(args.seeds + blockIdx.x);
    float weights[ENTRIES];
#endif
    u32 bg = blockIdx.x, batch = bg / u32(args.kv_heads);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, target = min(args.wanted[batch], args.counted[batch]);
    for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
    for (int i = threadIdx.x; i < ROWS; i += THREADS) selected[i] = 2147483647;  // larger than any row
    if (threadIdx.x == 0) edges = taken = 0, least = 0;
    Cutoff cutoff = {__ldcg(args.bases + bg), __ldcg(args.shifts + bg), -1};
    estimates += bg * args.capacity * GROUP;
    edge_estimates += bg * (EDGE * GROUP);
    all_edge += bg * EDGE;
    buckets += bg * (GROUP * BUCKETS);
    kept += bg * args.capacity;
    if (!args.signalers) after_previous();
    let_next_begin();
    if (args.signalers) await(args.signals + (gridDim.x + bg) * APART, int(args.signalers));
    int first = blockIdx.y * (THREADS * ENTRIES) + threadIdx.x;
    // Issue all independent reads first, so that their latencies overlap. Several thread blocks share the
    // candidates of one KV head. The first of them starts to read the list of candidates before it knows the
    // length `n` of the list. It reads as many entries as it can process, and later ignores the entries beyond
    // `n`. `many` is the number of entries in the histogram bin of the last candidate.
    int n = args.candidate_counts[bg * APART], many = args.edge_counts[bg * APART], listed = args.counts[bg * APART];
    int2 cut_at = args.cuts[bg];
    int known = blockIdx.y ? n : int(min(args.capacity, i64(THREADS * ENTRIES)));
    u64 words[ENTRIES];
    float each[SOME][GROUP];
    auto load = [&](float (&row)[GROUP], int i, int n) {
        if (first + i * THREADS < n) load_row(row, estimates + i64(first + i * THREADS) * GROUP);
    };
#pragma unroll
    for (int i = 0; i < ENTRIES; i++)
        words[i] = first + i * THREADS < known ? kept[first + i * THREADS] : 0;
#pragma unroll
    for (int i = 0; i < (EARLY ? ENTRIES : 0); i++) load(each[i], i, known);
#if COUNTS
    float variance = args.variances[bg];
    float2 parts_of_head = {NEVER, 0};  // of the resident rows; one part per lane
#endif
    u64 sums[OWN] = {}, my_edge = 0;
    float my_estimate = 0;
    if (warp < GROUP) {
        my_edge = all_edge[lane], my_estimate = edge_estimates[lane * GROUP + warp];
        load_sums(sums, buckets + warp * BUCKETS);
#if COUNTS
        if (lane < int(args.resident_splits))
            parts_of_head = __ldcg(args.resident_parts + (bg * args.resident_splits + lane) * GROUP + warp);
#endif
    }
    int blocks = max(1, (n + THREADS * ENTRIES - 1) / (THREADS * ENTRIES)), rank = target;
    if (int(blockIdx.y) >= blocks) return after_previous();
    if (!SAMPLING && listed > target) cutoff.bin = cut_at.x, rank -= cut_at.y;

    // The C entries with the best coarse scores are the candidates. Find the last of them: sort only those
    // entries that are in the same histogram bin. Also add up the exponentials of the logits of all C candidates.
    auto edge_logit = [&](float estimate) { return capped(estimate, args.scale, args.softcap); };
    if (many <= 32) {  // the usual case: one warp per head
        if (warp < GROUP) {
            __syncwarp();  // `least` has been set to 0
            int better = 0;
            for (int j = 0; j < many; j++) better += __shfl_sync(ALL, my_edge, j) > my_edge;
            bool in = lane < many && better < rank;
            if (warp == 0 && in && better == rank - 1) least = my_edge;
            float total = log_sum(sums, [&](auto use) {
                if (in) use(edge_logit(my_estimate));
            });
#if COUNTS
            total = with_residents(total, parts_of_head, args.limit_lse ? args.limit_lse + bg * GROUP + warp : nullptr);
#endif
            if (lane == 0) totals[warp] = total;
        }
    } else if (many <= EDGE) {
#pragma unroll 1
        for (int i = threadIdx.x; i < many; i += THREADS) edge[i] = all_edge[i];
        __syncthreads();
        in_order(edge, many, [&](int i, int better) {
            order[better] = i;
            if (better == rank - 1) least = edge[i];
        });
        __syncthreads();
        if (warp < GROUP) {
            float total = log_sum(sums, [&](auto use) {
#pragma unroll 1
                for (int j = lane; j < min(rank, many); j += 32)
                    use(edge_logit(edge_estimates[order[j] * GROUP + warp]));
            });
            if (lane == 0) totals[warp] = total;
        }
    } else {  // nearly all keys have equal votes: a slow path
        u64* more = reinterpret_cast<u64*>(histogram);
        constexpr int HEADS = BINS / 2 / BUCKETS;  // heads whose buckets fit into the histogram's memory
        auto all = [&](auto use) {
            for (int i = threadIdx.x; i < n; i += THREADS) use(kept[i]);
        };
        u64 word = radix_cut(all, target, order);
        for (int from = 0; from < GROUP; from += HEADS) {
            for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += THREADS)
                if (cutoff.side(kept[i]) == 0 && kept[i] >= word)
                    for (int h = from; h < min(from + HEADS, GROUP); h++) {
                        Exponentials one;
                        one.add(nullptr, edge_logit(estimates[i64(i) * GROUP + h]));
                        one.write(more + (h - from) * BUCKETS);
                    }
            __syncthreads();
            int h = from + warp;
            if (warp < HEADS && h < GROUP) {
                load_sums(sums, buckets + h * BUCKETS);
                for (int i = 0; i < OWN; i++) sums[i] += more[warp * BUCKETS + lane * OWN + i];
                float total = log_sum(sums, [](auto) {});
                if (lane == 0) totals[h] = total;
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
        if (threadIdx.x == 0) least = word;
    }
    __syncthreads();

    // Process the entries of the list. If an entry is a candidate, replace it by its token id and the score that
    // combines all query heads of the group. Otherwise, replace it by 0.
    u64 lowest = least;
    u32 bins[ENTRIES / 2] = {};  // bins of two entries per word
    auto set_bin = [&](int i, int bin) { bins[i / 2] |= u32(bin) << i % 2 * 16; };
    auto bin_at = [&](int i) { return int(bins[i / 2] >> i % 2 * 16 & 0xffff); };
#pragma unroll
    for (int from = 0; from < ENTRIES; from += SOME) {
#pragma unroll
        for (int i = 0; i < (EARLY ? 0 : SOME); i++) load(each[i], from + i, n);
#pragma unroll
        for (int i = 0; i < SOME; i++) {
            u64& word = words[from + i];
            int side = first + (from + i) * THREADS >= n ? -1 : SAMPLING ? 1 : cutoff.side(word);
#if SAMPLING
            float noise = 0;
            if (side > 0) {
                weights[from + i] = log_weight(vote_of(word), id_of(word), seed, cut_at.x);
                noise = noise_of(id_of(word), seed) * NATS;
            }
#endif
            if (side > 0 || (side == 0 && word >= lowest)) {
                GroupScore both = group_score(each[i], totals, args.scale, args.softcap);
#if SAMPLING
                both.value += noise, both.bin = bin_of(both.value);
#endif
                word = u64(ordered(both.value)) << 32 | u32(word);
                set_bin(from + i, both.bin);
                atomicAdd(histogram + both.bin, 1);
            } else {
                word = 0;
            }
        }
    }
    __syncthreads();
    finalists += bg * args.capacity;
    ids += bg * args.k;
    scores += bg * args.k;
    int asked = int(args.k) + SAMPLING;  // the priority of the last one is the threshold
    Cut cut = {-1, 0};
    if (!COUNTS) cut = cut_of<true, THREADS>(histogram, asked);
    auto value_of = [](u64 word) { return from_ordered(u32(word >> 32)); };
    auto bin_in = [&](u64 word) {
        float value = value_of(word);
        return bin_of(GROUP == 1 && !SAMPLING ? capped(value, args.scale, args.softcap) - totals[0] : value);
    };
    int last_many = 0;
    if (blocks > 1) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; i++) {
            if (!COUNTS && bin_at(i) < cut.bin) words[i] = 0;  // with COUNTS, all of them are needed
            count += words[i] != 0;
        }
        int to = room_for<THREADS>(count, args.finalist_counts + bg * APART);
#pragma unroll
        for (int i = 0; i < ENTRIES; i++)
            if (words[i]) {
#if SAMPLING
                args.finalist_weights[bg * args.capacity + to] = weights[i];
#endif
                finalists[to++] = words[i];
            }
        for (int i = threadIdx.x; i < BINS; i += THREADS) histogram[i] = 0;
        if (!last_block(args.tickets + bg * APART, blocks)) return after_previous();
        last_many = __ldcg(args.finalist_counts + bg * APART);
#pragma unroll
        for (int i = 0; i < ENTRIES; i++) {
            int at = i * THREADS + threadIdx.x;
            words[i] = at < last_many ? __ldcg(finalists + at) : 0;
#if SAMPLING
            weights[i] = at < last_many ? __ldcg(args.finalist_weights + bg * args.capacity + at) : 0.0f;
#endif
        }
#pragma unroll
        for (int i = 0; i < ENTRIES / 2; i++) bins[i] = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; i++)
            if (words[i]) {
                int bin = bin_in(words[i]);
                set_bin(i, bin);
                atomicAdd(histogram + bin, 1);
            }
        for (int at = ENTRIES * THREADS + threadIdx.x; at < last_many; at += THREADS)
            atomicAdd(histogram + bin_in(__ldcg(finalists + at)), 1);
        __syncthreads();
        if (!COUNTS) cut = cut_of<true, THREADS>(histogram, asked);
    }
    // For each entry of this thread, call use(word, bin, weight) if inside(bin) is true. `bin` is the entry's
    // bin in the histogram.
    auto every = [&](auto inside, auto use) {
        u32 some = 0;
#pragma unroll
        for (int i = 0; i < ENTRIES; i++) some |= u32(words[i] && inside(bin_at(i))) << i;
        for (; some; some &= some - 1) {
            u64 word = words[0];
            int now = __ffs(some) - 1, bin = bin_at(0);
            float weight = 0;
#if SAMPLING
            weight = weights[0];
#endif
#pragma unroll
            for (int i = 1; i < ENTRIES; i++)
                if (i == now) {
                    word = words[i], bin = bin_at(i);
#if SAMPLING
                    weight = weights[i];
#endif
                }
            use(word, bin, weight);
        }
        for (int at = ENTRIES * THREADS + threadIdx.x; at < last_many; at += THREADS) {
            u64 word = __ldcg(finalists + at);
            int bin = bin_in(word);
            float weight = 0;
#if SAMPLING
            weight = __ldcg(args.finalist_weights + bg * args.capacity + at);
#endif
            if (inside(bin)) use(word, bin, weight);
        }
    };
#if SAMPLING
    float temper = args.temper;
#endif
#if COUNTS
    __shared__ Budget budget;
    Choice choice = choose_rows<true>(budget, histogram, int(args.k), variance, edge, edges, order, seed, every);
    asked = choice.rows + 1, cut = choice.cut;
    if (temper < 1) temper = 1 - 1 / sqrtf(float(choice.rows));
#endif
    auto select = [&](u64 word, float weight) {
        int slot = atomicAdd(&taken, 1), id = id_of(word);
        if (args.cached) expect_look_up(id, args.tags + bg * args.cached, args.stamps + bg * args.cached, args.cached);
        if (slot < ROWS)
            selected[slot] = id, selected_scores[slot] = value_of(word);
        else
            ids[slot] = id, scores[slot] = value_of(word);
#if SAMPLING
        (slot < ROWS ? selected_weights + slot : args.weights + bg * args.k + slot)[0] = weight;
#endif
    };
    every([&](int bin) { return bin >= cut.bin; }, [&](u64 word, int bin, float weight) {
        if (bin > cut.bin) return select(word, weight);
        int slot = atomicAdd(&edges, 1);
        if (slot < EDGE) edge[slot] = word;
#if SAMPLING
        if (slot < EDGE) edge_weights[slot] = weight;
#endif
    });
    __syncthreads();
    rank = asked - cut.above;
    // With SAMPLING, find the k + 1 rows with the highest priorities. The first k are selected. The priority of the
    // last one is the threshold, from which the sampling probabilities are computed.
    auto take = [&](u64 word, float weight, bool last) {
#if SAMPLING
        if (last) threshold = value_of(word);
        if (last) return;
#endif
        select(word, weight);
    };
    if (edges > EDGE) {
        auto all = [&](auto use) { every([](int) { return true; }, [&](u64 word, int, float) { use(word); }); };
        u64 word = radix_cut(all, asked, order);
        every([&](int bin) { return bin == cut.bin; }, [&](u64 other, int, float weight) {
            if (other >= word) take(other, weight, other == word);
        });
    } else {
        in_order(edge, edges, [&](int i, int better) {
            float weight = 0;
#if SAMPLING
            weight = edge_weights[i];
#endif
            if (better < rank) take(edge[i], weight, better == rank - 1);
        });
    }
    __syncthreads();
#if SAMPLING
    // Log weight of a sampled row: `temper` · max(−log π₁, −log π₂). Here π₁ is the probability with which the
    // key became a candidate, and π₂ the probability with which the candidate was selected. The factor `temper`
    // is 1 for unbiased weights, and smaller for tempered sampling.
    auto weigh = [&](float& weight, int id, float score) {
        weight = fmaxf(weight, threshold - (score - noise_of(id, seed) * NATS)) * temper;
    };
    float* row_weights = args.weights + bg * args.k;
    for (int i = ROWS + threadIdx.x; i < taken; i += THREADS) weigh(row_weights[i], int(ids[i]), scores[i]);
    for (int i = threadIdx.x; i < min(taken, ROWS); i += THREADS)
        weigh(selected_weights[i], selected[i], selected_scores[i]);
    __syncthreads();
#endif
    int rows = taken;
    if (threadIdx.x == 0) {
        args.found[bg] = rows;
        if (args.found_sum) args.found_sum[bg] += rows;
#if COUNTS
        if (args.found_histogram)
            atomicAdd(reinterpret_cast<u64*>(args.found_histogram + min(i64(rows), args.most_found)), u64(1));
#endif
    }
    // Sort the selected rows by token id, so that attend.cu always adds them up in the same order. Four lanes
    // per row count the rows with lower ids.
    int sorted = min(rows, ROWS);
#if COUNTS
    if (sorted > FEW_SORTED) {
        places_by_id(selected, sorted, histogram, reinterpret_cast<int*>(edge), budget.sums, [&](int i, int place) {
            ids[place] = selected[i], scores[place] = selected_scores[i], row_weights[place] = selected_weights[i];
        });
        sorted = 0;
    }
#endif
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
        if (at % 4 == 0 && i < sorted) row_weights[place] = selected_weights[i];
#endif
    }
    __syncthreads();
    if (threadIdx.x == 0) signal(args.signals + (2 * gridDim.x + bg) * APART);
    after_previous();
}
