// Select the largest entries of each matrix row by a radix select, with several thread blocks per matrix row
// and 11 bits per pass. Reference: kvindex.ops.select.top_k, candidates and compact. The kernels run in one of
// these sequences, each with its result:
//
//     range -> digit, up to 6 times -> collect -> sort      the k best, in order
//                                   -> mark -> place        ids that at least one head of the group selects
//                                 flags -> place            positions of the True entries of a mask
//
// A word is (score in integer order) << bits | (2^bits − 1 − position). All words differ, so of equal scores
// the lower position is selected, and the result is unique. `range` finds the bits in which the scores of a
// matrix row differ, so that small integers need few passes and do not crowd into few bins. Once the smallest
// selected word of a matrix row is known, further passes return immediately.
//
// Grid: (rows, splits), 256 threads; the last thread block of a matrix row to finish decides the row's 11 bits.
// Reads 4 bytes per entry in each pass (from L2 if it fits), writes little.
// Limited by memory: (passes + 1) · 4 bytes per entry. Tiered votes and floats need 2 or 3 passes, more only if
// many scores are equal.
// Compile-time constants: VOTES (1: scores are int32 of keys with a valid flag, and limits differ; 0: float32).
#include "common/common.cuh"

// State of the radix select of one matrix row. Each entry of the matrix row is represented by an integer, its
// word, and the entries with the largest words are selected. The radix select finds the smallest of the selected
// words, `least`, from its highest bits to its lowest. The lowest `low` bits of `least` are not known yet. Of
// the words whose higher bits equal those of `least`, the `rank` largest are selected. `rank` is 0 if no entry
// is selected.
struct Row {
    u64 least;
    int rank, low;
};

// One matrix row of scores. The kernel selects the largest of these scores.
struct Entries {
    const void* scores;
    const u8* valid;  // valid flags of the row's sequence, or null
    i64 n, bits;

    // Set `key` to an unsigned integer that orders entries by their scores. Return false if entry i must not be
    // selected.
    __device__ __forceinline__ bool key_of(u32& key, i64 i) const {
#if VOTES
        key = u32(static_cast<const int*>(scores)[i]) ^ 0x80000000u;
        if (valid && !valid[i]) key = 0;
        return true;
#else
        key = ordered(static_cast<const float*>(scores)[i]);
        return key > 0x007fffffu;  // −inf
#endif
    }
    __device__ __forceinline__ u64 word_of(u32 key, i64 i) const {
        return u64(key) << bits | ((1ull << bits) - 1 - u64(i));
    }
};

__device__ __forceinline__ Entries entries_of(const void* scores, const u8* valid, i64 by_row,
                                              i64 row, i64 n, i64 rows_each, i64 bits) {
    const u8* flags = valid ? valid + row / rows_each * by_row : nullptr;
    return {static_cast<const u32*>(scores) + row * n, flags, n, bits};
}

struct RangeArguments {
    const void* scores;    // float32 or int32 [rows, n]
    const u8* valid;       // bool [B, n], or null
    const i64* limits;     // [B]: number of words wanted in each of the sequence's rows_each rows, or null: k
    u32* extents;          // [rows, 3]: largest complement, largest key, count; cleared before the launch
    int* tickets;          // [rows]: counts finished thread blocks, cleared before the launch
    Row* state;            // [rows]
    i64 valid_batch, k, n, rows_each, bits;
};

extern "C" __global__ void __launch_bounds__(256)
range(const __grid_constant__ RangeArguments args) {
    u32* extents = args.extents;
    i64 row = blockIdx.x;
    Entries all = entries_of(args.scores, args.valid, args.valid_batch, row, args.n, args.rows_each, args.bits);
    u32 low = 0, high = 0;  // `low` is the maximum of the complement
    int count = 0;
    for (i64 i = i64(blockIdx.y) * 256 + threadIdx.x; i < args.n; i += i64(gridDim.y) * 256) {
        u32 key;
        if (!all.key_of(key, i)) continue;
        low = max(low, ~key), high = max(high, key), count++;
    }
    low = warp_max(low), high = warp_max(high), count = warp_sum(count);
    extents += row * 3;
    if (threadIdx.x % 32 == 0 && count) {
        atomicMax(extents, low);
        atomicMax(extents + 1, high);
        atomicAdd(extents + 2, u32(count));
    }
    if (!last_block(args.tickets + row, gridDim.y) || threadIdx.x) return;
    args.tickets[row] = 0;
    i64 wanted = max(0ll, args.limits ? args.limits[row / args.rows_each] : args.k), held = __ldcg(extents + 2);
    Row found = {0, int(min(wanted, held)), 0};
    if (wanted < held && wanted) {  // otherwise all entries are selected, or none
        high = __ldcg(extents + 1), low = ~__ldcg(extents);
        int differ = 32 - __clz(int(high ^ low));
        found.least = u64(high) >> differ << differ << args.bits;
        found.low = differ + int(args.bits);
    }
    args.state[row] = found;
}

