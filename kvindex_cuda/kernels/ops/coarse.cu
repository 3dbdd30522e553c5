// Coarse stage with tables: histogram, tables of tiers and dots, and votes (paper, B.2.1;
// ops.coarse). Everything is an integer, or float64 whose sums are exact: equal to the reference
// to the bit.
//
// `votes` looks up a table entry per key and subspace. Tables lie in shared memory with as many
// heads in a 32-bit word as their sums allow, so that one lookup and one add serve all of them:
// four where no sum exceeds 255 (tiers at M <= 42), two where none exceeds 32767 (dots), one
// otherwise. Which, a block finds from the table itself.
//   Bytes: reads M (signs) and 4 or 4M (factors) per key and KV head for four query heads at a
//   time, writes 4 per key and query head. The bound is shared memory: M lookups per key and four
//   heads, random banks, some 6 cycles for a warp's 32 (docs/decisions/0013): 0.1 ms for 1M keys
//   of 8 KV heads at M = 16 on 132 multiprocessors, where the bytes take 0.06 ms (by count).
// Compile-time: D; for `votes` WIDE (table int16, else uint8), FACTORS (0 none, 1 of the key,
// 2 of each subspace), TABLES (words of shared memory per entry).
// Longer than most files: the five kernels are one stage, and agree on how tables lie.
#include "common/common.cuh"

#ifndef WIDE
#define WIDE 0
#endif
#ifndef FACTORS
#define FACTORS 0
#endif
#ifndef TABLES
#define TABLES 1
#endif

constexpr int M = D / 8;
constexpr int PIECE = M % 16 == 0 ? 16 : M % 8 == 0 ? 8 : M % 4 == 0 ? 4 : M % 2 == 0 ? 2 : 1;
constexpr int SPAN = M < 32 ? M : 32;    // subspaces that a block counts
constexpr int KEYS = M <= 16 ? 4 : 2;    // of a thread at a time
constexpr int WORDS = (M + 3) / 4;

// PIECE bytes as 32-bit words, the first byte lowest.
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

// Keys per centroid. Grid: (BG, splits, M / 32 rounded up), 256 threads. Reads M + 1 bytes per key,
// once; adds 2 KB per subspace and split to the counts, which begin at 0.
// signs uint8 [B, G, n, M] with strides; valid uint8 [B, n] with a stride, or null; counts uint64
// [BG, M, 256].
extern "C" __global__ void __launch_bounds__(256)
histogram(const u8* signs, i64 by_batch, i64 by_head, const u8* valid, i64 by_row, u64* counts,
          i64 n, i64 kv_heads) {
    __shared__ u32 bins[SPAN * 256];
    i64 bg = blockIdx.x, batch = bg / kv_heads;
    int first = blockIdx.z * 32, span = min(32, M - first), pieces = span / PIECE;
    for (int i = threadIdx.x; i < span * 256; i += 256) bins[i] = 0;
    __syncthreads();
    signs += batch * by_batch + bg % kv_heads * by_head + first;
    i64 each = (n + gridDim.y - 1) / gridDim.y, start = blockIdx.y * each;
    i64 stop = min(n, start + each);
    for (i64 i = start * pieces + threadIdx.x; i < stop * pieces; i += 256) {
        i64 key = i / pieces;
        int at = int(i - key * pieces) * PIECE;
        if (valid && !valid[batch * by_row + key]) continue;
        u32 words[4];
        piece_of(words, signs + key * M + at);
#pragma unroll
        for (int b = 0; b < PIECE; b++)
            atomicAdd(bins + (at + b) * 256 + (words[b / 4] >> (b % 4 * 8) & 255), 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < span * 256; i += 256)
        if (bins[i]) atomicAdd(counts + (bg * M + first) * 256 + i, u64(bins[i]));
}

// Points of tiers: for a centroid, the tiers with fewer than their limit of keys in better ones.
// Grid: one block of 256 threads, one per centroid, for each query head and subspace. Reads 2 KB of
// counts and 32 bytes; writes 256. Better ones are summed by comparing all pairs, 2^16 per block.
// queries float32 [BG, heads, D]; counts int64 [BG, M, 256]; limits int64 [B, tiers]; points uint8
// [BG, heads, M, 256].
extern "C" __global__ void __launch_bounds__(256)
tier_table(const float* queries, const i64* counts, const i64* limits, u8* points, i64 heads,
           i64 kv_heads, i64 tiers) {
    __shared__ double similarity[256];
    __shared__ i64 held[256];
    i64 at = blockIdx.x, bg = at / M / heads;
    int id = threadIdx.x;
    double mine = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        double x = queries[at * 8 + j];
        mine += id >> j & 1 ? x : -x;
    }
    similarity[id] = mine;
    held[id] = counts[(bg * M + at % M) * 256 + id];
    __syncthreads();
    i64 better = 0;
    for (int j = 0; j < 256; j++) {
        double other = similarity[j];
        if (other > mine || (other == mine && j < id)) better += held[j];
    }
    int earned = 0;
    for (i64 t = 0; t < tiers; t++) earned += better < limits[bg / kv_heads * tiers + t];
    points[at * 256 + id] = u8(earned);
}

