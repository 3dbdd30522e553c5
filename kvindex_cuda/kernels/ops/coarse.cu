// Coarse stage of a search by table lookups (ParisKV paper, B.2.1): count keys per centroid, compute lookup
// tables for two kinds of approximate scores (tiered votes and sign votes), and compute the votes of all keys.
// Reference: the functions with the same names in kvindex/ops/coarse.py. All sums are exact (integers, or
// float64 without rounding), so the results equal the reference bit by bit.
//
// A subspace is 8 coordinates; a key's sign pattern in it is one of 256 centroids. The kernel `votes` looks up
// one table entry per key and subspace, in shared memory. One 32-bit word packs the entries of several heads,
// so that one lookup and one addition serve all of them. The number of heads is four if no sum exceeds 255
// (tiered votes with M <= 42), two if no sum exceeds 32767 (sign votes), else one. Each thread block determines
// this number from the table.
// Reads M bytes (signs) and 4 or 4 M bytes (factors) per key and KV head for every four query heads; writes 4
// bytes per key and query head.
// Limited by shared memory: M lookups per key and four heads in random banks, about 6 cycles for the 32 lanes
// of a warp (docs/decisions/0013). For 1M keys of 8 KV heads at M = 16 on 132 multiprocessors that is 0.1 ms,
// where memory takes 0.06 ms (calculated).
// Compile-time constants: D; and for `votes`: WIDE (1: the table is int16, else uint8), FACTORS (0: none, 1:
// one per key, 2: one per subspace of a key), TABLES (words of shared memory per table entry).
// This file is longer than most because its five kernels are one stage and share the layout of the tables.
#include "common/common.cuh"

constexpr int M = D / 8;
constexpr int PIECE = M % 16 == 0 ? 16 : M % 8 == 0 ? 8 : M % 4 == 0 ? 4 : M % 2 == 0 ? 2 : 1;
constexpr int SPAN = M < 32 ? M : 32;    // subspaces that a thread block counts
constexpr int KEYS = M <= 16 ? 4 : 2;    // keys that a thread processes at a time
constexpr int WORDS = (M + 3) / 4;

