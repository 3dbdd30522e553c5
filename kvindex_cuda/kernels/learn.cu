// What an index learns of tokens as they come: centres of segments, a reference for weights
// (ops/learn.py).
//
// Sums of a segment are in double and in a fixed order, so that two runs learn the same.
// Compile-time: DTYPE (of the keys), WIDE (whether each key begins at a multiple of 16 bytes).
#include "common.cuh"

constexpr int LEAN = 16;      // learn.LEAN
constexpr int HEADROOM = 5;   // learn.HEADROOM
constexpr int THREADS = 256;

__device__ __forceinline__ void load8(float (&x)[8], const void* data, i64 i) {
#if WIDE && DTYPE == 0
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
    float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#elif WIDE
    uint4 all = *reinterpret_cast<const uint4*>(static_cast<const u16*>(data) + i);
    u32 pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u16 bits = u16(pairs[j / 2] >> (j % 2 * 16));
        x[j] = DTYPE == 1 ? from_float16(bits) : from_bfloat16(bits);
    }
#else
    for (int j = 0; j < 8; j++) x[j] = element(data, i + j);
#endif
}

// Where keys and what is learnt already lie.
struct Keys {
    const void* data;
    const u8* valid;  // [B, N], or null
    i64 count, sb, sg, sn, vb;
};

// Σ of the valid keys `from` to `to` in `totals` [D], and how many: a thread takes 8 coordinates of
// every (THREADS / M)-th key; then the threads' sums in their order. All threads call it.
static __device__ int sum_of(double* totals, double* parts, const Keys& keys, i64 batch, i64 head,
                             i64 from, i64 to, int dim) {
    __shared__ int found;
    int M = dim / 8, tall = min(THREADS / M, 16), byte = threadIdx.x % M, row = threadIdx.x / M;
    i64 base = batch * keys.sb + head * keys.sg;
    double sums[8] = {};
    int counted = 0;
    if (threadIdx.x == 0) found = 0;
    if (row < tall)
        for (i64 i = from + row; i < to; i += tall) {
            if (keys.valid && !keys.valid[batch * keys.vb + i]) continue;
            float x[8];
            load8(x, keys.data, base + i * keys.sn + byte * 8);
            for (int j = 0; j < 8; j++) sums[j] += double(x[j]);
            counted++;
        }
    __syncthreads();
    if (row < tall)
        for (int j = 0; j < 8; j++) parts[row * dim + byte * 8 + j] = sums[j];
    if (byte == 0 && counted) atomicAdd(&found, counted);
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        double total = 0;
        for (int r = 0; r < tall; r++) total += parts[r * dim + d];
        totals[d] = total;
    }
    int result = found;
    __syncthreads();
    return result;
}

__device__ __forceinline__ u16 rounded(double mean) {  // learn._rounded
    double longest = 1152921504606846976.0;            // transform.LONGEST
    return to_bfloat16(float(fmin(fmax(mean, -longest), longest)));
}

// Grid: (S, G, B), THREADS threads, 8 (1 + min(16, THREADS / M)) D bytes of dynamic shared memory.
// A block makes a segment's centre; where the last segment has only begun, the block of the one
// before makes both. Reads the keys once, writes 2 D bytes per segment, 1 with the first head; what
// is known already is copied.
// Limited by the bus: a conversion to double per coordinate, 16 a cycle and SM, takes .3 ms for a
// million keys of 8 heads at D = 128, two thirds of what their bytes take (counted, not measured).
// keys DTYPE [B, G, N, D], strides sb, sg, sn; valid bool [B, N], row stride vb, or null; old
// bfloat16 [B, G, before, D]; held bool [B, before]; centres bfloat16 [B, G, S, D]; known bool
// [B, S]. start: id of the first key; every: tokens of a segment.
extern "C" __global__ void __launch_bounds__(THREADS)
centres(const void* data, const u8* valid, const u16* old, const u8* held, u16* centres, u8* known,
        i64 count, i64 dim, i64 before, i64 start, i64 every, i64 sb, i64 sg, i64 sn, i64 vb) {
    DYNAMIC_SHARED(space);
    double *totals = reinterpret_cast<double*>(space), *parts = totals + dim;
    Keys keys = {data, valid, count, sb, sg, sn, vb};
    i64 S = gridDim.x, G = gridDim.y, batch = blockIdx.z, head = blockIdx.y, bg = batch * G + head;
    i64 first = start / every, stop = (start + count + every - 1) / every;
    bool begun = stop * every > start + count && stop > 1;  // the last segment is, and can lean
    i64 s = blockIdx.x;
    // the last one's centre needs the one before: its block does it, unless that is an old one
    if (begun && s == stop - 1 && stop - 2 >= first) return;
    int knows = 0;
    for (;; s++) {
        bool had = s < before && held[batch * before + s];
        u16* mine = centres + (bg * S + s) * dim;
        const u16* earlier = old + (bg * before + s) * dim;
        if (s < first || s >= stop || had) {
            for (int d = threadIdx.x; d < dim; d += THREADS) mine[d] = s < before ? earlier[d] : 0;
            knows = had;
        } else {
            i64 from = max(s * every - start, i64(0)), to = min((s + 1) * every - start, count);
            int n = sum_of(totals, parts, keys, batch, head, from, to, int(dim));
            bool leans = begun && s == stop - 1;
            i64 last = s - 1;  // of which the centre is known: made by this block, or old
            if (leans && last < first) knows = last < before && held[batch * before + last];
            int lean = leans && knows ? LEAN : 0;
            const u16* one = last >= first ? mine - dim : old + (bg * before + last) * dim;
            for (int d = threadIdx.x; d < dim; d += THREADS) {
                double total = totals[d];
                if (lean) total += lean * double(from_bfloat16(one[d]));
                mine[d] = rounded(total / max(n + lean, 1));
            }
            knows = n > 0;
        }
        if (head == 0 && threadIdx.x == 0) known[batch * S + s] = u8(knows);
        if (!begun || s != stop - 2 || s < first) return;
        __syncthreads();
    }
}

// Grid: (splits, BG), THREADS threads. Reads 4 bytes per norm, once. The power of two grows with
// the norm, so each block's own is a candidate: their maximum, as bits of positive floats, is the
// answer.
// norms float32 [BG, N]; valid as above; old float32 [BG] or null; found float32 [BG]: old, or 0.
extern "C" __global__ void __launch_bounds__(THREADS)
reference(const float* norms, const u8* valid, const float* old, float* found, i64 count, i64 vb,
          i64 kv_heads) {
    __shared__ float tops[THREADS / 32];
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    if (old && old[bg] > 0) return;
    float top = 0;
    i64 stride = i64(gridDim.x) * THREADS;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride)
        if (!valid || valid[batch * vb + i]) top = fmaxf(top, norms[bg * count + i]);
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < THREADS / 32; i++) top = fmaxf(top, tops[i]);
    if (!(top > 0)) return;
    // the logarithm rounded to float32, as the reference's
    float power = ldexpf(1.0f, int(floorf(float(log2(double(top))))) + HEADROOM);
    atomicMax(reinterpret_cast<u32*>(found + bg), __float_as_uint(power));
}