struct DigitArguments {
    const void* scores;    // as for `range`
    const u8* valid;
    int* histogram;        // [rows, BINS]: cleared before and after the launch
    int* tickets;          // [rows]: cleared before and after the launch
    Row* state;            // [rows]
    i64 valid_batch, n, rows_each, bits;
};

extern "C" __global__ void __launch_bounds__(256)
digit(const __grid_constant__ DigitArguments args) {
    int* histogram = args.histogram;
    __shared__ int bins[BINS];
    i64 row = blockIdx.x;
    Row at = args.state[row];
    if (at.low == 0) return;
    Entries all = entries_of(args.scores, args.valid, args.valid_batch, row, args.n, args.rows_each, args.bits);
    histogram += row * BINS;
    for (int i = threadIdx.x; i < BINS; i += 256) bins[i] = 0;
    __syncthreads();
    int shift = max(0, at.low - DIGIT);
    u64 upper = at.least >> at.low, digits = (1ull << (at.low - shift)) - 1;
#pragma unroll 4
    for (i64 i = i64(blockIdx.y) * 256 + threadIdx.x; i < args.n; i += i64(gridDim.y) * 256) {
        u32 key;
        if (!all.key_of(key, i)) continue;
        u64 word = all.word_of(key, i);
        if (word >> at.low == upper) atomicAdd(bins + (word >> shift & digits), 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += 256)
        if (bins[i]) atomicAdd(histogram + i, bins[i]);
    if (!last_block(args.tickets + row, gridDim.y)) return;
    Cut cut = cut_of(histogram, at.rank);
    if (threadIdx.x == 0) {
        at.rank -= cut.above;
        at.least |= u64(cut.bin) << shift;
        // if all words in the histogram bin are selected, no further pass is needed
        at.low = __ldcg(histogram + cut.bin) == at.rank ? 0 : shift;
        args.state[row] = at;
        args.tickets[row] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += 256) histogram[i] = 0;
}

struct CollectArguments {
    const void* scores;    // as for `range`
    const Row* state;      // [rows]
    int* filled;           // [rows]: number of collected words, cleared before the launch
    u64* words;            // [rows, k]: the words, 0 for none; cleared before the launch
    i64 n, bits, k;
};

// Write the selected words of each matrix row to `words`, in any order. (A word packs a score and its
// position.)
extern "C" __global__ void __launch_bounds__(256)
collect(const __grid_constant__ CollectArguments args) {
    i64 row = blockIdx.x;
    Row at = args.state[row];
    if (at.rank == 0) return;
    Entries all = entries_of(args.scores, nullptr, 0, row, args.n, 1, args.bits);
#pragma unroll 4
    for (i64 i = i64(blockIdx.y) * 256 + threadIdx.x; i < args.n; i += i64(gridDim.y) * 256) {
        u32 key;
        if (!all.key_of(key, i)) continue;
        u64 word = all.word_of(key, i);
        if (word >= at.least) args.words[row * args.k + atomicAdd(args.filled + row, 1)] = word;
    }
}

struct SortArguments {
    const u64* words;      // [rows, width]
    const float* scores;   // [rows, n]
    float* best;           // [rows, k]
    i64* positions;        // [rows, k]
    i64 width, size, k, n, bits;
};

// Sort the selected words of each matrix row in descending order, and convert them to scores and positions. (A
// word packs the score and the position of one entry.)
// Grid: (rows), `size` / 2 threads, where `size` is a power of two and at least `width`.
// Reads 8 bytes per word and 4 bytes per score; writes 12 bytes per word.
extern "C" __global__ void __launch_bounds__(SORTED / 2)
sort(const __grid_constant__ SortArguments args) {
    __shared__ u64 words[SORTED];
    i64 row = blockIdx.x;
    for (int i = threadIdx.x; i < args.size; i += blockDim.x) words[i] = i < args.width ? args.words[row * args.width + i] : 0;
    __syncthreads();
    for (int run = 2; run <= args.size; run *= 2)
        for (int step = run / 2; step; step /= 2) {
            int i = threadIdx.x / step * step * 2 + threadIdx.x % step;
            u64 a = words[i], b = words[i + step];
            if ((a < b) == ((i & run) == 0)) words[i] = b, words[i + step] = a;
            __syncthreads();
        }
    for (i64 i = threadIdx.x; i < args.k; i += blockDim.x) {
        u64 word = i < args.width ? words[i] : 0, last = (1ull << args.bits) - 1;
        i64 position = word ? i64(last - (word & last)) : -1;
        args.positions[row * args.k + i] = position;
        args.best[row * args.k + i] = word ? args.scores[row * args.n + position] : NEVER;
    }
}

// Pack one flag per lane into a word, and add the number of set flags to `count`.
__device__ __forceinline__ void keep(bool in, u32* words, i64 word, int* count) {
    u32 all = __ballot_sync(ALL, in);
    if (threadIdx.x % 32) return;
    words[word] = all;
    atomicAdd(count, __popc(all));
}

struct MarkArguments {
    const void* scores;    // as for `range`
    const u8* valid;
    const Row* state;      // [rows]
    u32* words;            // [BG, tiles, TILE / 32]
    int* counts;           // [BG, tiles]
    i64 valid_batch, n, heads, kv_heads, bits;
};

// Write one bit per key: 1 if at least one query head of the group selects the key.
// Grid: (BG, tiles), 256 threads. Reads 4 bytes per key and head, writes one bit per key.
extern "C" __global__ void __launch_bounds__(256)
mark(const __grid_constant__ MarkArguments args) {
    __shared__ int count;
    i64 bg = blockIdx.x, tile = bg * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int w = threadIdx.x / 32; w < TILE / 32; w += 8) {
        i64 i = i64(blockIdx.y) * TILE + w * 32 + threadIdx.x % 32;
        bool in = false;
        for (i64 h = 0; h < args.heads && i < args.n && !in; h++) {
            i64 row = bg * args.heads + h;
            Row at = args.state[row];
            u32 key;
            Entries all = entries_of(args.scores, args.valid, args.valid_batch, row, args.n,
                                     args.heads * args.kv_heads, args.bits);
            in = at.rank && all.key_of(key, i) && all.word_of(key, i) >= at.least;
        }
        keep(in, args.words, tile * (TILE / 32) + w, &count);
    }
    __syncthreads();
    if (threadIdx.x == 0) args.counts[tile] = count;
}

