"""Find candidates by tiered votes, which are coarse scores of keys (`coarse="tiered_votes"`).

In each subspace of 8 coordinates, a key belongs to one of 256 centroids. The centroids that are
closest to the query get a score, which is a small integer. The vote of a key is the sum of the
scores of its centroids, and the keys with the largest votes become candidates. The scores for up to
eight query heads are the bytes of one 64-bit word, so that one look-up serves all heads.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, uint8_at, uint64_at
from kvindex.cpu.kernels.query import rotate

HEADS = 8
"""Number of query heads whose scores are in one 64-bit word."""

CENTROIDS = 256

POINTS = 256
"""Number of possible votes (coarse scores) of a key, from 0 to 255. A subspace adds at most 6."""

CHUNK = 1024
"""Number of keys that are processed at a time."""

VALID, TAKEN = np.uint8(2), np.uint8(3)
"""Flags of a key that is valid, and of a key that is valid and a candidate."""

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
    """Double a sorted list of centroids: add each centroid again, with bit `j` of its id flipped.

    The two lists, without and with the flipped bit, are merged into one sorted list. The bits of a
    centroid's id are the signs of its coordinates. The loss of a centroid is how much
    smaller its inner product with the query is than that of the best centroid. Lists are sorted by
    ascending loss, and centroids with equal losses by id. The merge runs from both ends at the same
    time, so that the CPU can overlap two chains of dependent instructions.

    Args:
        losses: Losses of the centroids, float64 `[256]`, ascending.
        ids: Ids of the centroids, int64 `[256]`.
        count: Number of centroids in the list.
        j: Number of the bit that is flipped.
        loss: Increase of a centroid's loss if the bit is flipped.
        merged: Result, losses of `2 * count` centroids.
        numbers: Result, ids of `2 * count` centroids.
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
    """Sort the centroids of a subspace by their inner products with the query, largest first.

    Args:
        part: Coordinates of the query in the subspace, float32 `[8]`.
        losses: Buffer, float64 `[2, 256]`.
        ids: Result, ids of the centroids in `ids[0]`; int64 `[2, 256]`, where `ids[1]` is a buffer.
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
    """Write the scores (points) of the 256 centroids of a subspace, for one query head.

    Tier `t` ends at `limits[t]` keys. The score of a centroid is the number of tiers `t` for which
    fewer than `limits[t]` keys belong to better centroids.

    Args:
        ids: Centroids, best first, int64 `[256]`.
        histogram: Number of keys per centroid, int64 `[256]`.
        limits: Number of keys at which each tier ends, ascending, int64 `[tiers]`.
        up: Position of the lowest bit of the head's byte in the words of `table`.
        table: Result, uint64 `[256]`, one word per centroid, with one byte for each query head.
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
    """Rotate the queries, and compute the score of each centroid in each subspace.

    The scores depend on the query head. Keys get the scores of their centroids (`vote`). This is
    the compiled version of `ops.coarse.tier_table`.

    Args:
        queries: Float32 `[B·G, g, D]`.
        rotation: Rotation matrix, float32 `[D, D]`.
        histogram: Number of keys per centroid, int64 `[B·G, M, 256]`.
        limits: Number of keys at which each tier ends, int64 `[B·G, tiers]`.
        rotated: Result, rotated queries, not normalized, float32 `[B·G, g, D]`.
        tables: Result, scores of the centroids, uint64 `[B·G, words, M, 256]`. A word contains the
            scores for up to eight query heads, one byte each.
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
    """Compute the coarse scores (votes) of `n` keys, for up to eight query heads at a time.

    The vote of a key is the sum of the scores of its centroids over all subspaces.

    Args:
        signs: Address of the keys' signs, uint8 `[n, M]`. A byte is the id of the centroid to which
            the key belongs in a subspace.
        M: Number of subspaces.
        table: Scores of the centroids, one byte for each query head, uint64 `[M, 256]`.
        out: Result, votes, one byte for each query head, uint64 `[n]`.
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
    """Compute the coarse scores (votes) of all keys, and a histogram of the votes.

    A group is one KV head of one sequence. Each thread processes some of the keys of all groups.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        signs: Addresses of signs, int64 `[B·G]`.
        valid: Addresses of the masks of valid keys, int64 `[B·G]`; 0 if all keys are valid.
        heads: Number of query heads of a group.
        tables: Scores of the centroids, from `prepare`.
        votes: Result, votes, one byte for each query head, uint64 `[B·G, words, N]`.
        counts: Result, number of valid keys with each vote from 0 to 255, counted separately by
            each thread, int64 `[parts, B·G, g, 256]`.
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
    """Count how many valid keys have each vote (coarse score) from 0 to 255, for one query head.

    Args:
        votes: Votes, one byte for each query head, uint64 `[n]`.
        up: Position of the lowest bit of the head's byte.
        valid: Address of the mask of valid keys; 0 if all keys are valid.
        counts: Number of keys with each vote, int64 `[256]`, increased in place.
    """
    if not valid:
        for i in range(len(votes)):
            counts[votes[i] >> up & BYTE] += 1
        return
    flags = uint8_at(valid, len(votes))
    for i in range(len(votes)):
        counts[votes[i] >> up & BYTE] += np.int64(flags[i])


@kernel
def put_cut(counts: np.ndarray, limit: int, h: int, cuts: np.ndarray, left: np.ndarray) -> None:
    """Find the threshold of a query head: the lowest coarse score (vote) of its `limit` best keys.

    There may be more keys with exactly this vote than can become candidates. So the function also
    computes how many of them become candidates.

    Args:
        counts: Number of keys with each vote from 0 to 255, as counted by each thread, int64
            `[parts, 256]`.
        limit: Number of candidates of a query head.
        h: Number of the query head.
        cuts: Result. The threshold is written to `cuts[h]`.
        left: Result. The number of candidates whose vote equals the threshold is written to
            `left[h]`.
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
    """Flag the keys whose coarse score (vote) exceeds the threshold `cut`, for one query head.

    Args:
        votes: Votes, one byte for each query head, uint64 `[n]`.
        up: Position of the lowest bit of the head's byte.
        cut: Lowest vote of a candidate.
        flags: Uint8 `[n]`. Bit 1 is set for valid keys. This function sets bit 0 of the flagged
            keys.

    Returns:
        Number of valid keys whose vote equals the threshold.
    """
    ties, least = np.int64(0), np.uint64(cut)
    for i in range(len(votes)):
        own = votes[i] >> up & BYTE
        flags[i] |= np.uint8(own > least)
        ties += np.int64(own == least) & np.int64(flags[i] >> 1)
    return ties


@kernel
def flag_ties(votes: np.ndarray, up: Number, cut: int, most: int, flags: np.ndarray) -> None:
    """Flag the first `most` valid keys whose vote for a query head equals the threshold `cut`.

    A vote is a coarse score. All other arguments are those of `flag_best`.
    """
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
    """Select the candidates of one KV head: the union of the best keys of its query heads.

    The best keys of a query head are those with the largest coarse scores (votes). This is the
    compiled version of `ops.select.candidates`.

    Args:
        votes: Votes, one byte for each query head, uint64 `[words, N]`.
        counts: Number of keys with each vote, as counted by each thread, int64 `[parts, g, 256]`.
        limit: Number of candidates of each query head.
        valid: Address of the mask of valid keys; 0 if all keys are valid.
        cuts: Buffer, int64 `[g]`.
        left: Buffer, int64 `[g]`.
        out: Result, token ids of the candidates of any query head, ascending, int32 `[N + 1]`.

    Returns:
        Number of candidates.
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
