// Sample `k` of the given rows so that they represent all rows (Horvitz and Thompson, 1952). The k - `sampled`
// rows with the highest attention weights are selected with certainty. The other rows are sampled with
// probabilities proportional to their attention weights. Reference: kvindex.ops.sampling.sample.
//
// 1. Add up the exponentials of the logits from the last row to the first. From these sums follow the number of
// certain rows and the probabilities of the others.
// 2. Sort the ids (bitonic sort) and sample systematically: select a row where the running sum of probabilities
// passes half an odd number. Sums are float64, in a fixed order.
//
// Grid: BG, THREADS threads. Reads 12 bytes per row, writes 12 bytes per selected row.
// Limited by latency: 55 barriers to sort up to 1,024 rows, and about 20 more.
// Dynamic shared memory: 13 · `size` bytes.
// Compile-time constants: only those of kvindex_cuda/runtime/constants.py.
#include "common/common.cuh"

// Exclusive prefix sum over the threads of a block: return the sum of `mine` over all threads with lower
// numbers.
template <class T>
__device__ T before(T mine) {
    __shared__ T sums[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T run = mine, base = 0;
    for (int step = 1; step < 32; step *= 2) {
        T add = __shfl_up_sync(ALL, run, step);
        if (lane >= step) run += add;
    }
    if (lane == 31) sums[warp] = run;
    __syncthreads();
    for (int w = 0; w < warp; w++) base += sums[w];
    T last = __shfl_up_sync(ALL, run, 1);
    __syncthreads();
    return lane ? base + last : base;
}

struct Arguments {
    const float* logits;   // [BG, count]: descending, −inf for no row
    const i64* ids;        // [BG, count]: ids below 2^47, negative for no row
    i64* places;           // [BG, k]: positions of the selected rows among the given ones
    float* weights;        // [BG, k]: log of the inverse probability
    i64 size;              // a power of two, at least count and THREADS, below 2^16
    i64 count, k, sampled;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample_rows(const __grid_constant__ Arguments args) {
    const float* logits = args.logits;
    const i64* ids = args.ids;
    i64* places = args.places;
    float* weights = args.weights;
    DYNAMIC_SHARED(memory);
    u64* words = reinterpret_cast<u64*>(memory);
    float* chances = reinterpret_cast<float*>(words + args.size);
    u8* picked = reinterpret_cast<u8*>(chances + args.size);
    __shared__ int certain;
    __shared__ double total;
    int P = int(args.count), sure = int(args.k - args.sampled), each = int(args.size) / THREADS;
    int first = int(threadIdx.x) * each;  // the first of this thread's rows
    logits += blockIdx.x * args.count;
    ids += blockIdx.x * args.count;
    places += blockIdx.x * args.k;
    weights += blockIdx.x * args.k;
    double best = sure < P ? fmaxf(logits[sure], -3.4028234663852886e38f) : 0.0f;
    auto rest = [&](int p) { return exp(double(logits[p]) - best); };  // 0 where there is no row
    if (threadIdx.x == 0) certain = max(P - sure, 0), total = 0;

    // Find the number of further rows that are selected with certainty. The rows are in descending order of their
    // logits, and the first `sure` rows are selected already. Number the remaining rows j = 0, 1, …, and let the
    // share of row j be exp(logit) divided by the sum of exp(logit) over row j and all later rows. The first row j
    // whose share is at most 1 / (sampled - j), and the rows after it, are sampled. All rows before it are selected.
    double mine = 0;
    for (int q = first; q < first + each; q++)
        if (P - 1 - q >= sure) mine += rest(P - 1 - q);
    double after = before(mine), tail = after;  // contains a barrier, after which `certain` is set
    for (int q = first; q < first + each && P - 1 - q >= sure; q++) {
        int j = P - 1 - q - sure;
        tail += rest(j + sure);
        if (double(args.sampled - j) * rest(j + sure) <= tail) atomicMin(&certain, j);
    }
    __syncthreads();
    tail = after;
    for (int q = first; q < first + each && P - 1 - q >= sure; q++) {
        tail += rest(P - 1 - q);
        if (P - 1 - q - sure == certain) total = tail;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < args.size; p += THREADS) {
        float chance = 0;
        if (p < P && p < sure) chance = logits[p] > NEVER;
        if (p < P && p >= sure && rest(p) > 0) {
            double part = rest(p) * double(args.sampled - certain) / fmax(total, 2.2250738585072014e-308);
            chance = p - sure < certain ? 1.0f : float(fmin(fmax(part, 0.0), 1.0));
        }
        chances[p] = chance;
        picked[p] = chance >= 1;
        words[p] = p < P && ids[p] >= 0 ? u64(ids[p]) << 16 | u64(p) : ~u64(0);
    }
    __syncthreads();

    // sort by ids
    for (int span = 2; span <= args.size; span *= 2)
        for (int step = span / 2; step; step /= 2) {
            for (int i = threadIdx.x; i < args.size / 2; i += THREADS) {
                int low = i / step * 2 * step + i % step, high = low + step;
                u64 a = words[low], b = words[high];
                if ((a > b) == ((low & span) == 0)) words[low] = b, words[high] = a;
            }
            __syncthreads();
        }
    auto chance_at = [&](int i) {
        u64 word = words[i];
        int p = int(word & 0xffff);
        return word == ~u64(0) || picked[p] ? 0.0 : double(chances[p]);
    };
    mine = 0;
    for (int i = first; i < first + each; i++) mine += chance_at(i);
    double run = before(mine);
    for (int i = first; i < first + each; i++) {
        double chance = chance_at(i);
        run += chance;
        double summed = run + 0.5;
        if (floor(summed) != floor(summed - chance)) picked[int(words[i] & 0xffff)] = 1;
    }
    __syncthreads();

    // write the selected rows, best first
    int many = 0;
    for (int p = first; p < first + each; p++) many += picked[p];
    int slot = before(many);
    for (int p = first; p < first + each; p++) {
        if (!picked[p]) continue;
        if (slot < args.k) {
            places[slot] = p;
            weights[slot] = -logf(fmaxf(chances[p], 1.1754943508222875e-38f));
        }
        slot++;
    }
    if (threadIdx.x == THREADS - 1) certain = slot;
    __syncthreads();
    for (int i = certain + int(threadIdx.x); i < args.k; i += THREADS) places[i] = -1, weights[i] = NEVER;
}
