"""Top-k of rows of float scores, and positions of flags: what every search ends with."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.rerank import NEVER
from kvindex.cpu.kernels.scan import INVALID
from kvindex.cpu.kernels.select import (
    candidates,
    entry_of,
    least_of,
    order_of,
    position_of,
    put_best_first,
)

SMALLEST = 8
"""Scores of a block at least: where there are fewer for each result, all are ordered."""

WIDE = 32
"""Scores that are compared at once: larger blocks are multiples of it."""


@kernel
def largest_order(scores: np.ndarray) -> Number:
    """The largest `order_of` scores float32 `[n]`."""
    most = np.int32(-(2**31))
    for i in range(len(scores)):
        bits = np.float32(scores[i]).view(np.int32)
        order = np.int32(bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF)))
        most = max(most, np.int32(0) if scores[i] == 0 else order)
    return np.int64(most)


@kernel
def least_of_best(scores: np.ndarray, size: int, k: int) -> Number:
    """An order that at least `k` of the scores float32 `[n]` reach, and few others.

    The largest of each block of `size` are scores, too: the `k`-th best of those.
    """
    blocks = -(-len(scores) // size)
    entries = np.empty(blocks, np.int64)
    for s in range(blocks):
        entries[s] = entry_of(largest_order(scores[s * size : s * size + size]), s)
    put_best_first(entries, k)
    return least_of(entries[:k]) >> np.int64(32)


@kernel
def list_best(scores: np.ndarray, k: int, entries: np.ndarray) -> None:
    """Entries of the `k` best of scores float32 `[n]`, best first, into int64 `entries[:k]`.

    k: 1 to n; entries: `[n]`, room for more.
    """
    n, count = len(scores), 0
    size = max(SMALLEST, n // (4 * k))
    if 2 * size > WIDE:
        size = -(-size // WIDE) * WIDE
    least = np.int64(-(2**31)) if n <= SMALLEST * k else least_of_best(scores, size, k)
    for s in range(0, n, size):
        own = scores[s : s + size]
        if n > SMALLEST * k and largest_order(own) < least:
            continue
        for i in range(len(own)):
            order = order_of(own[i])
            if order >= least:
                entries[count] = entry_of(order, s + i)
                count += 1
    put_best_first(entries[:count], k)
    entries[:k].sort()
    for i in range(k // 2):
        entries[i], entries[k - 1 - i] = entries[k - 1 - i], entries[i]


@kernel
def top_rows(scores: np.ndarray, best: np.ndarray, positions: np.ndarray) -> None:
    """As `ops.select.top_k`, of scores float32 `[R, n]`: best float32, positions int64 `[R, k]`."""
    (rows, n), k = scores.shape, positions.shape[1]
    kept, entries = min(k, n), np.empty(n, np.int64)
    for r in range(rows):
        if kept:
            list_best(scores[r], kept, entries)
        for i in range(k):
            at = position_of(entries[i]) if i < kept else np.int64(-1)
            best[r, i] = scores[r, at] if i < kept else NEVER
            positions[r, i] = -1 if best[r, i] == NEVER else at


@kernel
def count_flags(flags: np.ndarray) -> Number:
    """The largest number of flags of a row of bool `[R, n]`."""
    most = np.int64(0)
    for r in range(len(flags)):
        count = np.int32(0)
        for i in range(flags.shape[1]):
            count += np.int32(flags[r, i])
        most = max(most, np.int64(count))
    return most


@kernel
def list_flags(flags: np.ndarray, out: np.ndarray) -> None:
    """Positions of the flags of bool `[R, n]`, ascending, int64 `[R, C]`, then -1."""
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
    block: int,
    held: np.ndarray,
    highest: np.ndarray,
    listed: np.ndarray,
    room: np.ndarray,
    chosen: np.ndarray,
    flags: np.ndarray,
) -> None:
    """Flag the keys that any head takes, as `ops.select.candidates`: bool `[P, n]`.

    votes: int32 `[P, g, n]`; limits: int64 `[P]`; valid: bool `[P, n]` or `[P, 0]`. Of each part:
    held int32 `[n]`, highest int32 of each `block`, listed, room int64 `[n + 2 · SAMPLED]`, chosen
    int32 `[n]`.
    """
    groups, g, n = votes.shape
    own, high, ids = held[part], highest[part], chosen[part]
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        flags[group] = False
        for h in range(g):
            own[:] = votes[group, h]
            if valid.shape[1]:
                for i in range(n):
                    own[i] = own[i] if valid[group, i] else INVALID
            for s in range(len(high)):
                high[s] = own[s * block : s * block + block].max()
            limit = limits[group]
            candidates(own, high, block, limit, listed[part], room[part], ids)
            for c in range(limit):
                flags[group, ids[c]] = True