// Load PIECE bytes of a key's sign bits into `words`. The first byte becomes the lowest byte of words[0].
__device__ __forceinline__ void piece_of(u32 (&words)[4], const u8* from) {
    if constexpr (PIECE == 16) {
        uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (PIECE == 8) {
        uint2 all = *reinterpret_cast<const uint2*>(from);
        words[0] = all.x, words[1] = all.y;
    } else if constexpr (PIECE == 4) {
        words[0] = *reinterpret_cast<const u32*>(from);
    } else if constexpr (PIECE == 2) {
        words[0] = *reinterpret_cast<const u16*>(from);
    } else {
        words[0] = *from;
    }
}

struct HistogramArguments {
    const u8* signs;     // [B, G, n, M]
    const u8* valid;     // bool [B, n], or null
    u64* counts;         // [BG, M, 256]: number of keys per centroid
    i64 signs_batch, signs_head, valid_batch;  // strides
    i64 n, kv_heads;
};

// Count the keys of each centroid, that is, of each sign pattern of 8 coordinates.
// Grid: (BG, splits, M / 32 rounded up), 256 threads. A split is a range of the keys.
// Reads M + 1 bytes per key, once. Adds up to 2 KB per subspace and split to `counts`, which the caller has set
// to 0.
extern "C" __global__ void __launch_bounds__(256)
histogram(const __grid_constant__ HistogramArguments args) {
    const u8* signs = args.signs;
    __shared__ u32 bins[SPAN * 256];
    i64 bg = blockIdx.x, batch = bg / args.kv_heads;
    int first = blockIdx.z * 32, span = min(32, M - first), pieces = span / PIECE;
    for (int i = threadIdx.x; i < span * 256; i += 256) bins[i] = 0;
    __syncthreads();
    signs += batch * args.signs_batch + bg % args.kv_heads * args.signs_head + first;
    i64 each = (args.n + gridDim.y - 1) / gridDim.y, start = blockIdx.y * each;
    i64 stop = min(args.n, start + each);
    for (i64 i = start * pieces + threadIdx.x; i < stop * pieces; i += 256) {
        i64 key = i / pieces;
        int at = int(i - key * pieces) * PIECE;
        if (args.valid && !args.valid[batch * args.valid_batch + key]) continue;
        u32 words[4];
        piece_of(words, signs + key * M + at);
#pragma unroll
        for (int b = 0; b < PIECE; b++)
            atomicAdd(bins + (at + b) * 256 + (words[b / 4] >> (b % 4 * 8) & 255), 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < span * 256; i += 256)
        if (bins[i]) atomicAdd(args.counts + (bg * M + first) * 256 + i, u64(bins[i]));
}

struct TierArguments {
    const float* queries;   // [BG, heads, D]
    const i64* counts;      // [BG, M, 256]
    const i64* limits;      // [B, tiers]: number of keys that bounds each tier
    u8* points;             // [BG, heads, M, 256]: score of each centroid
    i64 heads, kv_heads, tiers;
};

// Compute the score ("points") of each centroid for tiered votes. Centroids that are more similar to the query
// get higher scores. For each centroid, the kernel counts the keys that belong to more similar centroids. Each
// tier has a limit for this count. The score is the number of tiers whose limit exceeds the count.
// Grid: (query heads · M), 256 threads, one per centroid.
// Reads 2 KB of counts and 32 bytes of the query; writes 256 bytes. To count the keys in more similar
// centroids, a thread block compares all 2^16 pairs of centroids.
extern "C" __global__ void __launch_bounds__(256)
tier_table(const __grid_constant__ TierArguments args) {
    __shared__ double similarity[256];
    __shared__ i64 keys[256];
    i64 at = blockIdx.x, bg = at / M / args.heads;
    int id = threadIdx.x;
    double mine = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        double x = args.queries[at * 8 + j];
        mine += id >> j & 1 ? x : -x;
    }
    similarity[id] = mine;
    keys[id] = args.counts[(bg * M + at % M) * 256 + id];
    __syncthreads();
    i64 better = 0;
    for (int j = 0; j < 256; j++) {
        double other = similarity[j];
        if (other > mine || (other == mine && j < id)) better += keys[j];
    }
    int earned = 0;
    for (i64 t = 0; t < args.tiers; t++) earned += better < args.limits[bg / args.kv_heads * args.tiers + t];
    args.points[at * 256 + id] = u8(earned);
}

// Return the largest absolute coordinate of a query, in all 256 threads of a block.
static __device__ double peak_of(const float* query) {
    __shared__ float peaks[8];
    float peak = 0;
    for (int j = threadIdx.x; j < D; j += 256) peak = fmaxf(peak, fabsf(query[j]));
    peak = warp_max(peak);
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    for (int i = 0; i < 8; i++) peak = fmaxf(peak, peaks[i]);
    return peak;
}

constexpr double TINY = 2.2250738585072014e-308;

__device__ __forceinline__ int rounded_of(float x, double peak, i64 largest) {
    return peak > 0 ? int(rint(double(x) * (double(largest) / peak))) : 0;
}

// Compute the lookup table from which approximate scores of keys (sign votes) are added up. For a subspace of
// 8 coordinates, it contains Σ_j s_j r_j for each of the 256 sign patterns s, where r is the query rounded to
// integers.
// Grid: (query heads, M subspaces), 256 threads. Each thread block reads 4 D bytes and writes 512 bytes.
extern "C" __global__ void __launch_bounds__(256)
dot_table(const float* queries, short* table, i64 largest) {
    const float* query = queries + i64(blockIdx.x) * D;
    double peak = peak_of(query);
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int r = rounded_of(query[blockIdx.y * 8 + j], peak, largest);
        sum += threadIdx.x >> j & 1 ? r : -r;
    }
    table[(i64(blockIdx.x) * M + blockIdx.y) * 256 + threadIdx.x] = short(sum);
}

struct OffsetArguments {
    const float* offsets;        // [BG heads, segments]
    const float* queries;        // [BG heads, D]
    const float* weight_scale;   // [BG]
    int* votes;                  // [BG heads, segments]
    i64 segments, heads;
    i64 scale;                   // the largest r times FACTOR of kvindex/ops/codes.py
    double level;
};

