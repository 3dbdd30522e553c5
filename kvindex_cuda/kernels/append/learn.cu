// Centers of segments and the scale of weights, learned of tokens as they come (ops/learn.py).
//
// Sums of a segment are in double and in a fixed order, so that two runs learn the same. Where keys are
// coded next, segments that an append covers whole are left to `encode.cu`, which makes their centers
// as it codes them.
// Compile-time: DTYPE (of the keys), WIDE (whether each key begins at a multiple of 16 bytes).
#include "common/common.cuh"

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

// Where keys and what is learned already lie.
struct Keys {
    const void* data;
    const u8* valid;  // [B, N], or null
    i64 count, sb, sg, sn, vb;
};

struct Sum {
    int count;   // of valid keys
    bool wrong;  // whether one that this thread has seen is not finite
};

// Σ of the valid keys `from` to `to` in `totals` [D]: a thread takes 8 coordinates of every `tall`-th
// key; then the threads' sums in their order. All threads call it.
static __device__ Sum sum_of(double* totals, double* parts, const Keys& keys, i64 batch, i64 head,
                               i64 from, i64 to, int dim) {
    __shared__ int found;
    int M = dim / 8, tall = min(THREADS / M, TALL), byte = threadIdx.x % M, row = threadIdx.x / M;
    bool own = row < tall;
    i64 base = batch * keys.sb + head * keys.sg + byte * 8;
    double sums[8] = {};
    Sum result = {0, false};
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
        for (int k = 0; k < AHEAD; k++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += coordinate(loaded[k], j);
    }
    for (int j = 0; j < 8; j++)  // sums of finite floats are finite
        result.wrong |= !(fabs(sums[j]) <= 1.7976931348623157e308);
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
    return to_bfloat16(float(fmin(fmax(mean, -double(LONGEST)), double(LONGEST))));
}

// The weight scale of a largest norm, above 0: the logarithm rounded to float32, as torch's.
__device__ __forceinline__ float scale_of(float norm) {
    return ldexpf(1.0f, int(floorf(float(log2(double(norm))))) + HEADROOM);
}

// Of the SEEN keys from the first one on that has a norm, the `part`-th THREADS: a power of two grows
// with the norm, so that each block's own is a candidate, and their maximum, as bits of positive
// floats, the answer, which is zero before; of no more than THREADS keys there is one block, and it
// may be anything. real(i): whether key i has one; norm(i). All threads call it.
template <class Real, class Norm>
static __device__ void find_scale(i64 part, i64 count, Real real, Norm norm, float* answer) {
    constexpr int EACH = SEEN / THREADS;
    __shared__ u32 first;
    __shared__ double tops[THREADS / 32];
    if (threadIdx.x == 0) first = u32(count);
    __syncthreads();
    for (i64 from = 0; from < count; from += SEEN) {
        i64 i = from + threadIdx.x * EACH, to = min(i + EACH, count);
        while (i < to && !real(i)) i++;
        if (i < to) atomicMin(&first, u32(i));
        __syncthreads();
        bool found = first < u32(count);
        __syncthreads();
        if (found) break;
    }
    i64 i = first + part * THREADS + threadIdx.x;
    double longest = part < EACH && i < count && real(i) ? norm(i) : 0.0;
    longest = warp_max(longest);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = longest;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < THREADS / 32; i++) longest = fmax(longest, tops[i]);
    float top = float(fmin(longest, double(LONGEST)));
    float found = top > 0 ? scale_of(top) : 0.0f;
    if (count <= THREADS)
        *answer = found;
    else if (found > 0)
        atomicMax(reinterpret_cast<u32*>(answer), __float_as_uint(found));
}

struct Arguments {
    const void* keys;            // DTYPE [B, G, N, D]
    const u8* valid;             // bool [B, N], or null
    const u16* old_centers;      // bfloat16 [B, G, old_row, D], `before` of them learned
    const u8* old_known;         // bool [B, before]
    u16* centers;                // bfloat16 [B, G, row, D], or null: no centers; may be the old ones, from `begin` on:
                                 // a block reads no other's
    u8* known;                   // bool [B, segments]
    const float* old_scale;      // [B, G]: weight scales, or null
    float* weight_scale;         // [B, G]: as of `find_scale`
    int* wrong;                  // [1]: set to 1 where a valid key is not finite, or null
    i64 count;                   // N
    i64 dim, before, old_row, row;
    i64 start;                   // id of the first key
    i64 every;                   // tokens of a segment
    i64 begin, segments, skip, skipped;
    i64 keys_batch, keys_head, keys_token;  // strides
    i64 valid_batch;
};