struct FlagArguments {
    const u8* flags;       // bool [B, G, n]
    u32* words;            // as for `mark`
    int* counts;
    i64 flags_batch, flags_head, n, kv_heads;
};

// Pack flags from bytes into bits.
// Grid: (rows, tiles), 256 threads. Reads one byte and writes one bit per flag.
extern "C" __global__ void __launch_bounds__(256)
flags(const __grid_constant__ FlagArguments args) {
    const u8* chosen = args.flags;
    __shared__ int count;
    i64 bg = blockIdx.x, tile = bg * gridDim.y + blockIdx.y;
    chosen += bg / args.kv_heads * args.flags_batch + bg % args.kv_heads * args.flags_head;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int w = threadIdx.x / 32; w < TILE / 32; w += 8) {
        i64 i = i64(blockIdx.y) * TILE + w * 32 + threadIdx.x % 32;
        keep(i < args.n && chosen[i], args.words, tile * (TILE / 32) + w, &count);
    }
    __syncthreads();
    if (threadIdx.x == 0) args.counts[tile] = count;
}

// Write the positions of the set bits of each matrix row in ascending order.
// Grid: (rows, tiles), 256 threads. Reads one bit per entry, writes 8 bytes per position.
//   ends: int64 [rows, tiles], number of set bits up to the end of each tile.
//   ids: int64 [rows, width], the result.
extern "C" __global__ void __launch_bounds__(256)
place(const u32* words, const i64* ends, i64* ids, i64 width) {
    __shared__ int before[TILE / 32];
    i64 row = blockIdx.x, tile = row * gridDim.y + blockIdx.y;
    i64 start = blockIdx.y ? ends[tile - 1] : 0;
    int lane = threadIdx.x % 32;
    words += tile * (TILE / 32);
    if (threadIdx.x < TILE / 32) before[threadIdx.x] = __popc(words[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x < 32) {  // exclusive prefix sums, two words per lane
        int first = before[2 * lane], both = first + before[2 * lane + 1], sum = both;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += other;
        }
        before[2 * lane] = sum - both;
        before[2 * lane + 1] = sum - both + first;
    }
    __syncthreads();
    for (int w = threadIdx.x / 32; w < TILE / 32; w += 8) {
        u32 word = words[w];
        if (word >> lane & 1)
            ids[row * width + start + before[w] + __popc(word & ((1u << lane) - 1))] =
                i64(blockIdx.y) * TILE + w * 32 + lane;
    }
}