// Convert the product of each query with the center of each segment (256 keys) to an integer in the unit of
// votes (approximate scores of keys).
// Grid: (query heads, splits), 256 threads.
// Reads and writes 4 bytes per segment.
extern "C" __global__ void __launch_bounds__(256)
dot_offsets(const __grid_constant__ OffsetArguments args) {
    i64 head = blockIdx.x;
    double peak = peak_of(args.queries + head * D);
    double unit = peak * args.level * double(args.weight_scale[head / args.heads]) / double(args.scale);
    for (i64 s = i64(blockIdx.y) * 256 + threadIdx.x; s < args.segments; s += i64(gridDim.y) * 256) {
        double ratio = unit > 0 ? double(args.offsets[head * args.segments + s]) / fmax(unit, TINY) : 0.0;
        args.votes[head * args.segments + s] = int(fmin(fmax(rint(ratio), -1073741824.0), 1073741824.0));
    }
}

// ---- votes ----

// Load four entries of a lookup table, from entry i on.
__device__ __forceinline__ void entries_of(int (&found)[4], const void* table, i64 i) {
#if WIDE
    uint2 all = *reinterpret_cast<const uint2*>(static_cast<const u16*>(table) + i);
    found[0] = short(all.x), found[1] = short(all.x >> 16);
    found[2] = short(all.y), found[3] = short(all.y >> 16);
#else
    u32 all = *reinterpret_cast<const u32*>(static_cast<const u8*>(table) + i);
#pragma unroll
    for (int x = 0; x < 4; x++) found[x] = all >> 8 * x & 255;
#endif
}

#if FACTORS != 2
// Return an upper bound of the absolute votes (approximate scores) that any key can get, before votes are
// multiplied by the keys' factors. For each head, it adds up the largest absolute table entries of all
// subspaces. The result is the largest of these sums. All threads of a block call this function.
static __device__ int bound_of(const void* table, i64 first, int heads) {
    __shared__ int peaks[4 * M];
    int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item < heads * M; item += 8) {
        int most = 0;
        for (int half = 0; half < 2; half++) {
            int entries[4];
            entries_of(entries, table, (first * M + item) * 256 + half * 128 + lane * 4);
            for (int x = 0; x < 4; x++) most = max(most, entries[x] < 0 ? -entries[x] : entries[x]);
        }
        most = warp_max(most);
        if (lane == 0) peaks[item] = most;
    }
    __syncthreads();
    int bound = 0;
    for (int h = 0; h < heads; h++) {
        int sum = 0;
        for (int b = 0; b < M; b++) sum += peaks[h * M + b];
        bound = max(bound, sum);
    }
    __syncthreads();
    return bound;
}
#endif

// Extract the table entry of head p from a word that packs the entries of P heads, or from a sum of such words.
// With P = 4, the entries are unsigned bytes. With P = 2, the word is high · 2^16 + low, where `high` and `low`
// are signed.
template <int P>
__device__ __forceinline__ u32 part_of(u32 word, int p) {
    if constexpr (P == 4) return word >> 8 * p & 255;
    if constexpr (P == 1) return word;
    u32 low = u32(int(short(word)));
    return p ? u32(int(word - low) >> 16) : low;
}

struct Votes {
    const u8* signs;
    const void* table;
    const int *factors, *offsets;
    int* out;
    i64 bg, first, stop, n, heads, segments, every;
};

