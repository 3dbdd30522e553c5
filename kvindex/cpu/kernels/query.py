"""Prepare the queries of a search: rotate them and round them to integers.

Source: ParisKV, section A.1.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, keep, kernel
from kvindex.cpu.kernels.lookup import put_tables
from kvindex.cpu.kernels.vectors import FOUR, four_dots
from kvindex.ops.codes import FACTOR, TINY
from kvindex.ops.transform import LONGEST

GROUP = 6
"""Number of bit planes of one digit of a rounded query; a digit is from -32 to 31."""


@kernel
def rotate(query: np.ndarray, rotation: np.ndarray, out: np.ndarray) -> Number:
    """Normalize and rotate a query, float32 `[D]`. Return its norm.

    rotation: rotation matrix, float32 `[D, D]`. The rotated unit vector is written to `out`,
    float32 `[D]`.
    """
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
    """Multiply a rotated query by the matrix that predicts keys from their sign bits.

    The inner product of the result with the signs of a key is then a better estimate of the inner
    product of query and key. This is the compiled version of `pariskv.sign_regression.voting`.

    Args:
        rotated: Rotated unit vector, float32 `[D]`.
        matrix: Matrix of the regression, transposed, float32 `[D, D]`; empty without a regression.
        out: Result, float32 `[D]`.
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
    """Scale a query, float32 `[D]`, and round its coordinates to integers, int64 `[D]`.

    The coordinate with the largest magnitude becomes `query_max` or `-query_max`. This is the
    compiled version of `ops.coarse.rounded`.
    """
    peak = 0.0
    for i in range(len(rotated)):
        peak = max(peak, abs(np.float64(rotated[i])))
    factor = query_max / peak if peak > 0 else 0.0
    for i in range(len(rotated)):
        out[i] = np.int64(np.rint(np.float64(rotated[i]) * factor))


@kernel
def put_planes(integers: np.ndarray, out: np.ndarray) -> None:
    """Split a rounded query, int64 `[D]`, into `P` bit planes, uint64 `[P, W]`.

    A bit plane contains one bit of each coordinate, packed into `W` words of 64 coordinates. The
    coordinates are integers, which are written in base 64 with digits from -32 to 31. Each digit is
    stored in two's complement as `GROUP` bits, and there is one bit plane for each of these bits.
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
    """Return the unit of votes: the inner product of query and key that a vote of 1 represents.

    A vote is the integer that estimates this inner product in the first stage of a search
    (`ops.coarse.dot_offsets`).
    """
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
    """Rotate and round the queries, and compute the tables for the coarse scores (votes) of keys.

    The votes will be computed either with `tables` or with `planes`. The caller passes an empty
    array for the one that is not used: its axis `W` (64-bit words per query) has length 0.

    Args:
        queries: Float32 `[B·G, g, D]`.
        rotation: Rotation matrix, float32 `[D, D]`.
        matrices: Transposed matrices of the sign regression, float32 `[B·G, D, D]`, or `[B·G, 0,
            0]` without a regression.
        query_max: Largest coordinate of a rounded query.
        scales: For each group the smallest power of two above the weights of all keys, float64
            `[B·G]`.
        level: Absolute value of a coordinate of which only the sign is known.
        rotated: Result, rotated queries, not normalized, float32 `[B·G, g, D]`.
        units: Result, inner product that a vote of 1 represents, float64 `[B·G, g]`.
        planes: Result, bit planes of the rounded queries, uint64 `[B·G, g, P, W]` (`put_planes`).
        tables: Result, look-up tables, uint8 `[B·G, g, W, 16, 16]` (`lookup.put_tables`).
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
