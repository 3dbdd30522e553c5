// Compute the tiered votes (approximate scores) of all keys with a lookup table per query (ParisKV paper,
// B.2.1), and make a histogram of the votes for each head. Reference: tiered_votes.vote in kvindex/pariskv,
// kvindex.ops.coarse.votes.
//
// The table is in shared memory. Each word packs the bytes of four heads, so that one lookup and one addition
// serve four heads. There is one histogram of all keys, and one for each chunk of tokens. With the latter,
// candidates.cu finds the keys with the lowest token ids among equal votes. All numbers are integers, so the
// result equals the reference exactly, given the same table.
//
// Grid: (splits, BG), 256 threads. Reads D / 8 bytes per key, writes 4 bytes per key and four heads, and the
// histograms.
// Limited by shared memory: M lookups per key in random banks, about 3.5 cycles for the 32 lanes of a warp.
// That is 65 µs for 1M keys of 8 KV heads at D = 128 (calculated).
// Compile-time constants: D, GROUP (query heads per KV head), RAGGED (1: each sequence has its own length).
#include "common/tier_votes.cuh"

constexpr int M = D / 8;
constexpr int WORDS = (M + 3) / 4;  // words of a key's signs
constexpr int SETS = (GROUP + 3) / 4;
constexpr int RECORDS = CHUNK / TOKENS;

struct Arguments {
    const i64* codes;           // [B, row]: addresses of blocks of codes; the record of KV head g begins at g ·
                                // head_bytes
    const uint4* query_table;   // [BG, SETS, M, 256] words, written by query_table.cu
    const u32* valid;           // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;          // [1], or RAGGED: [B]: number of tokens
    u32* votes;                 // [BG, SETS, capacity]: votes of four heads, one byte each
    int* totals;                // [BG, GROUP, POINTS]: number of keys by votes, cleared before the launch
    int* pieces;                // [BG, GROUP, PIECES, POINTS]: the same for each chunk of tokens
    i64 row, head_bytes, capacity, kv_heads;
};

// Compute votes only for the first `capacity` keys of a sequence, because the output has no room for more.
extern "C" __global__ void __launch_bounds__(256, 4)
vote(const __grid_constant__ Arguments args) {
    const i64* table = args.codes;
    const u32* valid = args.valid;
    DYNAMIC_SHARED(memory);  // 1 KB · M: the table of four heads
    __shared__ int bins[4 * POINTS];
    u32* entries = reinterpret_cast<u32*>(memory);
    i64 bg = blockIdx.y, batch = bg / args.kv_heads, tokens = min(i64(__ldcg(args.length + RAGGED * batch)), args.capacity);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    table += batch * args.row;
    valid += batch * args.row * 8;
    i64 piece = piece_of(tokens), many = (tokens + piece - 1) / piece;
    after_previous();
    let_next_begin();
    if (i64(blockIdx.x) >= many) return;

    for (int set = 0; set < SETS; set++) {
        __syncthreads();
        for (int i = threadIdx.x; i < M * 64; i += 256)
            reinterpret_cast<uint4*>(entries)[i] = __ldcg(args.query_table + (bg * SETS + set) * (M * 64) + i);
        for (int i = threadIdx.x; i < 4 * POINTS; i += 256) bins[i] = 0;
        __syncthreads();
        for (i64 p = blockIdx.x; p < many; p += gridDim.x) {
            for (i64 start = p * piece; start < min(tokens, (p + 1) * piece); start += CHUNK) {
                u32 ids[RECORDS][WORDS];
                const char* blocks[RECORDS];
                u32 real[RECORDS];
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
                    i64 s = start / TOKENS + i, key = start + i * TOKENS + threadIdx.x;
                    bool any = s * TOKENS < tokens;
                    blocks[i] = any ? reinterpret_cast<const char*>(table[s]) + bg % args.kv_heads * args.head_bytes : nullptr;
                    real[i] = any && key < tokens ? valid[s * 8 + warp] >> lane & 1 : 0;
                }
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
#pragma unroll
                    for (int w = 0; w < WORDS; w++) ids[i][w] = 0;
                    if (blocks[i]) load_signs(ids[i], blocks[i]);
                }
#pragma unroll
                for (int i = 0; i < RECORDS; i++) {
                    u32 sum = 0;
#pragma unroll
                    for (int b = 0; b < M; b++)
                        sum += entries[b * 256 + (ids[i][b / 4] >> (b % 4 * 8) & 255)];
                    i64 key = start + i * TOKENS + threadIdx.x;
                    if (key < tokens) args.votes[(bg * SETS + set) * args.capacity + key] = sum;
                    if (real[i])
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            if (set * 4 + h < GROUP) atomicAdd(bins + h * POINTS + (sum >> 8 * h & 255), 1);
                }
            }
            __syncthreads();
            for (int h = 0; h < 4 && set * 4 + h < GROUP; h++) {
                i64 at = bg * GROUP + set * 4 + h;
                int found = bins[h * POINTS + threadIdx.x];
                bins[h * POINTS + threadIdx.x] = 0;
                args.pieces[(at * PIECES + p) * POINTS + threadIdx.x] = found;
                if (found) atomicAdd(args.totals + at * POINTS + threadIdx.x, found);
            }
            __syncthreads();
        }
    }
}