// Compute the votes (approximate scores) of this thread block's keys for P · TABLES query heads. There are
// TABLES lookup tables in shared memory. Each word of a table packs the entries of P heads.
template <int P>
__device__ __forceinline__ void votes_of(const Votes& of, i64 head, u32* words) {
    constexpr int HEADS = P * TABLES;
    int many = int(min(i64(HEADS), of.heads - head));
    for (int i = threadIdx.x * 4; i < M * 256; i += 1024)
#pragma unroll
        for (int t = 0; t < TABLES; t++) {
            u32 packed[4] = {};
#pragma unroll
            for (int p = 0; p < P; p++) {
                if (t * P + p >= many) continue;
                int entries[4];
                entries_of(entries, of.table, (of.bg * of.heads + head + t * P + p) * (M * 256) + i);
#pragma unroll
                for (int x = 0; x < 4; x++) packed[x] += u32(entries[x]) << p * (32 / P) % 32;
            }
            *reinterpret_cast<uint4*>(words + t * M * 256 + i) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    __syncthreads();
    for (i64 start = of.first; start < of.stop; start += KEYS * 256) {
        u32 ids[KEYS][WORDS];
#pragma unroll
        for (int y = 0; y < KEYS; y++) {
            const u8* from = of.signs + min(start + y * 256 + i64(threadIdx.x), of.stop - 1) * M;
#pragma unroll
            for (int w = 0; w < WORDS; w++) ids[y][w] = 0;
#pragma unroll
            for (int b = 0; b < M; b += PIECE) {
                u32 piece[4] = {};
                piece_of(piece, from + b);
#pragma unroll
                for (int w = 0; w < (PIECE + 3) / 4; w++) ids[y][b / 4 + w] |= piece[w] << b % 4 * 8;
            }
        }
#pragma unroll
        for (int y = 0; y < KEYS; y++) {
            i64 key = start + y * 256 + threadIdx.x;
            if (key >= of.stop) continue;
            u32 total[HEADS] = {};
#if FACTORS != 2
            u32 sums[TABLES] = {};
#endif
#pragma unroll
            for (int b = 0; b < M; b++) {
                u32 id = ids[y][b / 4] >> (b % 4 * 8) & 255;
#if FACTORS == 2
                u32 factor = u32(of.factors[(of.bg * of.n + key) * M + b]);
#endif
#pragma unroll
                for (int t = 0; t < TABLES; t++) {
                    u32 word = words[(t * M + b) * 256 + id];
#if FACTORS == 2
#pragma unroll
                    for (int p = 0; p < P; p++) total[t * P + p] += part_of<P>(word, p) * factor;
#else
                    sums[t] += word;
#endif
                }
            }
#if FACTORS != 2
#pragma unroll
            for (int h = 0; h < HEADS; h++) total[h] = part_of<P>(sums[h / P], h % P);
#endif
#if FACTORS == 1
            u32 factor = u32(of.factors[of.bg * of.n + key]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) total[h] *= factor;
#endif
            i64 segment = of.offsets ? key / of.every : 0;
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h >= many) continue;
                i64 row = of.bg * of.heads + head + h;
                if (of.offsets) total[h] += u32(of.offsets[row * of.segments + segment]);
                of.out[row * of.n + key] = int(total[h]);
            }
        }
    }
    __syncthreads();
}

struct VoteArguments {
    const u8* signs;      // [B, G, n, M]
    const void* table;    // uint8 or int16 [BG, heads, M, 256]
    const int* factors;   // [BG, n, 1 or M], or null
    const int* offsets;   // [BG, heads, segments]: one for each `every` keys, or null
    int* votes;           // [BG, heads, n]
    i64 signs_batch, signs_head;  // strides
    i64 n, heads, kv_heads, segments, every;
};

// Compute the votes of all keys for all heads. A vote is an approximate score, the sum of one table entry per
// subspace.
// Grid: (BG, splits), 256 threads. Dynamic shared memory: TABLES · M · 1024 bytes.
extern "C" __global__ void __launch_bounds__(256, 3)
votes(const __grid_constant__ VoteArguments args) {
    const u8* signs = args.signs;
    DYNAMIC_SHARED(memory);
    u32* words = reinterpret_cast<u32*>(memory);
    i64 bg = blockIdx.x, each = (args.n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
    i64 stop = min(args.n, first + each);
    if (first >= stop) return;
    signs += bg / args.kv_heads * args.signs_batch + bg % args.kv_heads * args.signs_head;
    Votes of = {signs, args.table, args.factors, args.offsets, args.votes, bg, first, stop, args.n, args.heads,
                args.segments, args.every};
    for (i64 head = 0; head < args.heads;) {
#if FACTORS == 2
        constexpr int P = WIDE ? 2 : 4;  // heads per word: each entry by itself always fits
        votes_of<P>(of, head, words);
        head += P * TABLES;
#else
        int bound = bound_of(args.table, bg * args.heads + head, int(min(i64(4), args.heads - head)));
        if (!WIDE && bound < 256) {
            votes_of<WIDE ? 2 : 4>(of, head, words);
            head += 4 * TABLES;
        } else if (bound < 32768) {
            votes_of<2>(of, head, words);
            head += 2 * TABLES;
        } else {
            votes_of<1>(of, head, words);
            head += TABLES;
        }
#endif
    }
}
