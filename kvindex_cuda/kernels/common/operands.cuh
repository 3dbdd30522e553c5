// Layout of codes and queries as operands of the tensor cores.
//
// Each query coordinate is stored as two float16 numbers, its rounded value and the remainder, with 22 bits
// of precision together. With up to four heads (FOLDED), the remainders are the other four columns of the
// right matrix, so that one product serves both.
// Compile-time constants: D, GROUP (query heads of a group).
#pragma once
#include "common/common.cuh"

constexpr int STRIDE = (D / 8 + 3) / 4 * 4;  // bytes of a key's signs, and of one plane of its magnitudes
constexpr int WORDS = STRIDE / 4;
constexpr int QUADS = (WORDS + 3) / 4;       // sets of 4 words; each of four lanes takes one word of a set
constexpr bool FOLDED = GROUP <= 4;
constexpr int COLUMNS = (GROUP + 7) / 8;     // sets of 8 heads
constexpr int OPERANDS = COLUMNS * QUADS * 256 * (FOLDED ? 1 : 2);  // operands of a group, 8 bytes each

// Return the index of a float16 number among a group's operands. h: head. j: coordinate. part: 0 for the
// rounded value, 1 for the remainder. The matrix product takes a word of 32 coordinates in 8 steps; step 2 b
// + half multiplies coordinates b + 16 half + {0, 4, 8, 12} of the word.
__device__ __forceinline__ int operand_of(int h, int j, int part) {
    int word = j / 32, bit = j % 32, step = 2 * (bit % 4) + bit / 16, at = bit % 16 / 4;
    int column = FOLDED ? h + 4 * part : h % 8, lane = column * 4 + word % 4;
    int i = ((h / 8 * QUADS + word / 4) * 8 + step) * 32 + lane;
    return FOLDED ? i * 4 + at : i * 8 + part * 4 + at;
}
