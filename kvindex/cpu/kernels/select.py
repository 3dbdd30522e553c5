"""The best by score, equal scores by the lower id: candidates by votes, then rows."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.scan import INVALID

BINS = 4096

LAST = np.int64(2**32 - 1)


@kernel
def order_of(score: float) -> Number:
    """A number in the order of float32 scores; -0 equals 0."""
    bits = np.int64(np.float32(np.float32(score) + np.float32(0)).view(np.int32))
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
def candidates(
    votes: np.ndarray,
    lowest: np.ndarray,
    highest: np.ndarray,
    block: int,
    limit: int,
    out: np.ndarray,
) -> None:
    """As `ops.select.candidates`, in another order: ids int32 `out[:limit]`.

    votes: int32 `[n]`, `INVALID` for none; lowest, highest: of each `block` of them; limit: at most
    the number of valid ones.
    """
    if limit == 0:
        return
    low, high = np.int64(lowest.min()), np.int64(highest.max())
    shift = np.int64(0)
    while (high - low) >> shift >= BINS:
        shift += 1
    counts = np.zeros(BINS, np.int32)
    for i in range(len(votes)):
        if votes[i] != INVALID:
            counts[(np.int64(votes[i]) - low) >> shift] += 1
    cut, above = BINS, 0
    while above < limit:
        cut -= 1
        above += counts[cut]
    edge, whole = np.empty(counts[cut], np.int64), above - counts[cut]
    count, held = 0, 0
    least = low + (np.int64(cut) << shift)
    for s in range(len(highest)):
        if highest[s] < least:
            continue
        for i in range(s * block, min(s * block + block, len(votes))):
            if votes[i] < least or votes[i] == INVALID:
                continue
            if (np.int64(votes[i]) - low) >> shift > cut:
                out[count] = i
                count += 1
            else:
                edge[held] = entry_of(np.int64(votes[i]), i)
                held += 1
    put_best_first(edge, limit - whole)
    for i in range(limit - whole):
        out[count + i] = position_of(edge[i])


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
