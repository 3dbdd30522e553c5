"""Find candidates by tiered votes: give points to centroids, add them up, take the best keys.

The points for up to eight query heads are the bytes of one word, so one look-up serves them all.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, uint8_at, uint64_at
from kvindex.cpu.kernels.query import rotate

HEADS = 8
"""Query heads whose points are in one word."""

CENTROIDS = 256

POINTS = 256
"""Upper bound of a key's points: 6 in each subspace."""

CHUNK = 1024
"""Keys that are processed at a time."""

VALID, TAKEN = np.uint8(2), np.uint8(3)
"""Flags of keys: valid, and both valid and taken."""

BYTE, EIGHT = np.uint64(255), np.uint64(8)


@kernel
def merge_flipped(
    losses: np.ndarray,
    ids: np.ndarray,
    count: int,
    j: int,
    loss: float,
    merged: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """Merge two sorted lists: `count` centroids, and the same centroids with bit `j` flipped.

    The result is sorted by ascending loss, and equal losses by the lower id. The loss of a centroid
    is the best centroid's inner product with the query minus its own. The merge runs from both ends
    at the same time, so that the CPU can overlap the two chains of dependent instructions.

    Args:
        losses: Losses of the centroids, float64 `[256]`, ascending.
        ids: Ids of the centroids, int64 `[256]`.
        count: Number of centroids.
        j: Bit that is flipped.
        loss: By how much flipping the bit increases a loss.
        merged: Result, losses of twice as many centroids.
        numbers: Result, ids of twice as many centroids.
    """
    x = y = 0
    u = v = count - 1
    for i in range(count):
        own, other, number, flipped = losses[x], losses[y] + loss, ids[x], ids[y] ^ (1 << j)
        plain = (own < other) | ((own == other) & (number < flipped))
        merged[i] = own if plain else other
        numbers[i] = number if plain else flipped
        x += int(plain)
        y += 1 - int(plain)
        own, other, number, flipped = losses[u], losses[v] + loss, ids[u], ids[v] ^ (1 << j)
        plain = (own > other) | ((own == other) & (number > flipped))
        merged[2 * count - 1 - i] = own if plain else other
        numbers[2 * count - 1 - i] = number if plain else flipped
        u -= int(plain)
        v -= 1 - int(plain)


@kernel
def put_order(part: np.ndarray, losses: np.ndarray, ids: np.ndarray) -> None:
    """Sort the centroids by their inner product with a query's subspace float32 `[8]`, best first.

    The result is `ids[0]` of int64 `[2, 256]`; `losses` float64 `[2, 256]` is a buffer.
    """
    best = 0
    for j in range(len(part)):
        best |= int(part[j] > 0) << j
    losses[0, 0], ids[0, 0] = 0.0, best
    for j in range(len(part)):
        loss, of, to = abs(np.float64(part[j])), j % 2, 1 - j % 2
        merge_flipped(losses[of], ids[of], 1 << j, j, loss, losses[to], ids[to])


@kernel
def put_points(
    ids: np.ndarray, histogram: np.ndarray, limits: np.ndarray, up: Number, table: np.ndarray
) -> None:
    """Write the points of centroids int64 `[256]`, best first, into a byte of `table[256]`.

    `histogram` is the number of keys per centroid, int64 `[256]`. `limits` are the bounds of the
    tiers, int64 `[tiers]`, ascending. `up` is the position of the byte's lowest bit in the uint64
    entries of the table.
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
    """Rotate queries, and compute their tables of points (`ops.coarse.tier_table`).

    Args:
        queries: Float32 `[P, g, D]`.
        rotation: Float32 `[D, D]`.
        histogram: Keys per centroid, int64 `[P, M, 256]`.
        limits: Bounds of the tiers, int64 `[P, tiers]`.
        rotated: Result, queries with norms, float32 `[P, g, D]`.
        tables: Result, points, uint64 `[P, words, M, 256]`.
    """
    groups, g, D = queries.shape
    losses = np.empty((2, CENTROIDS), np.float64)
    ids = np.empty((2, CENTROIDS), np.int64)
    tables[:] = 0
    for p in range(groups):
        for h in range(g):
            one, up = rotated[p, h], np.uint64(h % HEADS) * EIGHT
            norm = rotate(queries[p, h], rotation, one)
            for b in range(D // 8):
                put_order(one[b * 8 : b * 8 + 8], losses, ids)
                put_points(ids[0], histogram[p, b], limits[p], up, tables[p, h // HEADS, b])
            for i in range(D):
                one[i] *= np.float32(norm)


@kernel
def look_up(signs: int, M: int, table: np.ndarray, out: np.ndarray) -> None:
    """Add up the points of keys into uint64 `out[n]`.

    `table` is uint64 `[M, 256]`. The keys' signs, uint8 `[n, M]`, are passed by address.
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
    """Compute votes of a part of all groups' keys (`ops.coarse.votes`), and count the keys by vote.

    Args:
        part: Index of the part that this call processes, below `parts`.
        parts: Number of parts into which the work is divided, one per thread.
        signs: Addresses, int64 `[P]`.
        valid: Addresses of flags, int64 `[P]`, or 0.
        heads: Number of query heads.
        tables: Result of `prepare`.
        votes: Result, uint64 `[P, words, N]`.
        counts: Result, number of valid keys by vote, int64 `[parts, P, g, 256]`.
    """
    (groups, words, N), M = votes.shape, tables.shape[2]
    chunks = -(-N // CHUNK)
    total, own = groups * chunks, counts[part]
    own[:] = 0
    for unit in range(total * part // parts, total * (part + 1) // parts):
        p, start = unit // chunks, unit % chunks * CHUNK
        n = min(CHUNK, N - start)
        for w in range(words):
            look_up(signs[p] + start * M, M, tables[p, w], votes[p, w, start : start + n])
        for h in range(heads):
            some, up = votes[p, h // HEADS, start : start + n], np.uint64(h % HEADS) * EIGHT
            count(some, up, valid[p] + start if valid[p] else 0, own[p, h])


@kernel
def count(votes: np.ndarray, up: Number, valid: int, counts: np.ndarray) -> None:
    """Count valid keys by one byte of their votes uint64 `[n]`, in int64 `counts[256]`."""
    if not valid:
        for i in range(len(votes)):
            counts[votes[i] >> up & BYTE] += 1
        return
    flags = uint8_at(valid, len(votes))
    for i in range(len(votes)):
        counts[votes[i] >> up & BYTE] += np.int64(flags[i])


@kernel
def put_cut(counts: np.ndarray, limit: int, h: int, cuts: np.ndarray, left: np.ndarray) -> None:
    """Find the lowest vote of the best `limit` keys, and how many of these keys have it.

    The vote is written to `cuts[h]`, and the number of keys to `left[h]`. `counts` contains the
    number of keys with each vote, for all parts, int64 `[parts, 256]`.
    """
    above = 0
    for v in range(POINTS - 1, -1, -1):
        own = counts[:, v].sum()
        if above + own >= limit:
            cuts[h], left[h] = v, limit - above
            return
        above += own


@kernel
def flag_best(votes: np.ndarray, up: Number, cut: int, flags: np.ndarray) -> Number:
    """Set the flags of votes above a cut, and return how many valid votes are at the cut.

    The function compares one byte of each vote, uint64 `[n]`. In flags, uint8 `[n]`, it sets bit 0;
    bit 1 marks valid keys.
    """
    ties, least = np.int64(0), np.uint64(cut)
    for i in range(len(votes)):
        own = votes[i] >> up & BYTE
        flags[i] |= np.uint8(own > least)
        ties += np.int64(own == least) & np.int64(flags[i] >> 1)
    return ties


@kernel
def flag_ties(votes: np.ndarray, up: Number, cut: int, most: int, flags: np.ndarray) -> None:
    """Set the flags of the first `most` valid votes at the cut; see `flag_best`."""
    taken, least = 0, np.uint64(cut)
    if most >= len(votes):
        for i in range(len(votes)):
            flags[i] |= np.uint8(votes[i] >> up & BYTE == least)
        return
    for i in range(len(votes)):
        tied = int(votes[i] >> up & BYTE == least) & int(flags[i] >> 1)
        tied &= int(taken < most)
        flags[i] |= np.uint8(tied)
        taken += tied


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
    """Compiled version of `ops.select.candidates` for one group; returns the number of candidates.

    Args:
        votes: Uint64 `[words, N]`.
        counts: Int64 `[parts, g, 256]`.
        limit: Number of candidates of a head.
        valid: Address of flags, or 0.
        cuts: Buffer, int64 `[g]`.
        left: Buffer, int64 `[g]`.
        out: Result, ids, ascending, int32 `[N + 1]`.
    """
    N, count, room = votes.shape[1], 0, np.empty(CHUNK, np.uint8)
    for h in range(len(cuts)):
        put_cut(counts[:, h], limit, h, cuts, left)
    for start in range(0, N if limit else 0, CHUNK):
        flags = room[: min(CHUNK, N - start)]
        flags[:] = VALID
        if valid:
            real = uint8_at(valid + start, len(flags))
            for i in range(len(flags)):
                flags[i] = real[i] << 1
        for h in range(len(cuts)):
            own, up = votes[h // HEADS, start : start + len(flags)], np.uint64(h % HEADS) * EIGHT
            ties = flag_best(own, up, cuts[h], flags)
            if ties and left[h]:
                most = len(own) if ties <= left[h] else left[h]
                flag_ties(own, up, cuts[h], most, flags)
            left[h] -= min(ties, left[h])
        for i in range(len(flags)):
            out[count] = start + i
            count += int(flags[i] == TAKEN)
    return count
