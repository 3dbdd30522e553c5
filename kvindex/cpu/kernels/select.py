"""The best by score, equal scores by the lower id: candidates by votes, then rows."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.scan import INVALID

SAMPLED = 4096
"""Votes that tell where to begin."""

LAST = np.int64(2**32 - 1)


@kernel
def order_of(score: float) -> Number:
    """A number in the order of float32 scores; -0 equals 0."""
    bits = np.int64(np.float32(score).view(np.int32))
    if score == 0:
        bits = np.int64(0)
    return bits ^ (bits >> np.int64(31) & np.int64(0x7FFFFFFF))


@kernel
def entry_of(order: Number, position: Number) -> Number:
    """Larger for a larger `order`, then for a lower position: no two are equal."""
    return np.int64(order) << np.int64(32) | (LAST - np.int64(position))


@kernel
def position_of(entry: int) -> Number:
    """The position of an entry."""
    return LAST - (entry & LAST)


@kernel
def put_best_first(entries: np.ndarray, k: int) -> None:
    """Move the `k` largest of distinct entries int64 `[n]` to the front, in any order."""
    low, high = 0, len(entries) - 1
    while low < high:
        middle, last = (low + high) // 2, entries[high]
        a, b = entries[low], entries[middle]
        pivot = max(min(a, b), min(max(a, b), last))  # the median
        i, j = low, high
        while i <= j:
            while entries[i] > pivot:
                i += 1
            while entries[j] < pivot:
                j -= 1
            if i <= j:
                entries[i], entries[j] = entries[j], entries[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            return


@kernel
def least_of(entries: np.ndarray) -> Number:
    """The least of entries int64 `[n]`."""
    least = entries[0]
    for i in range(len(entries)):
        least = min(least, entries[i])
    return least


@kernel
def threshold_of(votes: np.ndarray, limit: int, more: int, room: np.ndarray) -> Number:
    """A vote that about `limit` of the votes int32 `[n]` reach, and some more, as a sample tells.

    more: how often there were too few: each time it is lower. room: int64, `2 · SAMPLED` at least.
    """
    step = max(1, len(votes) // SAMPLED)
    count = (len(votes) - 1) // step + 1
    for i in range(count):
        room[i] = entry_of(votes[i * step], i)
    expected = limit / step
    rank = int(expected + 3 * math.sqrt(expected) + 8) << more
    if rank >= count:
        return INVALID + 1
    put_best_first(room[:count], rank)
    return max(least_of(room[:rank]) >> np.int64(32), INVALID + 1)


@kernel
def list_from(
    votes: np.ndarray, highest: np.ndarray, block: int, threshold: int, out: np.ndarray
) -> int:
    """Entries of the votes from a threshold on, ascending by position; gives how many.

    highest: of each `block` of votes; out: as long as they are.
    """
    count, least = 0, np.int32(threshold)
    for s in range(len(highest)):
        if highest[s] < least:
            continue
        own = votes[s * block : s * block + block]
        for i in range(len(own)):
            if own[i] >= least:
                out[count] = entry_of(np.int64(own[i]), s * block + i)
                count += 1
    return count


@kernel
def candidates(
    votes: np.ndarray,
    highest: np.ndarray,
    block: int,
    limit: int,
    listed: np.ndarray,
    room: np.ndarray,
    out: np.ndarray,
) -> None:
    """As `ops.select.candidates`: ids int32 `out[:limit]`, ascending.

    votes: int32 `[n]`, `INVALID` for none; highest: of each `block` of them; limit: at most the
    number of valid ones; listed, room: int64 `[n + 2 · SAMPLED]`.
    """
    if limit == 0:
        return
    more, count = 0, 0
    while count < limit:
        threshold = threshold_of(votes, limit, more, room)
        count = list_from(votes, highest, block, threshold, listed)
        more += 1
    for i in range(count):
        room[i] = listed[i]
    put_best_first(room[:count], limit)
    least, taken = least_of(room[:limit]), 0
    for i in range(count):
        if listed[i] >= least:
            out[taken] = position_of(listed[i])
            taken += 1


@kernel
def top_k(scores: np.ndarray, ids: np.ndarray, k: int, entries: np.ndarray) -> None:
    """As `ops.select.top_k`: the entries of the best, best first, in int64 `entries[:k]`.

    scores: float32 `[C]` of rows int32 `[C]`, k at most C; entries: as long.
    """
    for c in range(len(scores)):
        entries[c] = entry_of(order_of(scores[c]), ids[c])
    put_best_first(entries, k)
    entries[:k].sort()
    for i in range(k // 2):
        entries[i], entries[k - 1 - i] = entries[k - 1 - i], entries[i]


@kernel
def score_of(entry: int) -> Number:
    """The float32 score of an entry."""
    order = np.int32(entry >> np.int64(32))
    return np.int32(order ^ (order >> np.int32(31) & np.int32(0x7FFFFFFF))).view(np.float32)
