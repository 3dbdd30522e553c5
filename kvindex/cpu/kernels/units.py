"""Select `k` rows of the best units.

A unit is a set of rows with a common score, for example a page, a segment or a cluster. Rows are
listed unit by unit, the best unit first, until there are `k` rows.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, int32_at, int64_at, kernel
from kvindex.cpu.kernels.rerank import NEVER
from kvindex.cpu.kernels.select import entry_of, order_of, position_of, score_of
from kvindex.cpu.kernels.top import list_best

UNUSED = -1

LOWEST = np.int64(-(2**31))
"""A number below all ids. It is subtracted from ids, because entries need numbers of at least 0."""


@kernel
def ranked_entry(score: float, number: int) -> Number:
    """Combine a score and a row id into one int64, called an entry, by which rows are sorted.

    The entry is larger for a better score and, if scores are equal, for a lower id.
    """
    return entry_of(order_of(score), np.int64(number) - LOWEST)


@kernel
def put_ranked(entries: np.ndarray, count: int, ids: np.ndarray, scores: np.ndarray) -> None:
    """Sort the first `count` entries, extract their row ids and scores, and write them best first.

    An entry is an int64 that contains a score and a row id (`ranked_entry`).

    Args:
        entries: Int64 `[k]`, sorted in place.
        count: Number of entries.
        ids: Result, row ids, padded with -1, int64 `[k]`.
        scores: Result, scores, padded with `-inf`, float32 `[k]`.
    """
    entries[:count].sort()
    for i in range(len(ids)):
        ids[i] = position_of(entries[count - 1 - i]) + LOWEST if i < count else UNUSED
        scores[i] = score_of(entries[count - 1 - i]) if i < count else NEVER


@kernel
def member_at(members: int, width: int, position: int) -> Number:
    """Return the id at `position` of an array of ids at the address `members`.

    `width` is the number of bytes of an id, 4 or 8.
    """
    if width == 4:
        return np.int64(int32_at(members + position * 4, 1)[0])
    return int64_at(members + position * 8, 1)[0]


@kernel
def list_rows(
    units: np.ndarray,
    scores: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    members: int,
    width: int,
    singles: np.ndarray,
    entries: np.ndarray,
) -> int:
    """List the rows of the given units for one KV head of one sequence, until `entries` is full.

    Args:
        units: Units, best first, int64.
        scores: Scores of all units, float32 `[S + R]`.
        sizes: Number of rows of each unit, int64 `[S + R]`.
        starts: Position of each unit's first row id in `members`, int64 `[S]`.
        members: Address of the row ids of the first `S` units.
        width: Number of bytes of an id in `members`.
        singles: Row ids of the last `R` units, which have at most one row each, int64 `[R]`.
        entries: Result, entries of the rows (`ranked_entry`), int64 `[k]`.

    Returns:
        Number of listed rows.
    """
    count, slot, S = 0, 0, len(starts)
    for unit in units:
        for offset in range(min(sizes[unit], len(entries) - slot)):
            row = singles[unit - S] if unit >= S else UNUSED
            if unit < S:
                row = member_at(members, width, starts[unit] + offset)
            if row != UNUSED:
                entries[count] = ranked_entry(scores[unit], row)
                count += 1
            slot += 1
    return count


@kernel
def best_rows(
    scores: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    members: np.ndarray,
    width: int,
    singles: np.ndarray,
    ids: np.ndarray,
    out: np.ndarray,
) -> None:
    """Select `k` rows of the best units of each group.

    A unit is a set of rows with a common score, such as a cluster. A group is one KV head of one
    sequence. It has `S` units of any size, and `R` units that have at most one row each. This is
    the compiled version of `ops.units.best_rows`.

    Args:
        scores: Scores of the units, float32 `[B·G, S + R]`.
        starts: For each of the first `S` units, the position of its first row id in the array at
            the address in `members`, int64 `[B·G, S]`.
        sizes: Number of rows of each unit, int64 `[B·G, S + R]`.
        members: For each group, the address of an array with the row ids of the first `S` units,
            int64 `[B·G]`.
        width: Number of bytes of an id in this array, 4 or 8.
        singles: Row ids of the last `R` units, int64 `[B·G, R]`.
        ids: Result, row ids, best first, int64 `[B·G, k]`.
        out: Result, scores of the rows, float32 `[B·G, k]`.
    """
    (groups, k), U = ids.shape, scores.shape[1]
    most, own = min(k, U), np.empty(U, np.float32)
    best, entries, units = np.empty(U, np.int64), np.empty(k, np.int64), np.empty(most, np.int64)
    for p in range(groups):
        count = 0
        for s in range(U):
            own[s] = NEVER if sizes[p, s] == 0 else scores[p, s]
        if most:
            list_best(own, most, best)
        for i in range(most):
            unit = position_of(best[i])
            if own[unit] != NEVER:
                units[count] = unit
                count += 1
        of = own, sizes[p], starts[p], members[p], width, singles[p], entries
        put_ranked(entries, list_rows(units[:count], *of), ids[p], out[p])


@kernel
def walk(sizes: np.ndarray, units: np.ndarray, offsets: np.ndarray) -> None:
    """For each of the first `k` rows, compute to which unit (set of rows) it belongs.

    The rows of the first unit come first, then those of the second unit, and so on. This is the
    compiled version of `ops.units.walk`.

    Args:
        sizes: Number of rows of each unit, int64 `[R, S]`.
        units: Result, the unit of each row, int64 `[R, k]`, padded with -1.
        offsets: Result, the position of each row in its unit, int64 `[R, k]`.
    """
    k = units.shape[1]
    for r in range(len(sizes)):
        slot = 0
        for s in range(sizes.shape[1]):
            for offset in range(min(sizes[r, s], k - slot)):
                units[r, slot] = s
                offsets[r, slot] = offset
                slot += 1
        for i in range(slot, k):
            units[r, i] = UNUSED
            offsets[r, i] = i
