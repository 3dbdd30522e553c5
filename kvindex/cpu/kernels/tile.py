"""Transpose, center, normalize and rotate tiles of keys.

In a tile `[D, L]`, each coordinate of all `L` keys is contiguous, so every inner loop runs over
keys. Apart from the center, the result for a key does not depend on other keys.

Source: ParisKV, section A.1.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel
from kvindex.cpu.kernels.numbers import read
from kvindex.ops.codes import TINY
from kvindex.ops.transform import LONGEST

TILE = 64
"""Largest number of keys in a tile, `L`, a multiple of 8.

Loops run to `L` instead of a constant, because LLVM would unroll a loop of constant length instead
of vectorizing it.
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
    """Subtract the center float32 `[D]` from up to `L` keys; transpose them to float32 `[D, L]`.

    If there are fewer than `L` keys, the rest of the tile is zero. Returns True if no coordinate is
    NaN or larger than the limit. Other arguments are as for `encode.put_center`.
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
    """Compute the squared norms of a tile float32 `[D, L]`, float64 `[L]`."""
    D, L = tile.shape
    for i in range(L):
        sums[i] = 0
    for d in range(D):
        for i in range(L):
            sums[i] += np.float64(tile[d, i]) * np.float64(tile[d, i])


@kernel
def normalize(tile: np.ndarray, sums: np.ndarray, norms: np.ndarray) -> None:
    """Compiled version of `ops.transform.normalize` for a tile float32 `[D, L]`, in place.

    The result is exact to 2^-52 before it is rounded. `norms` is float32 `[L]`; `sums` float64
    `[L]` is a buffer.
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
    """Compiled version of `ops.transform.rotate` for a tile float32 `[D, L]`, with other rounding.

    The matrix is `(Q ⊗ H) diag(s)`; `flips` is `s`, float32 `[D]`, and `hartley` is `Q / √D`,
    float32 `[p, p]`. The tile is overwritten.

    For a unit vector, a coordinate differs from the exact one by at most `√2 (a + p + 2) 2^-24`,
    where `D = p · 2^a`. The operations that round are `a` sums of two numbers, one product with a
    rounded matrix entry, and `p - 1` further sums.
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
