"""Transpose, center, normalize and rotate tiles of keys, to prepare them for encoding.

A tile `[D, L]` contains `L` keys. The values of one coordinate for all keys are adjacent in memory,
so that inner loops run over keys and LLVM vectorizes them. The result for a key depends on other
keys only through the center (mean key), which is subtracted.

Source: ParisKV, section A.1.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel
from kvindex.cpu.kernels.numbers import read
from kvindex.ops.codes import TINY
from kvindex.ops.transform import LONGEST

TILE = 64
"""Largest number of keys in a tile, a multiple of 8.

Loops run to a variable length `L` instead of this constant, because LLVM would unroll a loop of
constant length instead of vectorizing it.
"""


@kernel
def put_tile(
    keys: int,
    step: int,
    kind: int,
    count: int,
    limit: float,
    center: np.ndarray,
    row: np.ndarray,
    tile: np.ndarray,
) -> bool:
    """Subtract the center of a block from its keys, and transpose the keys into a tile.

    Args:
        keys: Address of the first key.
        step: Distance in bytes from one key to the next.
        kind: Dtype of the keys (`numbers.KINDS`).
        count: Number of keys, at most `L`.
        limit: Largest allowed absolute value of a key's coordinate.
        center: Float32 `[D]`.
        row: Buffer, float32 `[D]`.
        tile: Result, float32 `[D, L]`; zero for keys from `count` on.

    Returns:
        True if all coordinates of the keys are within the limit (NaN is not).
    """
    (D, L), most, wrong = tile.shape, np.float32(limit), 0
    for i in range(count):
        read(keys + i * step, D, kind, row)
        for d in range(D):
            wrong += not abs(row[d]) <= most
        for d in range(D):
            tile[d, i] = row[d] - center[d]
    for d in range(D):
        for i in range(count, L):
            tile[d, i] = 0
    return wrong == 0


@kernel
def put_squares(tile: np.ndarray, sums: np.ndarray) -> None:
    """Compute the squared norms of the keys of a tile, from float32 `[D, L]` to float64 `[L]`."""
    D, L = tile.shape
    for i in range(L):
        sums[i] = 0
    for d in range(D):
        for i in range(L):
            sums[i] += np.float64(tile[d, i]) * np.float64(tile[d, i])


@kernel
def normalize(tile: np.ndarray, sums: np.ndarray, norms: np.ndarray) -> None:
    """Divide the keys of a tile by their norms, in place.

    This is the compiled version of `ops.transform.normalize`. It computes in float64, with an
    accuracy of 2^-52, and then rounds the result to float32.

    Args:
        tile: Keys on entry, unit vectors on return, float32 `[D, L]`.
        sums: Buffer, float64 `[L]`.
        norms: Result, norms of the keys, float32 `[L]`.
    """
    D, L = tile.shape
    put_squares(tile, sums)
    for i in range(L):
        norm = np.sqrt(sums[i])
        norms[i] = np.float32(min(norm, LONGEST))
        sums[i] = 1 / max(norm, TINY)
    for d in range(D):
        for i in range(L):
            tile[d, i] = np.float32(np.float64(tile[d, i]) * sums[i])


@kernel
def rotate(tile: np.ndarray, flips: np.ndarray, hartley: np.ndarray, out: np.ndarray) -> None:
    """Rotate the keys of a tile.

    This is a fast version of `ops.transform.rotate`. Its results can differ from those of
    `ops.transform.rotate` by rounding errors.

    The rotation matrix is `(Q ⊗ H) diag(s) / √D`, where `s` are signs, `H` is a Hadamard matrix of
    size `2^a`, `Q` is a Hartley matrix of size `p`, and `D = p · 2^a`. A coordinate of a rotated
    unit vector has an error of at most `√2 (a + p + 2) 2^-24`. This bound counts the roundings of a
    coordinate: `a` sums of two numbers, one product with a rounded entry of `Q / √D`, and `p - 1`
    further sums.

    Args:
        tile: Unit vectors, float32 `[D, L]`, overwritten.
        flips: Signs `s`, float32 `[D]`.
        hartley: `Q / √D`, float32 `[p, p]`.
        out: Result, float32 `[D, L]`.
    """
    D, L = tile.shape
    order, numbers, results = len(hartley), tile.reshape(-1), out.reshape(-1)
    for d in range(D):
        for i in range(L):
            tile[d, i] *= flips[d]
    part, half = D // order * L, L
    while half < part:
        for start in range(0, D * L, 2 * half):
            first, second = numbers[start : start + half], numbers[start + half : start + 2 * half]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a + b
                second[i] = a - b
        half *= 2
    for r in range(order):
        own = results[r * part : r * part + part]
        for i in range(part):
            own[i] = hartley[r, 0] * numbers[i]
        for j in range(1, order):
            other = numbers[j * part : j * part + part]
            for i in range(part):
                own[i] += hartley[r, j] * other[i]
