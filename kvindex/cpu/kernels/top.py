"""Top-k of float scores, and positions of True flags. Every search ends with one of the two."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.rerank import NEVER
from kvindex.cpu.kernels.select import (
    candidates,
    entry_of,
    order_of,
    position_of,
    put_chosen,
    put_in_order,
    threshold_for,
)
from kvindex.cpu.kernels.sign_votes import INVALID

SMALLEST = 8
"""Smallest number of scores in a block of `list_best`."""

WIDE = 32
"""Scores that are compared at a time; larger blocks are multiples of it."""


@kernel
def put_orders(scores: np.ndarray, size: int, orders: np.ndarray, highest: np.ndarray) -> None:
    """Compute `order_of` for scores float32 `[n]`, int32 `[n]`, and the largest of each block."""
    for i in range(len(scores)):
        orders[i] = order_of(scores[i])
    for s in range(len(highest)):
        own, most = orders[s * size : s * size + size], np.int32(-(2**31))
        for i in range(len(own)):
            most = max(most, own[i])
        highest[s] = most


@kernel
def list_best(scores: np.ndarray, k: int, entries: np.ndarray) -> None:
    """Write the entries of the `k` best of scores float32 `[n]` into int64 `entries[:k]`.

    The best is first, and `k` is 1 to `n`. The `k`-th largest of the blocks' maxima is a threshold
    that at least `k` scores reach, but not many more. Only blocks whose maximum reaches the
    threshold are searched.
    """
    n, count = len(scores), 0
    size = max(SMALLEST, n // (4 * k))
    if 2 * size > WIDE:
        size = -(-size // WIDE) * WIDE
    orders, highest = np.empty(n, np.int32), np.empty(-(-n // size), np.int32)
    put_orders(scores, size, orders, highest)
    listed, found = np.empty(n, np.int32), np.empty(n, np.int32)
    least = np.int64(-(2**31)) if len(highest) < k else threshold_for(highest, k)
    for s in range(len(highest)):
        if highest[s] < least:
            continue
        for i in range(s * size, min(s * size + size, n)):
            if orders[i] >= least:
                listed[count], found[count] = i, orders[i]
                count += 1
    places, room = np.empty(k + 1, np.int32), np.empty(k, np.int64)
    put_chosen(found[:count], k, places)
    for i in range(k):
        room[i] = entry_of(found[places[i]], listed[places[i]])
    put_in_order(room, entries)


@kernel
def top_rows(scores: np.ndarray, best: np.ndarray, positions: np.ndarray) -> None:
    """Compiled version of `ops.select.top_k` for scores float32 `[R, n]`.

    The results are `best` float32 and `positions` int64 `[R, k]`.
    """
    (rows, n), k = scores.shape, positions.shape[1]
    most, entries = min(k, n), np.empty(n, np.int64)
    for r in range(rows):
        if most:
            list_best(scores[r], most, entries)
        for i in range(k):
            at = position_of(entries[i]) if i < most else np.int64(-1)
            best[r, i] = scores[r, at] if i < most else NEVER
            positions[r, i] = -1 if best[r, i] == NEVER else at


@kernel
def count_flags(flags: np.ndarray) -> Number:
    """Return the largest number of True entries that any matrix row of bool `[R, n]` has."""
    most = np.int64(0)
    for r in range(len(flags)):
        count = np.int32(0)
        for i in range(flags.shape[1]):
            count += np.int32(flags[r, i])
        most = max(most, np.int64(count))
    return most


@kernel
def list_flags(flags: np.ndarray, out: np.ndarray) -> None:
    """List the positions of True entries of bool `[R, n]`, ascending, int64 `[R, C]`, then -1."""
    for r in range(len(flags)):
        count = 0
        for i in range(flags.shape[1]):
            if flags[r, i]:
                out[r, count] = i
                count += 1
        out[r, count:] = -1


@kernel
def flag_candidates(
    part: int,
    parts: int,
    votes: np.ndarray,
    limits: np.ndarray,
    valid: np.ndarray,
    stored: np.ndarray,
    listed: np.ndarray,
    room: np.ndarray,
    chosen: np.ndarray,
    flags: np.ndarray,
) -> None:
    """Flag the keys that any head selects, as `ops.select.candidates`: bool `[P, n]`.

    Args:
        part: Index of the part that this call processes, below `parts`.
        parts: Number of parts into which the work is divided, one per thread.
        votes: Int32 `[P, g, n]`.
        limits: Int64 `[P]`.
        valid: Bool `[P, n]`, or `[P, 0]` where all are valid.
        stored: Buffer, int32 `[parts, n]`.
        listed: Buffer for each part, as for `select.candidates`.
        room: Buffer for each part, as for `select.candidates`.
        chosen: Buffer for each part, as for `select.candidates`.
        flags: Result.
    """
    groups, g, n = votes.shape
    own, ids = stored[part], chosen[part]
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        flags[group] = False
        for h in range(g):
            own[:] = votes[group, h]
            if valid.shape[1]:
                for i in range(n):
                    own[i] = own[i] if valid[group, i] else INVALID
            limit = limits[group]
            candidates(own, limit, listed[part], room[part], ids)
            for c in range(limit):
                flags[group, ids[c]] = True
