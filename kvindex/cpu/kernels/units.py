"""List the rows of the best units (such as pages or clusters), best first, until there are `k`."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, int32_at, int64_at, kernel
from kvindex.cpu.kernels.rerank import NEVER
from kvindex.cpu.kernels.select import entry_of, order_of, position_of, score_of
from kvindex.cpu.kernels.top import list_best

UNUSED = -1

LOWEST = np.int64(-(2**31))
"""A number below all ids. It is subtracted from ids, because an entry needs numbers from 0 on."""


@kernel
def ranked_entry(score: float, number: int) -> Number:
    """Return an entry that is larger for a better score, then for a lower id."""
    return entry_of(order_of(score), np.int64(number) - LOWEST)


@kernel
def put_ranked(entries: np.ndarray, count: int, ids: np.ndarray, scores: np.ndarray) -> None:
    """Sort entries int64 `[k]`, and write ids and scores of the first `count`, best first.

    Ids are int64, padded with -1; scores are float32, padded with `-inf`.
    """
    entries[:count].sort()
    for i in range(len(ids)):
        ids[i] = position_of(entries[count - 1 - i]) + LOWEST if i < count else UNUSED
        scores[i] = score_of(entries[count - 1 - i]) if i < count else NEVER


@kernel
def member_at(members: int, width: int, position: int) -> Number:
    """Return one of the ids stored at an address; an id has 4 or 8 bytes."""
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
    """Write the entries of the rows in `units`, best unit first, and return how many were written.

    Writing stops when `entries` is full. The arguments are those of `best_rows` for one group:
    scores and sizes `[S + R]`, starts `[S]`, the address of the members' ids (`width` bytes each),
    and singles `[R]`.
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
    """Compiled version of `ops.units.best_rows`.

    Args:
        scores: Float32 `[P, S + R]`.
        starts: Int64 `[P, S]`.
        sizes: Int64 `[P, S + R]`.
        members: Addresses of ids, int64 `[P]`.
        width: Bytes of an id.
        singles: Int64 `[P, R]`.
        ids: Result, int64 `[P, k]`.
        out: Result, scores, float32 `[P, k]`.
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
    """Compiled version of `ops.units.walk`: units and offsets int64 `[R, k]`."""
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
