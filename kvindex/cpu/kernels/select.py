"""Select candidates by their coarse scores (votes), and rows by their final scores.

Of keys with equal votes or scores, those with lower ids are selected. To select the best `n` keys,
the kernels first find a threshold that at least `n` scores reach. The kernels avoid branches that
depend on the data, because a CPU could not predict them.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, lowest_bit, popcount
from kvindex.cpu.kernels.sign_votes import INVALID
from kvindex.cpu.kernels.vectors import reaching

SAMPLED, FEWEST = 4096, 1024
"""Largest and smallest number of votes that are sampled to estimate a threshold.

Within these bounds, an eighth of all votes is sampled.
"""

WORD = 64
"""Number of votes that are compared at a time."""

MARGIN = 4
"""Number of unused elements at the end of a list, because positions are written four at a time."""

FEW = 256
"""Largest number of entries that `put_in_order` sorts by counting the larger entries of each."""

LAST = np.int64(2**32 - 1)
MOST = np.int32(2**31 - 1)
ONE = np.uint64(1)


@kernel
def order_of(score: float) -> Number:
    """Map a float32 score to an int32, so that a larger score gives a larger integer.

    The scores 0 and -0 give the same integer.
    """
    bits = np.int32(0) if score == 0 else np.float32(score).view(np.int32)
    return np.int32(bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF)))


@kernel
def entry_of(order: Number, position: Number) -> Number:
    """Combine an integer score (`order_of`) and a position into one int64, called an entry.

    The entry is larger for a larger score and, if scores are equal, for a lower position.
    """
    return np.int64(order) << np.int64(32) | (LAST - np.int64(position))


@kernel
def position_of(entry: int) -> Number:
    """Extract the position from an integer that `entry_of` has made."""
    return LAST - (entry & LAST)


@kernel
def score_of(entry: int) -> Number:
    """Extract the float32 score from an integer that `entry_of` has made."""
    order = np.int32(entry >> np.int64(32))
    return np.int32(order ^ (order >> np.int32(31) & np.int32(0x7FFFFFFF))).view(np.float32)


@kernel
def count_from(numbers: np.ndarray, threshold: int) -> Number:
    """Return how many of the int32 numbers `[n]` are at least `threshold`."""
    count, least = np.int32(0), np.int32(threshold)
    for i in range(len(numbers)):
        count += np.int32(numbers[i] >= least)
    return count


@kernel
def threshold_for(numbers: np.ndarray, k: int) -> Number:
    """Find a threshold that at least `k` of the int32 numbers `[n]` reach, by binary search.

    The search ends at the first threshold that exactly `k` numbers reach. If there is none, because
    of equal numbers, the result is the largest threshold that at least `k` numbers reach.
    """
    least = most = np.int32(numbers[0])
    for i in range(len(numbers)):
        least, most = min(least, np.int32(numbers[i])), max(most, np.int32(numbers[i]))
    low, high = np.int64(least), np.int64(most)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = count_from(numbers, middle)
        if count == k:
            return middle
        if count > k:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def put_chosen(numbers: np.ndarray, k: int, out: np.ndarray) -> None:
    """Write the positions of the `k` largest int32 numbers into `out[:k]`, ascending.

    Of equal numbers, those at lower positions are preferred. `out` is int32 and has at least
    `k + 1` elements.
    """
    threshold = np.int32(threshold_for(numbers, k))
    ties = k - (0 if threshold == MOST else count_from(numbers, threshold + 1))
    taken = 0
    for i in range(len(numbers)):
        tie = int(numbers[i] == threshold)
        out[taken] = i
        taken += int(numbers[i] > threshold) | (tie & int(ties > 0))
        ties -= tie


@kernel
def sampled_threshold(votes: np.ndarray, limit: int, more: int, room: np.ndarray) -> Number:
    """Estimate a threshold that at least `limit` of the votes (coarse scores) reach.

    The threshold is estimated from a sample of the votes. It is chosen so that usually somewhat
    more than `limit` votes reach it. If it is too high nevertheless, the caller calls this function
    again with a larger `more`, which gives a lower threshold.

    Args:
        votes: Int32 `[n]`.
        limit: Number of votes that must reach the threshold.
        more: Number of earlier calls whose result was too high.
        room: Buffer, int32, at least `2 · SAMPLED` long.
    """
    step = max(1, len(votes) // min(max(len(votes) // 8, FEWEST), SAMPLED))
    count = (len(votes) - 1) // step + 1
    expected = limit / step
    rank = limit if step == 1 else int(expected + 3 * math.sqrt(expected) + 8) << more
    if rank >= count:
        return INVALID + 1
    for i in range(count):
        room[i] = votes[i * step]
    return max(np.int64(threshold_for(room[:count], rank)), np.int64(INVALID) + 1)


@kernel
def list_from(votes: np.ndarray, threshold: int, out: np.ndarray) -> int:
    """List the positions of all votes (coarse scores) that are at least `threshold`.

    Args:
        votes: Int32 `[n]`.
        threshold: Lowest vote that is listed.
        out: Result, positions, ascending, int32. It must have `MARGIN` elements more than there are
            positions.

    Returns:
        Number of listed positions.
    """
    count, least, at = 0, np.int32(threshold), votes.ctypes.data
    whole = len(votes) // WORD * WORD
    for start in range(0, whole, WORD):
        ones = reaching(at + start * 4, least)
        after = count + int(popcount(ones))
        while count < after:
            for i in range(MARGIN):
                out[count + i] = start + np.int64(lowest_bit(ones))
                ones &= ones - ONE
            count += MARGIN
        count = after
    for i in range(whole, len(votes)):
        out[count] = i
        count += int(votes[i] >= least)
    return count


@kernel
def candidates(
    votes: np.ndarray, limit: int, listed: np.ndarray, room: np.ndarray, out: np.ndarray
) -> None:
    """Select the `limit` keys with the largest coarse scores (votes) for one query head.

    `ops.select.candidates` does the same for several heads.

    Args:
        votes: Int32 `[n]`, `INVALID` for padding.
        limit: Number of candidates, at most the number of valid keys.
        listed: Buffer, int32 `[n + MARGIN]`.
        room: Buffer, int32 `[n + 2 · SAMPLED]`.
        out: Result, ids of the keys, ascending, in `out[:limit]`; int32 with at least `limit + 1`
            elements.
    """
    if limit == 0:
        return
    more, count = 0, 0
    while count < limit:
        threshold = sampled_threshold(votes, limit, more, room)
        count = list_from(votes, threshold, listed)
        more += 1
    for i in range(count):
        room[i] = votes[listed[i]]
    put_chosen(room[:count], limit, out)
    for i in range(limit):
        out[i] = listed[out[i]]


@kernel
def put_in_order(entries: np.ndarray, out: np.ndarray) -> None:
    """Sort int64 entries `[k]`, largest first, and write them into `out`.

    No two entries may be equal.
    """
    k = len(entries)
    if k > FEW:
        out[:k] = entries
        out[:k].sort()
        for i in range(k // 2):
            out[i], out[k - 1 - i] = out[k - 1 - i], out[i]
        return
    for i in range(k):
        before, own = 0, entries[i]
        for j in range(k):
            before += int(entries[j] > own)
        out[before] = own


@kernel
def top_k(
    scores: np.ndarray,
    ids: np.ndarray,
    k: int,
    orders: np.ndarray,
    places: np.ndarray,
    room: np.ndarray,
    out: np.ndarray,
) -> None:
    """Select the `k` rows with the best scores.

    This is the compiled version of `ops.select.top_k`.

    Args:
        scores: Float32 `[C]`.
        ids: Ids of the rows, ascending, int32 `[C]`.
        k: Number of rows to select, at most `C`.
        orders: Buffer, int32 `[C]`.
        places: Buffer, int32 `[k + 1]`.
        room: Buffer, int64 `[k]`.
        out: Result, entries (`entry_of`) of the selected rows, best first, int64 `[k]`.
    """
    if k == 0:
        return
    for c in range(len(scores)):
        orders[c] = order_of(scores[c])
    put_chosen(orders[: len(scores)], k, places)
    for i in range(k):
        room[i] = entry_of(orders[places[i]], ids[places[i]])
    put_in_order(room[:k], out)
