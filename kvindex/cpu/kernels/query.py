"""Prepare the queries of a step: rotate them and round them to integers (paper, A.1)."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, keep, kernel
from kvindex.cpu.kernels.lookup import put_tables
from kvindex.cpu.kernels.vectors import FOUR, four_dots
from kvindex.ops.codes import FACTOR, TINY
from kvindex.ops.transform import LONGEST

GROUP = 6
"""Bit planes of one digit of a rounded query; a digit is from -32 to 31."""


@kernel
def rotate(query: np.ndarray, rotation: np.ndarray, out: np.ndarray) -> Number:
    """Write the rotated direction of a query float32 `[D]` into `out`, and return its norm."""
    D, total = len(query), 0.0
    for i in range(D):
        total += np.float64(query[i]) * np.float64(query[i])
    norm = np.sqrt(total)
    length = max(norm, TINY)
    direction = np.empty(D, np.float32)
    for i in range(D):
        direction[i] = np.float32(query[i] / length)
    rows, at, to = np.empty(FOUR, np.int64), rotation.ctypes.data, out.ctypes.data
    for j in range(0, D, FOUR):
        for r in range(FOUR):
            rows[r] = at + (j + r) * D * 4
        four_dots(direction.ctypes.data, rows.ctypes.data, D, to + j * 4)
    keep(direction, rows)
    return np.float32(min(norm, LONGEST))


@kernel
def put_voting(rotated: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> None:
    """Compiled version of `sign_regression.voting` for one direction float32 `[D]`.

    `matrix` is float32 `[D, D]`, transposed, or empty without a regression.
    """
    D, rows = len(rotated), np.empty(FOUR, np.int64)
    if not len(matrix):
        out[:] = rotated
        return
    own, at, to = rotated.ctypes.data, matrix.ctypes.data, out.ctypes.data
    for j in range(0, D, FOUR):
        for r in range(FOUR):
            rows[r] = at + (j + r) * D * 4
        four_dots(own, rows.ctypes.data, D, to + j * 4)
    keep(rows)


@kernel
def round_query(rotated: np.ndarray, query_max: int, out: np.ndarray) -> None:
    """Compiled version of `ops.coarse.rounded` for one query float32 `[D]`, int64 `[D]`."""
    peak = 0.0
    for i in range(len(rotated)):
        peak = max(peak, abs(np.float64(rotated[i])))
    factor = query_max / peak if peak > 0 else 0.0
    for i in range(len(rotated)):
        out[i] = np.int64(np.rint(np.float64(rotated[i]) * factor))


@kernel
def put_planes(integers: np.ndarray, out: np.ndarray) -> None:
    """Split integers int64 `[D]` into bit planes uint64 `[P, W]`, 64 coordinates per word.

    An integer is written to the base 64 with digits from -32 to 31. Each digit has `GROUP` bit
    planes, in two's complement.
    """
    out[:] = 0
    for d in range(len(integers)):
        left = integers[d]
        for p in range(0, len(out), GROUP):
            digit = ((left + 32) & 63) - 32
            left = (left - digit) >> 6
            for j in range(GROUP):
                out[p + j, d >> 6] |= np.uint64(digit >> j & 1) << np.uint64(d & 63)


@kernel
def vote_unit(voting: np.ndarray, scale: float, level: float, query_max: int) -> Number:
    """Return the inner product that a vote of 1 represents (`ops.coarse.dot_offsets`)."""
    peak = 0.0
    for i in range(len(voting)):
        peak = max(peak, abs(np.float64(voting[i])))
    return peak * level * scale / (query_max * FACTOR)


@kernel
def prepare(
    queries: np.ndarray,
    rotation: np.ndarray,
    matrices: np.ndarray,
    query_max: int,
    scales: np.ndarray,
    level: float,
    rotated: np.ndarray,
    units: np.ndarray,
    planes: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
) -> None:
    """Compute all forms of the queries that later stages read.

    Args:
        queries: Float32 `[B·G, g, D]`.
        rotation: Float32 `[D, D]`.
        matrices: Sign regressions, float32 `[B·G, D, D]`, transposed, or without matrix rows.
        query_max: Largest coordinate of a rounded query.
        scales: Scales of weights, float64 `[B·G]`.
        level: Size that a sign alone represents.
        rotated: Result, queries with norms, float32 `[B·G, g, D]`.
        units: Result, inner product that a vote of 1 represents, float64 `[B·G, g]`.
        planes: Result, bit planes of the rounded queries, uint64 `[B·G, g, P, W]`, if `W` is not 0.
        tables: Result, look-up tables, uint8 `[B·G, g, W, 16, 16]`, if `W` is not 0.
        totals: Result, the constant to subtract from inner products that were computed with planes
            or tables, int32 `[B·G, g]`.
    """
    groups, g, D = queries.shape
    integers, voting = np.empty(D, np.int64), np.empty(D, np.float32)
    for group in range(groups):
        for h in range(g):
            one = rotated[group, h]
            norm = rotate(queries[group, h], rotation, one)
            put_voting(one, matrices[group], voting)
            round_query(voting, query_max, integers)
            if tables.shape[2]:
                totals[group, h] = put_tables(integers, tables[group, h])
            else:
                put_planes(integers, planes[group, h])
                totals[group, h] = integers.sum()
            for i in range(D):
                one[i] *= np.float32(norm)
                voting[i] *= np.float32(norm)
            units[group, h] = vote_unit(voting, scales[group], level, query_max)
