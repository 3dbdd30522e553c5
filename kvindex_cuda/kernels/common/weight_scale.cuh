// Compute the scale of a head's log weights, a power of two, from the largest upper byte of these 16-bit
// weights. Reference: kvindex.ops.codes.weight_scale.
#pragma once
#include "common/common.cuh"

__device__ __forceinline__ float scale_of(int largest) {
    int exponent = largest * OCTAVES / 256 + 1 - OCTAVES / 2;
    return __uint_as_float(u32(exponent + 127) << 23);
}
