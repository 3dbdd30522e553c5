"""Attention of a group's queries over selected rows and resident rows, read in place."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, prefetch, uint8_at
from kvindex.cpu.kernels.numbers import FLOAT32, exp, largest, read
from kvindex.cpu.kernels.rerank import NEVER, cap
from kvindex.cpu.kernels.vectors import FOUR, add_four, four_dots

AHEAD = 2 * FOUR
"""How many rows ahead of the current one are prefetched."""

LINE = 64
"""Bytes of a cache line."""


@kernel
def put_places(
    rows: np.ndarray, offset: int, count: int, kind: int, room: np.ndarray, out: np.ndarray
) -> None:
    """Write the address of each row's numbers, as float32, into `out[R]`.

    A row that is missing gets the address of zeros, and so does the rest of `out`.

    Args:
        rows: Addresses of rows, int64 `[R]`; 0 for a missing row.
        offset: Bytes from a row's address to the numbers.
        count: Numbers per row.
        kind: Dtype of the numbers (`numbers.KINDS`).
        room: Buffer for numbers that are converted to float32, float32 `[R + 1, count]`, with zeros
            in its last row. If the rows are float32, `[1, count]` suffices, for the zeros.
        out: Result, int64.
    """
    first = room.ctypes.data
    out[:] = first + (len(room) - 1) * count * 4
    for r in range(len(rows)):
        if rows[r]:
            out[r] = rows[r] + offset if kind == FLOAT32 else first + r * count * 4
            if kind != FLOAT32:
                read(rows[r] + offset, count, kind, room[r])


@kernel
def ask_for(rows: np.ndarray, first: int, row_bytes: int) -> None:
    """Prefetch four rows, starting with row `first`."""
    for r in range(first, min(first + FOUR, len(rows))):
        for at in range(0, row_bytes, LINE):
            prefetch(rows[r] + at)


@kernel
def put_dots(
    queries: int, g: int, D: int, places: np.ndarray, row_bytes: int, out: np.ndarray
) -> None:
    """Compute inner products of queries with rows.

    Args:
        queries: Address of float32 `[g, D]`.
        g: Number of queries.
        D: Dimension.
        places: Addresses of the rows' numbers (`put_places`), int64 `[R]`, `R` a multiple of 4.
        row_bytes: Bytes of a row.
        out: Float32 `[g, R]`.
    """
    dots, keys, width = out.ctypes.data, places.ctypes.data, out.shape[1]
    ask_for(places, 0, row_bytes)
    ask_for(places, FOUR, row_bytes)
    for r in range(0, len(places), FOUR):
        ask_for(places, r + AHEAD, row_bytes)
        for h in range(g):
            four_dots(queries + h * D * 4, keys + r * 8, D, dots + (h * width + r) * 4)


@kernel
def add_rows(weights: np.ndarray, places: np.ndarray, g: int, Dv: int, out: int) -> None:
    """Add rows times attention weights float32 `[g, R]` to `[g, Dv]` at the address `out`."""
    some, values, width = weights.ctypes.data, places.ctypes.data, weights.shape[1]
    for r in range(0, len(places), FOUR):
        for h in range(g):
            add_four(some + (h * width + r) * 4, values + r * 8, Dv, out + h * Dv * 4)


@kernel
def put_softmax(
    rows: np.ndarray, weights: np.ndarray, scale: float, softcap: float, out: np.ndarray
) -> Number:
    """Replace a head's inner products by attention weights, and return their log-sum-exp.

    Args:
        rows: Addresses of rows, int64 `[R]`; 0 for a missing row.
        weights: Log weights, float32 `[R']`, added to the first `R'` logits.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        out: Inner products, then attention weights, float32, at least `R` long. Numbers after the
            first `R` become zero.
    """
    some, total = out[: len(rows)], np.float64(0)
    cap(some, scale, softcap)
    for r in range(len(weights)):
        some[r] += weights[r]
    for r in range(len(rows)):
        some[r] = some[r] if rows[r] else NEVER
    peak = largest(some) if len(rows) else NEVER
    base = np.float32(0) if peak == NEVER else peak
    for r in range(len(rows)):
        some[r] = exp(some[r] - base)
        total += np.float64(some[r])
    share = np.float32(0) if total == 0 else np.float32(1 / total)
    for r in range(len(rows)):
        some[r] *= share
    out[len(rows) :] = 0
    return peak if total == 0 else np.float32(peak + math.log(total))


@kernel
def attend(
    queries: np.ndarray,
    rows: np.ndarray,
    row_bytes: int,
    weights: np.ndarray,
    kind: int,
    value_bytes: int,
    scale: float,
    softcap: float,
    places: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    logits: np.ndarray,
    output: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Compiled version of `ops.attention.attend` for one group.

    Args:
        queries: Float32 `[g, D]`.
        rows: Addresses of keys, int64 `[R]`; 0 for a missing row.
        row_bytes: Bytes of a row.
        weights: Log weights, float32 `[g, R']`, added to the first `R'` logits.
        kind: Dtype of the rows (`numbers.KINDS`).
        value_bytes: Bytes from a key's address to its value.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        places: Buffer, int64 `[R]`, where `R` is rounded up to a multiple of 4.
        keys: Buffer as for `put_places`.
        values: Buffer as for `put_places`.
        logits: Buffer, float32 `[g, R]`.
        output: Result, float32 `[g, Dv]`.
        lse: Result, float32 `[g]`.
    """
    (g, D), Dv = queries.shape, output.shape[1]
    put_places(rows, 0, D, kind, keys, places)
    put_dots(queries.ctypes.data, g, D, places, row_bytes, logits)
    for h in range(g):
        lse[h] = put_softmax(rows, weights[h], scale, softcap, logits[h])
    put_places(rows, value_bytes, Dv, kind, values, places)
    output[:] = 0
    add_rows(logits, places, g, Dv, output.ctypes.data)


@kernel
def put_resident(resident: int, row_bytes: int, mask: int, count: int, out: np.ndarray) -> None:
    """Write the addresses of a group's resident rows, int64 `[count]`; 0 where the mask is 0."""
    shown = uint8_at(mask, count)
    for r in range(count):
        out[r] = resident + r * row_bytes if shown[r] else 0
