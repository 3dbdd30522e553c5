// Add up the attention weights of the resident rows (sink and window) for up to 128 query heads that share a KV head
// (latent attention). select_latents.cu needs them to choose the number of rows by the expected error of attention.
// Reference: _resident_lse in kvindex/layer/retrieval.py.
//
// Heads are processed in TILES tiles of GROUP heads. The thread blocks of a tile divide the rows among them.
//
// Grid: (TILES, resident_splits, B), 256 threads. Reads 2 D bytes per row and tile for 16-bit numbers, all but the
// first time from L2; writes 8 bytes per head and thread block. Limited by the latency of these reads.
// Compile-time constants: D, GROUP (heads of a tile), TILES, DTYPE, RAGGED (1: each sequence has its own count of
// resident rows).
#include "common/resident_sums.cuh"

struct Arguments {
    const void* queries;        // DTYPE [B, TILES GROUP, D]
    const void* token_keys;     // null: the newest token is already in `resident`
    const void* resident;       // DTYPE [B, room, D + DV]
    const u8* resident_mask;    // [B, room]: 1 where a resident row is valid
    const i64* resident_count;  // [1], or RAGGED: [B]: number of resident rows
    float2* resident_parts;     // [B, resident_splits, TILES GROUP]: largest logit of the resident rows of a part, and
                                // the sum of exp(logit − largest)
    i64 resident_splits, room, value_dim;  // room: capacity of `resident`; value_dim: DV
    float scale, softcap;       // softcap: 0 without one
};

extern "C" __global__ void __launch_bounds__(256)
resident_latents(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) float memory[GROUP * (D > 2 * SUM_TEAMS ? D : 2 * SUM_TEAMS)];
    __shared__ i64 count;
    constexpr int HEADS = TILES * GROUP;
    i64 b = blockIdx.z, tile = blockIdx.x, split = blockIdx.y;
    const char* queries = static_cast<const char*>(args.queries) + (b * HEADS + tile * GROUP) * i64(D * (DTYPE == 0 ? 4 : 2));
    after_previous();
    let_next_begin();
    float2* to = args.resident_parts + (b * args.resident_splits + split) * HEADS + tile * GROUP;
    resident_sums(args, b, b, b, queries, false, int(split), memory, &count, to);
}
