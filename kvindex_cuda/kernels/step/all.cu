// One stage: estimates of all keys, in one pass over their codes (paper, B.2.2, equation 10; one
// log weight of 16 bits per key). What select_rows.cu selects from, as rerank.cu leaves it.
//
// The product is rerank.cu's (product.cuh); but keys come in order, so that nothing is looked up and
// loads of neighboring lanes are neighbors. Sums of exponentials are floats in a lane, in an order
// that the grid fixes, then integers.
// Grid: (splits, BG), 256 threads; a warp takes 64 keys at a time, every 8 · splits-th. Reads
// (1 + BITS) D / 8 + 2 bytes per key and 2 D per 64; writes 8 + 4 GROUP per key.
// Limited by the latency of instructions, with half the issue slots in use (ncu): some 25 of a warp
// per key (counted; D = 128, 3 bits, 4 heads).
// Compile-time: D, BITS (of a magnitude), GROUP, DTYPE (of queries), CENTERED, SOFTCAP.
#include "common/product.cuh"
#include "common/shares.cuh"

constexpr int PART = 64;  // keys of a warp at a time
constexpr int VOTE = 2;   // of an entry: its bin lies above that of the cut, 1

// queries DTYPE [BG, GROUP, D]; table int64 [B, row]: addresses of blocks, of KV head g at g · head;
// logs, magnitudes, center: of the layout; operands, ups: of query_table.cu; levels float32 [LEVELS];
// weight_scales float32 [BG]; valid uint32 [B, row, 8], a bit per token; length int64 [1].
// kept uint64 [BG, capacity]: an entry for each key in order, 0 for none; estimates float32 [BG,
// capacity, GROUP]; many, counts int32 [BG] APART: keys, and more than there are candidates; buckets
// uint64 [BG, GROUP, BUCKETS], cleared before. Keys past the capacity are not seen.
extern "C" __global__ void __launch_bounds__(256, D > 128 || BITS > 3 || GROUP > 8 ? 1 : 2)
all(const void* queries, const i64* table, i64 row, i64 head, i64 logs, i64 magnitudes, i64 center,
    const uint2* operands, const float* ups, const float* given_levels, const float* weight_scales,
    const u32* valid, const i64* length, u64* kept, float* estimates, int* many, int* counts,
    u64* buckets, i64 capacity, i64 kv_heads, float scale, float softcap, float octaves) {
    __shared__ u16 halves[LEVELS];
    __shared__ uint2 asked[OPERANDS];
    __shared__ float peaks[8][GROUP], totals[8][GROUP];
    i64 bg = blockIdx.y, batch = bg / kv_heads;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < LEVELS; i += 256) halves[i] = to_float16(given_levels[i]);
    i64 tokens = min(i64(__ldcg(length)), capacity);
    float weight_scale = weight_scales[bg];
    table += batch * row;
    kept += bg * capacity;
    estimates += bg * capacity * GROUP;
    int items = int((tokens + PART - 1) / PART), step = gridDim.x * 8;
    int item = blockIdx.x * 8 + warp;
    auto address = [&](int i) {
        return reinterpret_cast<const char*>(table[i / (TOKENS / PART)]) + bg % kv_heads * head;
    };
    auto load_tile = [&](Tile& tile, const char* at, int first) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            load<true>(tile, half, at, first + half * 8 + lane / 4, logs, magnitudes);
    };
    Tile next;
    const char* at = nullptr;
    if (item < items) {
        at = address(item);
        load_tile(next, at, item % (TOKENS / PART) * PART);
    }
    after_previous();
    let_next_begin();
    for (int i = threadIdx.x; i < OPERANDS; i += 256) asked[i] = __ldcg(operands + bg * OPERANDS + i);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        many[bg * APART] = int(tokens), counts[bg * APART] = 2147483647;
    float down[COLUMNS][2], peak[COLUMNS][2], total[COLUMNS][2];
