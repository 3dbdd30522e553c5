"""Encode keys in blocks: compute the center (mean key) of each block, then the codes of its keys.

The keys of a block are encoded in tiles of up to 64 keys.

Source: ParisKV, sections A.1 to A.3.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, uint8_at
from kvindex.cpu.kernels.numbers import SIXTEEN, read
from kvindex.cpu.kernels.tile import TILE, normalize, put_squares, put_tile, rotate
from kvindex.ops.codes import OCTAVES
from kvindex.ops.transform import LONGEST

AT_ONCE = 4
"""Number of level boundaries that a coordinate is compared with in one pass.

The number of all boundaries is padded to a multiple of it.
"""

SIGN_PLANE = np.uint64(7)
"""Bit of a coordinate's byte that contains the sign; the lower bits are the level's index."""

SIGN_BIT = np.uint32(7)
ONES = np.uint64(0x0101010101010101)
STEPS = 2**16 / OCTAVES
"""Number of logarithmic codes from a weight to twice this weight."""

TINIEST = np.float32(np.finfo(np.float32).tiny)
NAN = np.uint16(0x7FC0)
HALF = np.uint32(0x7FFF)
LAST_BIT = np.uint32(1)


@kernel
def bfloat16_of(number: float) -> Number:
    """Round a float32 to bfloat16 (half to even), and return the bits as a uint16."""
    if number != number:
        return NAN
    bits = np.float32(number).view(np.uint32)
    return np.uint16((bits + HALF + (bits >> SIXTEEN & LAST_BIT)) >> SIXTEEN)


@kernel
def put_center(
    keys: int,
    step: int,
    kind: int,
    count: int,
    valid: int,
    row: np.ndarray,
    sums: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute the center (mean key) of a block.

    This is the compiled version of `ops.codes.centers`.

    Args:
        keys: Address of the first key.
        step: Distance in bytes from one key to the next.
        kind: Dtype of the keys (`numbers.KINDS`).
        count: Number of keys.
        valid: Address of the mask of valid keys, bool `[count]`; 0 if all keys are valid.
        row: Buffer, float32 `[D]`.
        sums: Buffer, float64 `[D]`.
        out: Result, the bits of bfloat16 numbers, uint16 `[D]`.
    """
    D, real = len(out), np.int64(0)
    for d in range(D):
        sums[d] = 0
    for i in range(count):
        read(keys + i * step, D, kind, row)
        for d in range(D):
            sums[d] += np.float64(row[d])
        real += np.int64(uint8_at(valid + i, 1)[0] if valid else 1)
    for d in range(D):
        mean = sums[d] / max(real, 1)
        out[d] = bfloat16_of(np.float32(min(max(mean, -LONGEST), LONGEST)))


@kernel
def put_nearest(
    sizes: np.ndarray,
    edges: np.ndarray,
    levels: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
) -> None:
    """Find the level (quantized absolute value) nearest to each coordinate's absolute value.

    If two levels are equally near, the lower level is taken.

    Args:
        sizes: Absolute values of coordinates, float32 `[L]`.
        edges: Boundaries between levels, float32 `[E]`, padded with infinity to a multiple of
            `AT_ONCE`.
        levels: Levels, ascending, float32 `[E + 1]`.
        indices: Result, index of the nearest level, uint32 `[L]`.
        values: Result, the nearest level, float32 `[L]`.
    """
    L = len(sizes)
    for i in range(L):
        indices[i] = 0
        values[i] = levels[0]
    for e in range(0, len(edges), AT_ONCE):
        a, b, c, d = edges[e], edges[e + 1], edges[e + 2], edges[e + 3]
        after_a, after_b, after_c, after_d = (
            levels[e + 1],
            levels[e + 2],
            levels[e + 3],
            levels[e + 4],
        )
        for i in range(L):
            size, index, value = sizes[i], indices[i], values[i]
            index = np.uint32(e + 1) if size > a else index
            value = after_a if size > a else value
            index = np.uint32(e + 2) if size > b else index
            value = after_b if size > b else value
            index = np.uint32(e + 3) if size > c else index
            value = after_c if size > c else value
            index = np.uint32(e + 4) if size > d else index
            value = after_d if size > d else value
            indices[i] = index
            values[i] = value


