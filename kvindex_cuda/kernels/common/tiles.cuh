// Many heads of a group in tiles of GROUP: what prepare_query.cu says of each tile is one for the group.
// Compile-time: TILES (of a group), DRAWN.
#pragma once
#include "common/common.cuh"

// From which vote on keys are listed, and bins of those. More keys than are wanted reach a tile's own threshold;
// so they do the largest of a group's tiles. Of equal ones any has it.
struct Listing {
    int threshold, base, shift;
};
// thresholds, bases, shifts: of a group's first tile.
__device__ __forceinline__ Listing listing_of(const int* thresholds, const int* bases, const int* shifts) {
    Listing found = {__ldcg(thresholds), __ldcg(bases), __ldcg(shifts)};
#pragma unroll 4
    for (int t = 1; t < TILES; t++) {
        int threshold = __ldcg(thresholds + t);
        if (threshold > found.threshold) found.threshold = threshold, found.base = __ldcg(bases + t);
        found.shift = max(found.shift, __ldcg(shifts + t));
    }
    return found;
}
