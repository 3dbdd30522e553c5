"""Compute attention for the queries of one KV head.

The queries attend to the rows that a search has selected, and to resident rows, which are the rows
of sink and window. The rows are read at the addresses where they are stored. They are not copied
into one array first.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, prefetch, uint8_at
from kvindex.cpu.kernels.numbers import FLOAT32, exp, largest, read
from kvindex.cpu.kernels.rerank import NEVER, cap
from kvindex.cpu.kernels.vectors import FOUR, add_four, four_dots

AHEAD = 2 * FOUR
"""Prefetch distance, in rows."""

LINE = 64
"""Bytes of a cache line."""


@kernel
def put_places(
    rows: np.ndarray, offset: int, count: int, kind: int, room: np.ndarray, out: np.ndarray
) -> None:
    """Write the address of each row's key, or of each row's value, into `out`.

    The code that reads from these addresses expects float32 numbers. If the rows have another
    dtype, the keys or values are first converted into `room`, and the addresses are those of the
    converted numbers. A missing row gets the address of zeros.

    Args:
        rows: Addresses of rows, int64 `[R]`; 0 for a missing row.
        offset: Distance in bytes from a row's address to the key or value.
        count: Dimension of the key or value.
        kind: Dtype of the rows (`numbers.KINDS`).
        room: Buffer for converted numbers, float32 `[R + 1, count]`, whose last row is zero. If the
            rows are float32, only this zero row is needed: `[1, count]`.
        out: Result, int64, at least `R` long. The elements after the first `R` are set to the
            address of zeros.
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
    """Prefetch four rows, whose addresses are `rows[first]` to `rows[first + 3]`."""
    for r in range(first, min(first + FOUR, len(rows))):
        for at in range(0, row_bytes, LINE):
            prefetch(rows[r] + at)


@kernel
def put_dots(
    queries: int, g: int, D: int, places: np.ndarray, row_bytes: int, out: np.ndarray
) -> None:
    """Compute the inner products of all queries with all keys, and prefetch the keys meanwhile.

    Args:
        queries: Address of the queries, float32 `[g, D]`.
        g: Number of queries.
        D: Dimension of a query.
        places: Addresses of the keys (`put_places`), int64 `[R]`, where `R` is a multiple of 4.
        row_bytes: Bytes of a row.
        out: Result, float32 `[g, R]`.
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
    """Add the values, multiplied by attention weights, to the output of each query head.

    Args:
        weights: Attention weights, float32 `[g, R]`.
        places: Addresses of the values (`put_places`), int64 `[R]`, where `R` is a multiple of 4.
        g: Number of query heads.
        Dv: Dimension of a value.
        out: Address of the output, float32 `[g, Dv]`.
    """
    some, values, width = weights.ctypes.data, places.ctypes.data, weights.shape[1]
    for r in range(0, len(places), FOUR):
        for h in range(g):
            add_four(some + (h * width + r) * 4, values + r * 8, Dv, out + h * Dv * 4)


@kernel
def put_softmax(
    rows: np.ndarray, weights: np.ndarray, scale: float, softcap: float, out: np.ndarray
) -> Number:
    """Convert a query's inner products to attention weights in place.

    Args:
        rows: Addresses of rows, int64 `[R]`; 0 for a missing row, which gets the weight 0.
        weights: Log weights to add to the first logits, float32, at most `R` long.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        out: Float32, at least `R` long. It contains inner products before the call, and attention
            weights after it. Numbers after the first `R` become zero.

    Returns:
        Log-sum-exp of the logits.
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
    inverse = np.float32(0) if total == 0 else np.float32(1 / total)
    for r in range(len(rows)):
        some[r] *= inverse
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
    """Compute attention for one KV head of one sequence.

    This is the compiled version of `ops.attention.attend`.

    Args:
        queries: Float32 `[g, D]`.
        rows: Addresses of keys, int64 `[R]`; 0 for a missing row.
        row_bytes: Bytes of a row.
        weights: Log weights to add to the first logits of each query, float32 `[g, R']`, `R' ≤ R`.
        kind: Dtype of the rows (`numbers.KINDS`).
        value_bytes: Distance in bytes from a key's address to its value.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        places: Buffer, int64 `[R]`, where `R` is rounded up to a multiple of 4.
        keys: Buffer for keys in float32, the argument `room` of `put_places`.
        values: Buffer for values in float32, the argument `room` of `put_places`.
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
    """Write the addresses of one KV head's rows in sink and window (resident rows) into `out`.

    Args:
        resident: Address of the first row.
        row_bytes: Bytes of a row.
        mask: Address of the mask, uint8 `[count]`. A row with the mask 0 gets the address 0.
        count: Number of rows.
        out: Result, int64 `[count]`.
    """
    shown = uint8_at(mask, count)
    for r in range(count):
        out[r] = resident + r * row_bytes if shown[r] else 0
