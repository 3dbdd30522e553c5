"""Tiles of keys: transposed without their center, normalized, rotated (paper, A.1).

A coordinate of all keys lies side by side, so that every loop is over keys, and but for the center
what becomes of a key depends on no other one.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel
from kvindex.cpu.kernels.numbers import read
from kvindex.ops.codes import TINY
from kvindex.ops.transform import LONGEST

TILE = 64
"""Keys of a tile at most, `L`, a multiple of 8.

Loops run to `L`: in place of vectorizing one of constant length LLVM would unroll it."""


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
    """Up to `L` keys less their center float32 `[D]`, transposed: float32 `[D, L]`.

    Zeros for keys that are not there. Gives whether no number is NaN or above the limit in size.
    Arguments as of `put_center`.
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
    """Squares of norms, of a tile float32 `[D, L]`: float64 `[L]`."""
    D, L = tile.shape
    for i in range(L):
        sums[i] = 0
    for d in range(D):
        for i in range(L):
            sums[i] += np.float64(tile[d, i]) * np.float64(tile[d, i])


@kernel
def normalize(tile: np.ndarray, sums: np.ndarray, norms: np.ndarray) -> None:
    """As `ops.transform.normalize`, of a tile float32 `[D, L]`, in its place.

    Within 2^-52 before it is rounded. norms: float32 `[L]`; sums: float64 `[L]`, room.
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
    """As `ops.transform.rotate` but for rounding: a tile float32 `[D, L]`, overwritten, to `out`.

    The matrix is `(Q ⊗ H) diag(s)`: flips: `s`, float32 `[D]`; hartley: `Q / √D`, float32 `[p, p]`.
    Of a unit vector a coordinate is within `√2 (a + p + 2) 2^-24` of the exact one, `D = p · 2^a`:
    rounded are `a` sums of two, a product with a rounded number, and `p - 1` sums.
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
