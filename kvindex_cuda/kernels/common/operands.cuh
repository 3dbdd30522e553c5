// Operands of the matrix unit: how codes and queries lie in its fragments.
//
// Queries are two float16, a number and what it leaves, 22 bits together. Up to four heads the lower
// halves are the matrix's other four columns, and one product serves both (FOLDED).
// Compile-time: D, GROUP.
#pragma once
#include "common/common.cuh"

constexpr int STRIDE = (D / 8 + 3) / 4 * 4;  // bytes of a key's signs, and of a plane of its magnitudes
constexpr int WORDS = STRIDE / 4;
constexpr int QUADS = (WORDS + 3) / 4;       // groups of 4 words: one lane of a quad each
constexpr bool FOLDED = GROUP <= 4;
constexpr int COLUMNS = (GROUP + 7) / 8;     // sets of 8 heads
constexpr int OPERANDS = COLUMNS * QUADS * 256 * (FOLDED ? 1 : 2);  // of a group, 8 bytes each

// Where float16 `part` (0 the number, 1 what it leaves) of coordinate j of head h goes among a group's
// operands: at step 2 b + half a lane has bits b + 16 half + 0, 4, 8, 12 of its word.
__device__ __forceinline__ int operand_of(int h, int j, int part) {
    int word = j / 32, bit = j % 32, step = 2 * (bit % 4) + bit / 16, at = bit % 16 / 4;
    int column = FOLDED ? h + 4 * part : h % 8, lane = column * 4 + word % 4;
    int i = ((h / 8 * QUADS + word / 4) * 8 + step) * 32 + lane;
    return FOLDED ? i * 4 + at : i * 8 + part * 4 + at;
}