// Grid: (segments + windows, G, B), THREADS threads, 8 (1 + min(TALL, 2048 / D)) D bytes of dynamic
// shared memory. A block makes a segment's center and looks whether its keys are finite; where the last
// segment has only begun, the block of the one before makes both. What is known already is copied.
// `windows` more blocks look at THREADS of the first keys each, for a weight scale. Reads the keys of
// its segments once and at most SEEN more of each head, writes 2 D bytes per segment, 1 with the
// first head. Limited by the bus where it has all segments: a million keys of 8 heads at D = 128 took
// .79 ms on an H200, norms included, .60 of the rate of reading.
// Segments: those from `begin` to `segments` but for `skipped` of them from `skip` on.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
learn(const __grid_constant__ Arguments args) {
    let_next_begin();
    DYNAMIC_SHARED(space);
    double *totals = reinterpret_cast<double*>(space), *parts = totals + args.dim;
    Keys keys = {args.keys, args.valid, args.count, args.keys_batch, args.keys_head, args.keys_token, args.valid_batch};
    i64 G = gridDim.y, batch = blockIdx.z, head = blockIdx.y, bg = batch * G + head;
    i64 s = args.begin + blockIdx.x, first = args.start / args.every;
    i64 stop = (args.start + args.count + args.every - 1) / args.every;
    if (s >= args.skip) s += args.skipped;
    bool begun = stop * args.every > args.start + args.count && stop > 1;  // the last segment is, and can lean
    if (args.centers && blockIdx.x == 0 && head == 0)
        for (i64 i = threadIdx.x; i < args.begin; i += THREADS)
            args.known[batch * args.segments + i] = args.old_known[batch * args.before + i];
    if (s >= args.segments) {
        if (args.old_scale && args.old_scale[bg] > 0) {
            if (threadIdx.x == 0 && s == args.segments) args.weight_scale[bg] = args.old_scale[bg];
            return;
        }
        i64 base = batch * args.keys_batch + head * args.keys_head;
        auto real = [&](i64 i) {
            if (args.valid && !args.valid[batch * args.valid_batch + i]) return false;
            for (int d = 0; d < args.dim; d += 8) {
                Eight x = fetched(args.keys, base + i * args.keys_token + d);
                for (u32 word : x.words)
                    if (word & (DTYPE == 0 ? 0x7fffffffu : 0x7fff7fffu)) return true;
            }
            return false;
        };
        auto norm = [&](i64 i) {
            double squares = 0;
#pragma unroll 4
            for (int d = 0; d < args.dim; d += 8) {
                Eight x = fetched(args.keys, base + i * args.keys_token + d);
                for (int j = 0; j < 8; j++) {
                    double y = coordinate(x, j);
                    squares = fma(y, y, squares);
                }
            }
            return sqrt(squares);
        };
        find_scale(s - args.segments, args.count, real, norm, args.weight_scale + bg);
        return;
    }
    // the last one's center needs the one before: its block does it, unless that is an old one
    if (begun && s == stop - 1 && stop - 2 >= first) return;
    int is_known = 0;
    for (;; s++) {
        bool was_known = args.centers && s < args.before && args.old_known[batch * args.before + s];
        bool here = s >= first && s < stop;
        int n = 0;
        if (here && (args.wrong || !was_known)) {
            i64 from = max(s * args.every - args.start, i64(0)), to = min((s + 1) * args.every - args.start, args.count);
            Sum found = sum_of(totals, parts, keys, batch, head, from, to, int(args.dim));
            n = found.count;
            if (args.wrong && found.wrong) *args.wrong = 1;
        }
        u16* mine = args.centers + (bg * args.row + s) * args.dim;
        const u16* earlier = args.old_centers + (bg * args.old_row + s) * args.dim;
        if (args.centers && (!here || was_known)) {
            for (int d = threadIdx.x; d < args.dim; d += THREADS) mine[d] = s < args.before ? earlier[d] : 0;
            is_known = was_known;
        } else if (args.centers) {
            bool leans = begun && s == stop - 1;
            i64 last = s - 1;  // of which the center is known: made by this block, or old
            if (leans && last < first) is_known = last < args.before && args.old_known[batch * args.before + last];
            int lean = leans && is_known ? LEAN : 0;
            const u16* one = last >= first ? mine - args.dim : earlier - args.dim;
            for (int d = threadIdx.x; d < args.dim; d += THREADS) {
                double total = totals[d];
                if (lean) total += lean * double(from_bfloat16(one[d]));
                mine[d] = rounded(total / max(n + lean, 1));
            }
            is_known = n > 0;
        }
        if (args.centers && head == 0 && threadIdx.x == 0) args.known[batch * args.segments + s] = u8(is_known);
        if (!begun || s != stop - 2 || s < first) return;
        __syncthreads();
    }
}

struct NormArguments {
    const float* norms;       // [B, G, N]
    const u8* valid;          // bool [B, N], or null
    const float* old_scale;   // [BG], or null
    float* weight_scale;      // [BG]: the old one, or 0
    i64 count;                // N
    i64 valid_batch, kv_heads;
};

// Grid: (windows, BG), THREADS threads. Reads 4 bytes per norm of the first SEEN.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_scale(const __grid_constant__ NormArguments args) {
    i64 bg = blockIdx.y, batch = bg / args.kv_heads;
    if (args.old_scale && args.old_scale[bg] > 0) return;
    auto norm = [&](i64 i) { return double(args.norms[bg * args.count + i]); };
    auto real = [&](i64 i) { return (!args.valid || args.valid[batch * args.valid_batch + i]) && norm(i) > 0; };
    find_scale(blockIdx.x, args.count, real, norm, args.weight_scale + bg);
}
