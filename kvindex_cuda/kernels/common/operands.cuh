// Layout of rotated queries as tensor core operands for rerank.cu.
//
// Each query coordinate is stored as two float16 numbers, the rounded value and the remainder (the rounding
// error), which together have 22 bits of precision. A tensor core product has 8 columns. With up to four heads
// (FOLDED), 4 columns are the rounded values and 4 columns the remainders of these heads. With more heads, 8
// rounded values and 8 remainders need two products.
// Compile-time constants: D, GROUP (query heads of a group).
#pragma once
#include "common/common.cuh"

constexpr int STRIDE = (D / 8 + 3) / 4 * 4;  // bytes of a key's signs, and of one plane of its magnitudes
constexpr int WORDS = STRIDE / 4;
constexpr int QUADS = (WORDS + 3) / 4;       // sets of 4 words; each of four lanes takes one word of a set
constexpr bool FOLDED = GROUP <= 4;
constexpr int COLUMNS = (GROUP + 7) / 8;     // sets of 8 heads
constexpr int OPERANDS = COLUMNS * QUADS * 256 * (FOLDED ? 1 : 2);  // operands of a group, 8 bytes each

// Return the position of coordinate j of query head h in the array of operands. This array contains the queries
// of all heads that share a KV head, in the order in which tensor cores need them.
//   part: 0 for the rounded value of the coordinate, 1 for the remainder (the rounding error).
// One word of a key's code has one bit of each of 32 coordinates. Tensor cores process a word in 8 products. Each
// product takes 4 of the 32 coordinates: product number 2 b + c takes the coordinates b + 16 c + {0, 4, 8, 12},
// where b is 0 to 3 and c is 0 or 1.
__device__ __forceinline__ int operand_of(int h, int j, int part) {
    int word = j / 32, bit = j % 32, step = 2 * (bit % 4) + bit / 16, at = bit % 16 / 4;
    int column = FOLDED ? h + 4 * part : h % 8, lane = column * 4 + word % 4;
    int i = ((h / 8 * QUADS + word / 4) * 8 + step) * 32 + lane;
    return FOLDED ? i * 4 + at : i * 8 + part * 4 + at;
}