@kernel
def log_code(weight: float) -> Number:
    """Convert a weight to its 16-bit logarithmic code.

    This is the compiled version of `ops.codes.log_codes`.
    """
    if not weight > 0:
        return np.int32(0)
    code = np.rint(math.log2(np.float64(weight)) * STEPS + 2**15)
    return np.int32(min(max(code, 1.0), 2.0**16 - 1))


@kernel
def code(
    tile: np.ndarray,
    norms: np.ndarray,
    edges: np.ndarray,
    levels: np.ndarray,
    sums: np.ndarray,
    codes: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Quantize a tile of rotated keys to sign bits, level indices, and one weight per key.

    This is the compiled version of `ops.codes.encode`.

    Args:
        tile: Rotated directions, float32 `[D, L]`.
        norms: Norms of the keys, float32 `[L]`.
        edges: Boundaries between levels, padded with infinity, float32 `[E]`.
        levels: Quantized absolute values of a coordinate, float32 `[E + 1]`.
        sums: Buffer, float64 `[L]`.
        codes: Result, uint8 `[D, L]`: the index of a coordinate's level in the lower bits, and the
            sign in the highest bit.
        weights: Result, logarithmic weights, int32 `[L]`.
    """
    D, L = tile.shape
    radii, sizes = np.empty(L, np.float32), np.empty(L, np.float32)
    indices, values = np.empty(L, np.uint32), np.empty(L, np.float32)
    put_squares(tile, sums)
    for i in range(L):
        radii[i] = np.float32(np.sqrt(sums[i]))
        sums[i] = 0
    for d in range(D):
        for i in range(L):
            sizes[i] = abs(np.float32(tile[d, i] / max(radii[i], TINIEST)))
        put_nearest(sizes, edges, levels, indices, values)
        for i in range(L):
            sums[i] += np.float64(values[i]) * np.float64(sizes[i])
        for i in range(L):
            codes[d, i] = np.uint8(indices[i] | np.uint32(tile[d, i] >= 0) << SIGN_BIT)
    for i in range(L):
        weight = np.float32(np.float32(norms[i] * radii[i]) / np.float32(sums[i]))
        weights[i] = log_code(weight) if radii[i] > 0 else np.int32(0)


@kernel
def put_plane(
    words: np.ndarray, plane: np.uint64, count: int, packed: np.ndarray, out: np.ndarray
) -> None:
    """Extract one bit of each coordinate's code, and pack the bits of 8 coordinates into a byte.

    Args:
        words: Codes of a tile; each word has the bytes of 8 keys, uint64 `[D, L / 8]`.
        plane: Position of the bit in the bytes.
        count: Number of keys.
        packed: Buffer, uint64 `[L / 8]`.
        out: Result, uint8 `[count, M]`.
    """
    bytes_of = packed.view(np.uint8)
    for b in range(len(words) // 8):
        for w in range(len(packed)):
            word = np.uint64(0)
            for j in range(8):
                word |= (words[b * 8 + j, w] >> plane & ONES) << np.uint64(j)
            packed[w] = word
        for i in range(count):
            out[i, b] = bytes_of[i]


@kernel
def put_logs(
    logs: np.ndarray, valid: int, count: int, weights: np.ndarray, fractions: np.ndarray
) -> None:
    """Split 16-bit logarithmic weights, int32 `[L]`, into upper and lower bytes.

    Upper bytes are written to `weights` and lower bytes to `fractions`, uint8 `[count]` each. Both
    bytes of an invalid key are 0.
    """
    for i in range(count):
        real = not valid or uint8_at(valid + i, 1)[0]
        log = logs[i] if real else np.int32(0)
        weights[i] = np.uint8(log >> np.int32(8))
        fractions[i] = np.uint8(log & np.int32(255))


@kernel
def encode(
    part: int,
    parts: int,
    keys: np.ndarray,
    step: int,
    kind: int,
    valid: np.ndarray,
    limit: float,
    block: int,
    flips: np.ndarray,
    hartley: np.ndarray,
    edges: np.ndarray,
    levels: np.ndarray,
    signs: np.ndarray,
    magnitudes: np.ndarray,
    weights: np.ndarray,
    fractions: np.ndarray,
    centers: np.ndarray,
    wrong: np.ndarray,
) -> None:
    """Encode keys: compute the centers of blocks, sign bits, magnitudes and weights.

    A group is one KV head of one sequence. Each thread encodes some of the blocks of all groups.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        keys: Addresses of each group's keys, int64 `[B·G]`.
        step: Distance in bytes from one key to the next.
        kind: Dtype of the keys (`numbers.KINDS`).
        valid: Addresses of the masks of valid keys, int64 `[B·G]`; 0 if all keys are valid.
        limit: Largest allowed absolute value of a key's coordinate.
        block: Number of tokens in a block.
        flips: Signs of the rotation, float32 `[D]` (`tile.rotate`).
        hartley: Matrix of the rotation, float32 `[p, p]` (`tile.rotate`).
        edges: Boundaries between levels, padded with infinity, float32 `[E]`.
        levels: Quantized absolute values of a coordinate, float32 `[E + 1]`.
        signs: Result, sign bits, uint8 `[B·G, N, 1, M]`.
        magnitudes: Result, bit planes of the levels' indices, uint8 `[B·G, N, bits, M]`.
        weights: Result, upper bytes of logarithmic weights, uint8 `[B·G, N, 1]`.
        fractions: Result, lower bytes of logarithmic weights, uint8 `[B·G, N, 1]`.
        centers: Result, bits of bfloat16, uint16 `[B·G, S, D]`. If `S` is 0, keys are not centered.
        wrong: Result, int32 `[1]`, set to 1 if a coordinate is NaN or larger than `limit`.
    """
    groups, N, bits, M = magnitudes.shape
    D, blocks, L = M * 8, -(-N // block), min(TILE, -(-block // 8) * 8)
    row, center = np.empty(D, np.float32), np.zeros(D, np.float32)
    tile, rotated = np.empty((D, L), np.float32), np.empty((D, L), np.float32)
    sums, norms, logs = np.empty(max(D, L)), np.empty(L, np.float32), np.empty(L, np.int32)
    words, packed = np.empty((D, L // 8), np.uint64), np.empty(L // 8, np.uint64)
    codes = words.view(np.uint8)
    total = groups * blocks
    for unit in range(total * part // parts, total * (part + 1) // parts):
        group, s = unit // blocks, unit % blocks
        first, last = s * block, min(s * block + block, N)
        flags = valid[group]
        if centers.shape[1]:
            at = keys[group] + first * step
            some = flags + first if flags else 0
            put_center(at, step, kind, last - first, some, row, sums, centers[group, s])
            for d in range(D):
                center[d] = np.uint32(np.uint32(centers[group, s, d]) << SIXTEEN).view(np.float32)
        for start in range(first, last, L):
            count = min(L, last - start)
            at = keys[group] + start * step
            if not put_tile(at, step, kind, count, limit, center, row, tile):
                wrong[0] = 1
            normalize(tile, sums, norms)
            rotate(tile, flips, hartley, rotated)
            code(rotated, norms, edges, levels, sums, codes, logs)
            put_plane(words, SIGN_PLANE, count, packed, signs[group, start:, 0])
            for p in range(bits):
                put_plane(words, np.uint64(p), count, packed, magnitudes[group, start:, p])
            some = flags + start if flags else 0
            put_logs(logs, some, count, weights[group, start:, 0], fractions[group, start:, 0])