#pragma unroll
    for (int set = 0; set < COLUMNS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int h = head_of(set, side);
            down[set][side] = h < GROUP ? 1 / __ldcg(ups + bg * GROUP + h) : 0.0f;
            peak[set][side] = NEVER, total[set][side] = 0;
        }
    __syncthreads();
    Levels levels = levels_of(halves);

    while (item < items) {
        const char* here = at;
        int now = item, part = now % (TOKENS / PART);
        item += step;
        at = item < items ? address(item) : nullptr;
        float products[COLUMNS][2] = {};
#if CENTERED
        u32 mean[(D + 63) / 64];
#pragma unroll
        for (int i = 0; i < (D + 63) / 64; i++) {
            int j = lane * 2 + i * 64;
            mean[i] = j < D ? reinterpret_cast<const u32*>(here + center)[j / 2] : 0;
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float dot = 0;
#pragma unroll
            for (int i = 0; i < (D + 63) / 64; i++) {
                int j = lane * 2 + i * 64;
                if (j >= D) continue;
                dot += element(queries, (bg * GROUP + h) * D + j) * __uint_as_float(mean[i] << 16);
                dot += element(queries, (bg * GROUP + h) * D + j + 1) * __uint_as_float(mean[i] & 0xffff0000u);
            }
            dot = warp_sum(dot);
#pragma unroll
            for (int i = 0; i < COLUMNS * 2; i++)
                if (head_of(i / 2, i % 2) == h) products[i / 2][i % 2] = dot;
        }
#endif
        const u32* bits = valid + (batch * row + now / (TOKENS / PART)) * 8 + part * 2;
#pragma unroll 1
        for (int first = 0; first < PART; first += 16) {
            Tile tile = next;
            if (first + 16 < PART) load_tile(next, here, part * PART + first + 16);
            else if (at) load_tile(next, at, item % (TOKENS / PART) * PART);
            int start = now * PART + first;
            u32 real = bits[first / 32] >> first % 32 & 0xffff;
            if (start + 16 > tokens) real &= start < tokens ? (1u << (tokens - start)) - 1 : 0;
            if (lane < 16 && start + lane < tokens)
                kept[start + lane] = real >> lane & 1 ? entry_of(VOTE, start + lane) : 0;
#pragma unroll
            for (int set = 0; set < COLUMNS; set++) {
                float both[ROWS][2];
                multiply(both, tile, asked, set, levels);
#pragma unroll
                for (int half = 0; half < ROWS; half++) {
                    int log = log_of(tile, half), key = key_of(half);
                    float weight = log ? exp2f(float(log - 65535) * (octaves / 65536)) * weight_scale : 0.0f;
                    float found[2];
#pragma unroll
                    for (int side = 0; side < 2; side++)
                        found[side] = both[half][side] * down[set][side] * weight + products[set][side];
                    int h = head_of(set, 0);
                    if (h >= GROUP || start + key >= tokens) continue;
                    float* out = estimates + i64(start + key) * GROUP + h;
                    if (GROUP % 2 == 0) {
                        *reinterpret_cast<float2*>(out) = {found[0], found[1]};
                    } else {
                        out[0] = found[0];
                        if (h + 1 < GROUP) out[1] = found[1];
                    }
                    if (!(real >> key & 1)) continue;
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        float x = capped(found[side], scale, softcap) * LOG2E;
                        if (x > peak[set][side]) {
                            total[set][side] *= exp2f(peak[set][side] - x);
                            peak[set][side] = x;
                        }
                        total[set][side] += exp2f(x - peak[set][side]);
                    }
                }
            }
        }
    }

    // over lanes, then warps; then as integers
#pragma unroll
    for (int set = 0; set < COLUMNS; set++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int h = head_of(set, side);
            float top = peak[set][side], mine = top;
            for (int other = FOLDED ? 2 : 4; other < 32; other *= 2)
                top = fmaxf(top, __shfl_xor_sync(ALL, top, other));
            float sum = mine > NEVER ? total[set][side] * exp2f(mine - top) : 0.0f;
            for (int other = FOLDED ? 2 : 4; other < 32; other *= 2)
                sum += __shfl_xor_sync(ALL, sum, other);
            if (lane < (FOLDED ? 2 : 4) && h < GROUP) peaks[warp][h] = top, totals[warp][h] = sum;
        }
    __syncthreads();
    if (threadIdx.x >= GROUP) return;
    float top = NEVER, sum = 0;
    for (int w = 0; w < 8; w++) top = fmaxf(top, peaks[w][threadIdx.x]);
    for (int w = 0; w < 8; w++)
        if (peaks[w][threadIdx.x] > NEVER) sum += totals[w][threadIdx.x] * exp2f(peaks[w][threadIdx.x] - top);
    if (sum > 0) {
        Exponentials one;
        u64* memory = buckets + (bg * GROUP + threadIdx.x) * BUCKETS;
        one.add(memory, (top + log2f(sum)) * (1 / LOG2E));
        one.write(memory);
    }
}
