"""Attention of a group's queries over rows where they lie: those found, and the resident ones."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, prefetch, uint8_at
from kvindex.cpu.kernels.numbers import FLOAT32, exp, largest, read
from kvindex.cpu.kernels.rerank import NEVER, cap
from kvindex.cpu.kernels.vectors import FOUR, add_four, four_dots

AHEAD = 2 * FOUR
"""Rows that are on their way."""

LINE = 64
"""Bytes that come from memory together."""


@kernel
def put_places(
    rows: np.ndarray, offset: int, count: int, kind: int, room: np.ndarray, out: np.ndarray
) -> None:
    """Where `count` float32 numbers of each row are, int64 `out[R]`; zeros from there on.

    rows: addresses of numbers of a `kind`, 0 for none, int64 `[R]`; offset: bytes from there; room:
    float32 `[R + 1, count]`, or `[1, count]` of float32 rows: the last is zeros, before it numbers
    of another kind are put.
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
    """Have four rows, from the `first` on, come from memory."""
    for r in range(first, min(first + FOUR, len(rows))):
        for at in range(0, row_bytes, LINE):
            prefetch(rows[r] + at)


@kernel
def put_dots(
    queries: int, g: int, D: int, places: np.ndarray, row_bytes: int, out: np.ndarray
) -> None:
    """Inner products of queries with rows.

    queries: an address of float32 `[g, D]`; places: of `put_places`, int64 `[R]`, R a multiple of
    4; out: float32 `[g, R]`.
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
    """Sums of rows times shares float32 `[g, R]`; out: an address of float32 `[g, Dv]`."""
    some, values, width = weights.ctypes.data, places.ctypes.data, weights.shape[1]
    for r in range(0, len(places), FOUR):
        for h in range(g):
            add_four(some + (h * width + r) * 4, values + r * 8, Dv, out + h * Dv * 4)


@kernel
def put_softmax(
    rows: np.ndarray, weights: np.ndarray, scale: float, softcap: float, out: np.ndarray
) -> Number:
    """Shares of rows in a head's attention, in place of inner products; gives their lse.

    rows: as of `attend`; weights: float32 `[R']`, added to the first logits; out: float32, longer
    than rows by zeros.
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
    """As `ops.attention.attend`, of queries float32 `[g, D]`.

    rows: addresses int64 `[R]` of a key, numbers of a `kind`; 0: none; value_bytes: from there to
    its value. weights: float32 `[g, R']`, added to the first logits. places int64 `[R]`, logits
    float32 `[g, R]`, R of them up to the next multiple of 4, keys and values as for `put_places`:
    room. Writes output float32 `[g, Dv]` and lse float32 `[g]`.
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
    """Addresses int64 `[count]` of a group's resident rows; 0 where the mask is."""
    shown = uint8_at(mask, count)
    for r in range(count):
        out[r] = resident + r * row_bytes if shown[r] else 0
