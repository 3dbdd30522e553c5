// What an index learns of tokens as they come: centres of segments, a reference for weights
// (ops/learn.py).
//
// Sums of a segment are in double and in a fixed order, so that two runs learn the same.
// Compile-time: DTYPE (of the keys), WIDE (whether each key begins at a multiple of 16 bytes), LANES
// (of a warp, a power of 2, that share a key where `learn` looks at norms; else 0).
#include "common.cuh"

constexpr int LEAN = 16;      // learn.LEAN
constexpr int HEADROOM = 5;   // learn.HEADROOM
constexpr int THREADS = 256;
constexpr int TALL = 32;  // keys that a block reads at once, at most
constexpr double LONGEST = 1152921504606846976.0;  // transform.LONGEST

constexpr int AHEAD = DTYPE == 0 ? 2 : 4;  // keys that a thread has loads in flight for

// Eight coordinates as they lie in memory.
struct Eight {
    u32 words[DTYPE == 0 ? 8 : 4];
};

__device__ __forceinline__ Eight fetched(const void* data, i64 i) {
    Eight x;
#if DTYPE == 0
    const u32* from = static_cast<const u32*>(data) + i;
#else
    const u16* from = static_cast<const u16*>(data) + i;
#endif
#if WIDE
    const uint4* wide = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int j = 0; j < int(sizeof(x)) / 16; j++) {
        uint4 all = wide[j];
        x.words[4 * j] = all.x, x.words[4 * j + 1] = all.y;
        x.words[4 * j + 2] = all.z, x.words[4 * j + 3] = all.w;
    }
#else
#pragma unroll
    for (int j = 0; j < int(sizeof(x)) / 4; j++)
        x.words[j] = DTYPE == 0 ? u32(from[j]) : from[2 * j] | u32(from[2 * j + 1]) << 16;
#endif
    return x;
}

__device__ __forceinline__ float coordinate(const Eight& x, int j) {
    if (DTYPE == 0) return __uint_as_float(x.words[j]);
    u16 bits = u16(x.words[j / 2] >> (j % 2 * 16));
    return DTYPE == 1 ? from_float16(bits) : from_bfloat16(bits);
}

// Where keys and what is learnt already lie.
struct Keys {
    const void* data;
    const u8* valid;  // [B, N], or null
    i64 count, sb, sg, sn, vb;
};

struct Found {
    int count;       // of valid keys
    double longest;  // of the thread's squared norms
    bool wrong;      // whether one of them is not finite
};

// Σ of the valid keys `from` to `to` in `totals` [D]: a thread takes 8 coordinates of every `tall`-th
// key; then the threads' sums in their order. All threads call it.
static __device__ Found sum_of(double* totals, double* parts, const Keys& keys, i64 batch, i64 head,
                               i64 from, i64 to, int dim) {
    __shared__ int found;
    int M = dim / 8, across = LANES ? LANES : M;
    int tall = min(THREADS / across, TALL), byte = threadIdx.x % across, row = threadIdx.x / across;
    bool own = row < tall && byte < M;
    i64 base = batch * keys.sb + head * keys.sg + byte * 8;
    double sums[8] = {};
    Found result = {0, 0, false};
    if (threadIdx.x == 0) found = 0;
    for (i64 first = from; first < to; first += AHEAD * tall) {
        Eight loaded[AHEAD] = {};
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            i64 i = first + k * tall + row;
            bool in = own && i < to;
            if (in && keys.valid) in = keys.valid[batch * keys.vb + i];
            if (in) loaded[k] = fetched(keys.data, base + i * keys.sn), result.count++;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            double squares = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                double x = coordinate(loaded[k], j);
                sums[j] += x;
                if (LANES) squares = fma(x, x, squares);
            }
            if (!LANES) continue;
#pragma unroll
            for (int step = 1; step < LANES; step *= 2)
                squares += __shfl_xor_sync(ALL, squares, step);
            result.longest = squares > result.longest ? squares : result.longest;
            result.wrong |= !(squares <= 1.7976931348623157e308);  // floats' squares sum to less
        }
    }
    __syncthreads();
    if (own)
        for (int j = 0; j < 8; j++) parts[row * dim + byte * 8 + j] = sums[j];
    if (byte == 0 && result.count) atomicAdd(&found, result.count);
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        double total = 0;
        for (int r = 0; r < tall; r++) total += parts[r * dim + d];
        totals[d] = total;
    }
    result.count = found;
    __syncthreads();
    return result;
}

__device__ __forceinline__ u16 rounded(double mean) {  // learn._rounded
    return to_bfloat16(float(fmin(fmax(mean, -LONGEST), LONGEST)));
}

// The reference of a largest norm, above 0: the logarithm rounded to float32, as torch's.
__device__ __forceinline__ float reference_of(float norm) {
    return ldexpf(1.0f, int(floorf(float(log2(double(norm))))) + HEADROOM);
}

