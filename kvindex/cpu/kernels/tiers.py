"""Candidates by tiers: tables of points for a query, votes of all keys, the best of each head.

The points of up to eight query heads are the bytes of one word, so that one look-up serves them.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, uint8_at, uint64_at
from kvindex.cpu.kernels.query import rotate

HEADS = 8
"""Of a word of points."""

CENTROIDS = 256

POINTS = 256
"""More than a key can have: 6 of each subspace."""

PIECE = 1024
"""Keys at a time."""

BYTE, EIGHT = np.uint64(255), np.uint64(8)


@kernel
def add_flips(
    losses: np.ndarray, ids: np.ndarray, count: int, loss: float, bit: int, more: np.ndarray
) -> None:
    """Merge `count` centroids with the same whose `bit` is flipped, ascending by what they lose.

    losses: float64, ids: int64 `[256]`, the second half is room; more: float64 and ids int64 of
    them as float64, `[2, 256]`, room. Equal ones by the lower id.
    """
    x = y = 0
    merged, numbers = more[0], more[1]
    for i in range(2 * count):
        if y == count:
            plain = True
        elif x == count:
            plain = False
        else:
            other = losses[y] + loss
            plain = losses[x] < other or (losses[x] == other and ids[x] < ids[y] ^ bit)
        if plain:
            merged[i], numbers[i] = losses[x], ids[x]
            x += 1
        else:
            merged[i], numbers[i] = losses[y] + loss, ids[y] ^ bit
            y += 1
    for i in range(2 * count):
        losses[i], ids[i] = merged[i], np.int64(numbers[i])


@kernel
def put_order(part: np.ndarray, losses: np.ndarray, ids: np.ndarray, room: np.ndarray) -> None:
    """Centroids by their inner product with a query's subspace float32 `[8]`, best first.

    Writes ids int64 `[256]`; losses float64 `[256]`, room float64 `[2, 256]`: room.
    """
    best = 0
    for j in range(len(part)):
        best |= int(part[j] > 0) << j
    losses[0], ids[0] = 0.0, best
    for j in range(len(part)):
        add_flips(losses, ids, 1 << j, abs(np.float64(part[j])), 1 << j, room)


@kernel
def put_points(
    ids: np.ndarray, histogram: np.ndarray, limits: np.ndarray, up: Number, table: np.ndarray
) -> None:
    """Points of the centroids int64 `[256]`, best first, into a byte of uint64 `table[256]`.

    histogram: keys per centroid, int64 `[256]`; limits: int64 `[tiers]`, ascending; up: bits below
    that byte.
    """
    better, first = 0, 0
    for i in range(len(ids)):
        while first < len(limits) and limits[first] <= better:
            first += 1
        if first == len(limits):
            return
        table[ids[i]] |= np.uint64(len(limits) - first) << up
        better += histogram[ids[i]]


@kernel
def prepare(
    queries: np.ndarray,
    rotation: np.ndarray,
    histogram: np.ndarray,
    limits: np.ndarray,
    rotated: np.ndarray,
    tables: np.ndarray,
) -> None:
    """As `ops.coarse.tier_table`, of queries float32 `[P, g, D]`.

    histogram: int64 `[P, M, 256]`; limits: int64 `[P, tiers]`. Writes rotated float32 `[P, g, D]`,
    with norms, and tables of points uint64 `[P, words, M, 256]`.
    """
    groups, g, D = queries.shape
    losses, ids = np.empty(CENTROIDS, np.float64), np.empty(CENTROIDS, np.int64)
    room = np.empty((2, CENTROIDS), np.float64)
    tables[:] = 0
    for p in range(groups):
        for h in range(g):
            one, up = rotated[p, h], np.uint64(h % HEADS) * EIGHT
            norm = rotate(queries[p, h], rotation, one)
            for b in range(D // 8):
                put_order(one[b * 8 : b * 8 + 8], losses, ids, room)
                put_points(ids, histogram[p, b], limits[p], up, tables[p, h // HEADS, b])
            for i in range(D):
                one[i] *= np.float32(norm)


@kernel
def look_up(signs: int, M: int, table: np.ndarray, out: np.ndarray) -> None:
    """Points of keys, whose signs uint8 `[n, M]` lie at an address, into uint64 `out[n]`.

    table: uint64 `[M, 256]`.
    """
    n = len(out)
    if M % 8:
        some = uint8_at(signs, n * M)
        for i in range(n):
            out[i] = 0
            for b in range(M):
                out[i] += table[b, some[i * M + b]]
        return
    words = uint64_at(signs, n * M // 8)
    for i in range(n):
        sum_of = np.uint64(0)
        for w in range(M // 8):
            word = words[i * (M // 8) + w]
            for b in range(8):
                sum_of += table[w * 8 + b, word & BYTE]
                word >>= EIGHT
        out[i] = sum_of


@kernel
def vote(
    part: int,
    parts: int,
    signs: np.ndarray,
    valid: np.ndarray,
    heads: int,
    tables: np.ndarray,
    votes: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Votes of a part of all groups' keys, as `ops.coarse.votes`, and how many have how many.

    signs, valid: addresses int64 `[P]`, the latter of flags, or 0. Writes votes uint64 `[P, words,
    N]` and counts of valid keys int64 `[parts, P, g, 256]`.
    """
    (groups, words, N), M = votes.shape, tables.shape[2]
    pieces = -(-N // PIECE)
    total, own = groups * pieces, counts[part]
    own[:] = 0
    for unit in range(total * part // parts, total * (part + 1) // parts):
        p, start = unit // pieces, unit % pieces * PIECE
        n = min(PIECE, N - start)
        for w in range(words):
            look_up(signs[p] + start * M, M, tables[p, w], votes[p, w, start : start + n])
        for h in range(heads):
            some, up = votes[p, h // HEADS, start : start + n], np.uint64(h % HEADS) * EIGHT
            count(some, up, valid[p] + start if valid[p] else 0, own[p, h])


@kernel
def count(votes: np.ndarray, up: Number, valid: int, counts: np.ndarray) -> None:
    """Add the valid keys of votes uint64 `[n]` to int64 `counts[256]`, by one of their bytes."""
    if not valid:
        for i in range(len(votes)):
            counts[votes[i] >> up & BYTE] += 1
        return
    flags = uint8_at(valid, len(votes))
    for i in range(len(votes)):
        counts[votes[i] >> up & BYTE] += np.int64(flags[i])


@kernel
def put_cut(counts: np.ndarray, limit: int, h: int, cuts: np.ndarray, left: np.ndarray) -> None:
    """Of the best `limit` keys the least vote, and how many have it, into `cuts[h]`, `left[h]`.

    counts: of all parts, int64 `[parts, 256]`.
    """
    above = 0
    for v in range(POINTS - 1, -1, -1):
        own = counts[:, v].sum()
        if above + own >= limit:
            cuts[h], left[h] = v, limit - above
            return
        above += own


@kernel
def candidates(
    votes: np.ndarray,
    counts: np.ndarray,
    limit: int,
    valid: int,
    cuts: np.ndarray,
    left: np.ndarray,
    out: np.ndarray,
) -> int:
    """As `ops.select.candidates`, of one group: ids ascending, int32 `out[N + 1]`; how many.

    votes: uint64 `[words, N]`; counts: int64 `[parts, g, 256]`; valid: address of flags, or 0;
    cuts, left: int64 `[g]`, room.
    """
    if limit == 0:
        return 0
    g, N, taken = len(cuts), votes.shape[1], 0
    for h in range(g):
        put_cut(counts[:, h], limit, h, cuts, left)
    for i in range(N):
        take = 0
        if valid == 0 or uint8_at(valid + i, 1)[0]:
            for h in range(g):
                own = np.int64(votes[h // HEADS, i] >> (np.uint64(h % HEADS) * EIGHT) & BYTE)
                tied = int(own == cuts[h]) & int(left[h] > 0)
                left[h] -= tied
                take |= int(own > cuts[h]) | tied
        out[taken] = i
        taken += take
    return taken
