// Select the candidate keys by their tiered votes (approximate scores of keys), which vote.cu has computed. Each
// query head selects the C keys with the most votes. If keys have equal votes, those with lower token ids are
// selected. The candidates of a KV head are all keys that at least one of its query heads has selected.
// Reference: tiered_votes.candidates in kvindex/pariskv, kvindex.ops.select.candidates.
//
// The head's histogram of votes gives a threshold. All keys with more votes are selected, and of the keys with
// exactly this number of votes, as many of the first ones as are needed.
//
// Grid: (splits, BG), 256 threads. Reads 4 bytes per key and four heads, writes 8 bytes per candidate.
// Limited by memory.
// Compile-time constants: GROUP (query heads per KV head), RAGGED (1: each sequence has its own length).
#include "common/tier_votes.cuh"

constexpr int SETS = (GROUP + 3) / 4;
constexpr int KEYS = CHUNK / 256;
constexpr int VOTE = 0;  // of an entry: unused here, the same for all keys

struct Arguments {
    const u32* votes;        // written by vote.cu, as are totals and pieces
    const int* totals;
    const int* pieces;
    const u32* valid;        // [B, row, 8]: one bit per token, 1 if it is valid
    const i64* length;       // [1], or RAGGED: [B]: number of tokens
    const int* wanted;       // [B]: C, the number of keys that each head selects
    const int* counted;      // [B]: number of valid keys
    u64* candidates;         // [BG, capacity]: entries (`entry_of` in common.cuh), in any order
    int* candidate_counts;   // [BG] APART: number of candidates, cleared before the launch
    i64 row, capacity, kv_heads;
};

extern "C" __global__ void __launch_bounds__(256, GROUP <= 8 ? 3 : 2)
candidates(const __grid_constant__ Arguments args) {
    const u32 *valid = args.valid, *all_votes = args.votes;
    u64* kept = args.candidates;
    i64 capacity = args.capacity;
    __shared__ int cuts[GROUP], ranks[GROUP], before[GROUP][PIECES], ties[8][GROUP];
    i64 bg = blockIdx.y, batch = bg / args.kv_heads, tokens = min(i64(__ldcg(args.length + RAGGED * batch)), capacity);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 piece = piece_of(tokens), count = (tokens + piece - 1) / piece;
    int target = min(args.wanted[batch], args.counted[batch]);
    valid += batch * args.row * 8;
    kept += bg * capacity;
    after_previous();
    let_next_begin();
    if (i64(blockIdx.x) >= count) return;
    for (int h = warp; h < GROUP; h += 8) {  // lane 0 takes the bins with the most votes
        constexpr int OWN = POINTS / 32;
        i64 at = bg * GROUP + h;
        int here[OWN], mine = 0, cut = POINTS, rank = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++)
            mine += here[i] = __ldcg(args.totals + at * POINTS + POINTS - 1 - lane * OWN - i);
        int above = mine;
        for (int step = 1; step < 32; step *= 2) {
            int add = __shfl_up_sync(ALL, above, step);
            if (lane >= step) above += add;
        }
        above -= mine;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (above < target && above + here[i] >= target)
                cut = POINTS - 1 - lane * OWN - i, rank = target - above;
            above += here[i];
        }
        cut = -warp_max(-cut), rank = warp_max(rank);
        if (lane == 0) cuts[h] = cut, ranks[h] = rank;
        int sum = 0;  // keys at the threshold in the preceding chunks of tokens
#pragma unroll
        for (int from = 0; from < PIECES; from += 32) {
            int p = from + lane, own = 0;
            if (p < count && cut < POINTS) own = __ldcg(args.pieces + (at * PIECES + p) * POINTS + cut);
            int up = own;
            for (int step = 1; step < 32; step *= 2) {
                int add = __shfl_up_sync(ALL, up, step);
                if (lane >= step) up += add;
            }
            before[h][p] = sum + up - own;
            sum += __shfl_sync(ALL, up, 31);
        }
    }
    __syncthreads();

    for (i64 p = blockIdx.x; p < count; p += gridDim.x) {
        for (i64 start = p * piece; start < min(tokens, (p + 1) * piece); start += CHUNK) {
            u32 votes[KEYS][SETS];
            bool real[KEYS], in[KEYS];
            int first = warp * (KEYS * 32);  // keys are in the order of warps, then of `i`, then of lanes
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                i64 key = start + first + i * 32 + lane;
                real[i] = key < tokens && valid[key / 32] >> lane & 1;
                in[i] = false;
#pragma unroll
                for (int set = 0; set < SETS; set++)
                    votes[i][set] = key < tokens ? __ldcg(all_votes + (bg * SETS + set) * capacity + key) : 0;
            }
            auto vote_of = [&](int i, int h) { return int(votes[i][h / 4] >> (h % 4 * 8) & 255); };
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                int cut = cuts[h], own = 0;
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    int vote = vote_of(i, h);
                    in[i] |= real[i] && vote > cut;
                    own += __popc(__ballot_sync(ALL, real[i] && vote == cut));
                }
                if (lane == 0) ties[warp][h] = own;
            }
            __syncthreads();
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                int cut = cuts[h], rank = before[h][p];
                for (int w = 0; w < warp; w++) rank += ties[w][h];
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    bool tied = real[i] && vote_of(i, h) == cut;
                    u32 all = __ballot_sync(ALL, tied);
                    in[i] |= tied && rank + __popc(all & ((1u << lane) - 1)) < ranks[h];
                    rank += __popc(all);
                }
            }
            int own = 0;
#pragma unroll
            for (int i = 0; i < KEYS; i++) own += in[i];
            int to = room_for<256>(own, args.candidate_counts + bg * APART);
#pragma unroll
            for (int i = 0; i < KEYS; i++)
                if (in[i]) kept[to++] = entry_of(VOTE, int(start) + first + i * 32 + lane);
            if (threadIdx.x < GROUP) {  // carry the ties over to the next CHUNK keys
                int sum = 0;
                for (int w = 0; w < 8; w++) sum += ties[w][threadIdx.x];
                before[threadIdx.x][p] += sum;
            }
            __syncthreads();
        }
    }
}