// max_j |q_j| of a query, in all threads of a block of 256.
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

// Σ_j ± r_j of each sign pattern. Grid: (query heads, M), 256 threads. Reads 4 D bytes, writes 512.
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

// ⟨q, μ⟩ in votes. Grid: (query heads, splits), 256 threads. Reads and writes 4 bytes per segment.
// offsets float32, out int32 [BG heads, segments]; queries float32 [BG heads, D]; reference float32
// [BG]; level: the bits of a float64; scale: largest · FACTOR.
extern "C" __global__ void __launch_bounds__(256)
dot_offsets(const float* offsets, const float* queries, const float* weight_scale, int* out,
            i64 segments, i64 heads, i64 level, i64 scale) {
    i64 head = blockIdx.x;
    double peak = peak_of(queries + head * D);
    double unit = peak * __longlong_as_double(level) * double(weight_scale[head / heads]) / double(scale);
    for (i64 s = i64(blockIdx.y) * 256 + threadIdx.x; s < segments; s += i64(gridDim.y) * 256) {
        double ratio = unit > 0 ? double(offsets[head * segments + s]) / fmax(unit, TINY) : 0.0;
        out[head * segments + s] = int(fmin(fmax(rint(ratio), -1073741824.0), 1073741824.0));
    }
}

// ---- votes -----------------------------------------------------------------------------------

// Four entries of a table, from entry i on.
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
// The largest size that a sum of some heads' entries can have: all threads of a block call it.
static __device__ int bound_of(const void* table, i64 first, int heads) {
    __shared__ int peaks[4 * M];
    int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item < heads * M; item += 8) {
        int most = 0;
        for (int half = 0; half < 2; half++) {
            int some[4];
            entries_of(some, table, (first * M + item) * 256 + half * 128 + lane * 4);
            for (int x = 0; x < 4; x++) most = max(most, some[x] < 0 ? -some[x] : some[x]);
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

// Head p of P in a word, or in a sum of words: bytes, or Σ high · 2^16 + Σ low with signs.
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

// Votes of the block's keys for P · TABLES heads, P of them in a word.
template <int P>
__device__ __forceinline__ void some_heads(const Votes& of, i64 head, u32* words) {
    constexpr int HEADS = P * TABLES;
    int many = int(min(i64(HEADS), of.heads - head));
    for (int i = threadIdx.x * 4; i < M * 256; i += 1024)
#pragma unroll
        for (int t = 0; t < TABLES; t++) {
            u32 packed[4] = {};
#pragma unroll
            for (int p = 0; p < P; p++) {
                if (t * P + p >= many) continue;
                int some[4];
                entries_of(some, of.table, (of.bg * of.heads + head + t * P + p) * (M * 256) + i);
#pragma unroll
                for (int x = 0; x < 4; x++) packed[x] += u32(some[x]) << p * (32 / P) % 32;
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

// Grid: (BG, splits), 256 threads; dynamic shared memory: TABLES · M · 1024 bytes.
// signs uint8 [B, G, n, M] with strides; table [BG, heads, M, 256]; factors int32 [BG, n, 1 or M];
// offsets int32 [BG, heads, segments], one for each `every` keys, or null; out int32 [BG, heads, n].
extern "C" __global__ void __launch_bounds__(256, 3)
votes(const u8* signs, i64 by_batch, i64 by_head, const void* table, const int* factors,
      const int* offsets, int* out, i64 n, i64 heads, i64 kv_heads, i64 segments, i64 every) {
    DYNAMIC_SHARED(memory);
    u32* words = reinterpret_cast<u32*>(memory);
    i64 bg = blockIdx.x, each = (n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
    i64 stop = min(n, first + each);
    if (first >= stop) return;
    signs += bg / kv_heads * by_batch + bg % kv_heads * by_head;
    Votes of = {signs, table, factors, offsets, out, bg, first, stop, n, heads, segments, every};
    for (i64 head = 0; head < heads;) {
#if FACTORS == 2
        constexpr int P = WIDE ? 2 : 4;  // of single entries, which always fit
        some_heads<P>(of, head, words);
        head += P * TABLES;
#else
        int bound = bound_of(table, bg * heads + head, int(min(i64(4), heads - head)));
        if (!WIDE && bound < 256) {
            some_heads<WIDE ? 2 : 4>(of, head, words);
            head += 4 * TABLES;
        } else if (bound < 32768) {
            some_heads<2>(of, head, words);
            head += 2 * TABLES;
        } else {
            some_heads<1>(of, head, words);
            head += TABLES;
        }
#endif
    }
}
