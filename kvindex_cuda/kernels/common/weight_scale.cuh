// Compute the weight scale of a head: a power of two that is larger than the weights of all its keys. A weight
// is stored as a logarithm, an integer of 16 bits. `largest` is the largest upper byte of these integers.
// Reference implementation: kvindex.ops.codes.weight_scale.
#pragma once
#include "common/common.cuh"

__device__ __forceinline__ float scale_of(int largest) {
    int exponent = largest * OCTAVES / 256 + 1 - OCTAVES / 2;
    return __uint_as_float(u32(exponent + 127) << 23);
}
