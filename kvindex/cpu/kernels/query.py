"""Prepare a step's queries: rotate, round to integers, tabulate votes (paper, A.1 and B.2.1)."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.ops.codes import FACTOR, TINY
from kvindex.ops.transform import LONGEST

LANES = 4
"""Heads whose votes share a word of 64 bits, 16 bits each."""

BIAS = 2**15
"""Added to a lane, so that it is not negative: votes before weights are in ±(2^15 - 1)."""

BIASES = np.uint64(0x8000_8000_8000_8000)


@kernel
def rotate(query: np.ndarray, rotation: np.ndarray, out: np.ndarray) -> Number:
    """The direction of a query float32 `[D]`, rotated, into `out`; gives its norm."""
    D, total = len(query), 0.0
    for i in range(D):
        total += np.float64(query[i]) * np.float64(query[i])
    norm = np.sqrt(total)
    length = max(norm, TINY)
    direction = np.empty(D, np.float32)
    for i in range(D):
        direction[i] = np.float32(query[i] / length)
    for j in range(D):
        dot = np.float32(0)
        for i in range(D):
            dot += rotation[j, i] * direction[i]
        out[j] = dot
    return np.float32(min(norm, LONGEST))


@kernel
def round_query(rotated: np.ndarray, query_max: int, out: np.ndarray) -> None:
    """As `ops.coarse.rounded`, of one query float32 `[D]`; out: int64 `[D]`."""
    peak = 0.0
    for i in range(len(rotated)):
        peak = max(peak, abs(np.float64(rotated[i])))
    factor = query_max / peak if peak > 0 else 0.0
    for i in range(len(rotated)):
        out[i] = np.int64(np.rint(np.float64(rotated[i]) * factor))


@kernel
def tabulate(integers: np.ndarray, out: np.ndarray) -> None:
    """As `ops.coarse.dot_table`, of heads int64 `[g, D]`, four to a word.

    out: uint64 `[W, M · 256]`, lanes of 16 bits that wrap; the first subspace has the biases.
    """
    g, D = integers.shape
    for w in range(len(out)):
        for b in range(D // 8):
            table = out[w, b * 256 : b * 256 + 256]
            table[0] = BIASES if b == 0 else np.uint64(0)
            for p in range(8):
                packed = np.int64(0)
                for lane in range(min(LANES, g - w * LANES)):
                    packed += integers[w * LANES + lane, b * 8 + p] << np.int64(16 * lane)
                for c in range(1 << p):
                    table[c + (1 << p)] = table[c] + np.uint64(packed)
                    table[c] -= np.uint64(packed)


@kernel
def vote_unit(rotated: np.ndarray, scale: float, level: float, query_max: int) -> Number:
    """What a vote stands for, of a query rotated with its norm (`ops.coarse.dot_offsets`)."""
    peak = 0.0
    for i in range(len(rotated)):
        peak = max(peak, abs(np.float64(rotated[i])))
    return peak * level * scale / (query_max * FACTOR)


@kernel
def prepare(
    queries: np.ndarray,
    rotation: np.ndarray,
    query_max: int,
    scales: np.ndarray,
    level: float,
    rotated: np.ndarray,
    units: np.ndarray,
    tables: np.ndarray,
) -> None:
    """All that stages read of the queries float32 `[B·G, g, D]`.

    scales: of weights, float64 `[B·G]`. Writes rotated float32 `[B·G, g, D]`, with norms; units
    float64 `[B·G, g]`; tables uint64 `[B·G, W, M · 256]`.
    """
    groups, g, D = queries.shape
    integers = np.empty((g, D), np.int64)
    for group in range(groups):
        for h in range(g):
            one = rotated[group, h]
            norm = rotate(queries[group, h], rotation, one)
            round_query(one, query_max, integers[h])
            for i in range(D):
                one[i] *= np.float32(norm)
            units[group, h] = vote_unit(one, scales[group], level, query_max)
        tabulate(integers, tables[group])