// The block's share of the largest norm; a power of two grows with the norm, so that each block's
// own is a candidate: their maximum, as bits of positive floats, is the answer. All threads call it.
static __device__ void refer(double longest, float* answer) {
    __shared__ double tops[THREADS / 32];
    longest = warp_max(longest);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = longest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / 32; i++) longest = fmax(longest, tops[i]);
        float norm = float(fmin(sqrt(longest), LONGEST));
        if (norm > 0) atomicMax(reinterpret_cast<u32*>(answer), __float_as_uint(reference_of(norm)));
    }
    __syncthreads();
}

// Grid: (S - begin, G, B), THREADS threads, 8 (1 + min(TALL, THREADS / lanes of a key)) D bytes of
// dynamic shared memory. A block makes a segment's centre, and looks at its keys' norms; where the
// last segment has only begun, the block of the one before makes both. Reads the keys once, writes
// 2 D bytes per segment, 1 with the first head; what is known already is copied.
// Limited by the bus: a million keys of 8 heads at D = 128 take .79 ms on an H200, .60 of the rate
// of reading (benchmarks/results/append.json); a conversion to double per coordinate, 16 a cycle
// and SM, .3 ms of it by count.
// keys DTYPE [B, G, N, D], strides sb, sg, sn; valid bool [B, N], row stride vb, or null; old
// bfloat16 [B, G, old_row, D], `before` of them learnt; held bool [B, before]; centres bfloat16
// [B, G, row, D], or null: no centres; it may be old, from `begin` on: a block reads no other's.
// known bool [B, S]; given float32 [B, G], references, or null; answer float32 [B, G]: zeros;
// wrong int32 [1]: set where a valid key is not finite. start: id of the first key; every: tokens
// of a segment.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
learn(const void* data, const u8* valid, const u16* old, const u8* held, u16* centres, u8* known,
      const float* given, float* answer, int* wrong, i64 count, i64 dim, i64 before, i64 old_row,
      i64 row, i64 start, i64 every, i64 begin, i64 sb, i64 sg, i64 sn, i64 vb) {
    DYNAMIC_SHARED(space);
    double *totals = reinterpret_cast<double*>(space), *parts = totals + dim;
    Keys keys = {data, valid, count, sb, sg, sn, vb};
    i64 S = begin + gridDim.x, G = gridDim.y, batch = blockIdx.z, head = blockIdx.y;
    i64 bg = batch * G + head, s = begin + blockIdx.x;
    i64 first = start / every, stop = (start + count + every - 1) / every;
    bool begun = stop * every > start + count && stop > 1;  // the last segment is, and can lean
    if (centres && blockIdx.x == 0 && head == 0)
        for (i64 i = threadIdx.x; i < begin; i += THREADS)
            known[batch * S + i] = held[batch * before + i];
    // the last one's centre needs the one before: its block does it, unless that is an old one
    if (begun && s == stop - 1 && stop - 2 >= first) return;
    int knows = 0;
    double longest = 0;
    for (;; s++) {
        bool had = centres && s < before && held[batch * before + s], here = s >= first && s < stop;
        int n = 0;
        if (here && (LANES || !had)) {
            i64 from = max(s * every - start, i64(0)), to = min((s + 1) * every - start, count);
            Found found = sum_of(totals, parts, keys, batch, head, from, to, int(dim));
            n = found.count, longest = fmax(longest, found.longest);
            if (LANES && found.wrong) *wrong = 1;
        }
        u16* mine = centres + (bg * row + s) * dim;
        const u16* earlier = old + (bg * old_row + s) * dim;
        if (centres && (!here || had)) {
            for (int d = threadIdx.x; d < dim; d += THREADS) mine[d] = s < before ? earlier[d] : 0;
            knows = had;
        } else if (centres) {
            bool leans = begun && s == stop - 1;
            i64 last = s - 1;  // of which the centre is known: made by this block, or old
            if (leans && last < first) knows = last < before && held[batch * before + last];
            int lean = leans && knows ? LEAN : 0;
            const u16* one = last >= first ? mine - dim : earlier - dim;
            for (int d = threadIdx.x; d < dim; d += THREADS) {
                double total = totals[d];
                if (lean) total += lean * double(from_bfloat16(one[d]));
                mine[d] = rounded(total / max(n + lean, 1));
            }
            knows = n > 0;
        }
        if (centres && head == 0 && threadIdx.x == 0) known[batch * S + s] = u8(knows);
        if (!begun || s != stop - 2 || s < first) break;
        __syncthreads();
    }
    if (!LANES) return;
    if (given && given[bg] > 0) {
        if (threadIdx.x == 0 && blockIdx.x == 0) answer[bg] = given[bg];
    } else {
        refer(longest, answer + bg);
    }
}

// Grid: (splits, BG), THREADS threads. Reads 4 bytes per norm, once.
// norms float32 [BG, N]; valid as above; old float32 [BG] or null; found float32 [BG]: old, or 0.
extern "C" __global__ void __launch_bounds__(THREADS)
reference(const float* norms, const u8* valid, const float* old, float* found, i64 count, i64 vb,
          i64 kv_heads) {
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    if (old && old[bg] > 0) return;
    float top = 0;
    i64 stride = i64(gridDim.x) * THREADS;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride)
        if (!valid || valid[batch * vb + i]) top = fmaxf(top, norms[bg * count + i]);
    refer(double(top) * top, found + bg);
}
