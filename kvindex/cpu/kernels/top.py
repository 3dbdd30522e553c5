"""Select the `k` best scores of an array, and list the positions of True elements of a mask."""

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
"""Number of scores that are compared at a time. The size of a larger block is a multiple of it."""


@kernel
def put_orders(scores: np.ndarray, size: int, orders: np.ndarray, highest: np.ndarray) -> None:
    """Map scores to integers that have the same order, and find the maximum of each block.

    Args:
        scores: Float32 `[n]`.
        size: Number of scores in a block.
        orders: Result, `select.order_of` of each score, int32 `[n]`.
        highest: Result, the largest of each block's `orders`, int32 `[blocks]`.
    """
    for i in range(len(scores)):
        orders[i] = order_of(scores[i])
    for s in range(len(highest)):
        own, most = orders[s * size : s * size + size], np.int32(-(2**31))
        for i in range(len(own)):
            most = max(most, own[i])
        highest[s] = most


@kernel
def list_best(scores: np.ndarray, k: int, entries: np.ndarray) -> None:
    """List the `k` best scores as entries (`select.entry_of`), the best first.

    To save time, most scores are skipped. The scores are divided into blocks, and the maximum of
    each block is computed. Then the function finds a threshold that at least `k` of these maxima
    reach. So at least `k` scores reach it, and only blocks whose maximum reaches it are searched.

    Args:
        scores: Float32 `[n]`.
        k: Number of scores to list, 1 to `n`.
        entries: Result in `entries[:k]`, int64.
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
    """Select the `k` best scores of each matrix row.

    This is the compiled version of `ops.select.top_k`.

    Args:
        scores: Float32 `[R, n]`.
        best: Result, the best scores, float32 `[R, k]`, padded with `-inf`.
        positions: Result, positions of these scores, int64 `[R, k]`, padded with -1.
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
    """Count the True elements of each matrix row of bool `[R, n]`, and return the largest count."""
    most = np.int64(0)
    for r in range(len(flags)):
        count = np.int32(0)
        for i in range(flags.shape[1]):
            count += np.int32(flags[r, i])
        most = max(most, np.int64(count))
    return most


@kernel
def list_flags(flags: np.ndarray, out: np.ndarray) -> None:
    """List the positions of the True elements of each matrix row.

    Args:
        flags: Bool `[R, n]`.
        out: Result, positions, ascending and padded with -1, int64 `[R, C]`.
    """
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
    """Flag the keys that are candidates of at least one query head (`ops.select.candidates`).

    The candidates of a query head are the keys with the largest votes (coarse scores). A group is
    one KV head of one sequence. Each thread processes some of the groups.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        votes: Votes of the keys, int32 `[B·G, g, n]`.
        limits: Number of candidates of each query head, int64 `[B·G]`.
        valid: Mask of valid keys, bool `[B·G, n]`, or `[B·G, 0]` if all keys are valid.
        stored: Buffer, int32 `[parts, n]`.
        listed: For each thread the buffer `listed` of `select.candidates`.
        room: For each thread the buffer `room` of `select.candidates`.
        chosen: For each thread the result `out` of `select.candidates`.
        flags: Result, bool `[B·G, n]`.
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
