"""Rows by tiers: the stages after the votes, of one group after the other."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel, prefetch
from kvindex.cpu.kernels.decode import WORD
from kvindex.cpu.kernels.numbers import BFLOAT16, read
from kvindex.cpu.kernels.rerank import AHEAD, NEVER, agree, put_direction
from kvindex.cpu.kernels.select import position_of
from kvindex.cpu.kernels.tiers import candidates
from kvindex.cpu.kernels.top import list_best
from kvindex.cpu.kernels.vectors import FOUR, four_dots


@kernel
def put_key(
    signs: int,
    magnitudes: int,
    weights: int,
    bits: int,
    levels: int,
    room: np.ndarray,
    sizes: np.ndarray,
    out: np.ndarray,
) -> None:
    """A key from its codes at addresses: float32 `[8 · M]`, zeros or more behind it.

    weights: bfloat16 `[M]`; room: uint8, as of `put_direction`; sizes: float32 `[M]`, room.
    """
    M = len(sizes)
    put_direction(signs, magnitudes, bits, M, levels, room.ctypes.data, out.ctypes.data)
    read(weights, M, BFLOAT16, sizes)
    for b in range(M):
        size = sizes[b]
        for j in range(b * 8, b * 8 + 8):
            out[j] *= size


@kernel
def estimate(
    ids: np.ndarray,
    signs: int,
    magnitudes: int,
    weights: int,
    bits: int,
    queries: np.ndarray,
    levels: np.ndarray,
    out: np.ndarray,
) -> None:
    """As `ops.rerank.estimate`, with a weight for each subspace; out: float32 `[g, C]`.

    ids: int32 `[C]`; signs, magnitudes, weights: addresses; queries: rotated, float32 `[g, D]`;
    levels: float32 `[2^bits]`, `[16]` at least.
    """
    (g, D), C = queries.shape, len(ids)
    M, words = D // 8, -(-D // WORD)
    values, sizes = np.zeros((FOUR, words * WORD), np.float32), np.empty(M, np.float32)
    dots, room = np.empty((g, FOUR), np.float32), np.zeros(8 * (1 + bits), np.uint8)
    places, table = np.empty(FOUR, np.int64), levels.ctypes.data
    for i in range(FOUR):
        places[i] = values[i].ctypes.data
    for c in range(0, C, FOUR):
        for i in range(min(c + AHEAD, C), min(c + AHEAD + FOUR, C)):
            later = np.int64(ids[i])
            prefetch(signs + later * M)
            prefetch(magnitudes + later * M * bits)
            prefetch(magnitudes + (later + 1) * M * bits - 1)
            prefetch(weights + later * M * 2)
        count = min(FOUR, C - c)
        for i in range(count):
            own = np.int64(ids[c + i])
            lie = signs + own * M, magnitudes + own * M * bits, weights + own * M * 2
            put_key(*lie, bits, table, room, sizes, values[i])
        for h in range(g):
            to = dots[h].ctypes.data
            four_dots(queries[h].ctypes.data, places.ctypes.data, D, to)
            for i in range(count):
                out[h, c + i] = dots[h, i]


@kernel
def find_rows(
    part: int,
    parts: int,
    votes: np.ndarray,
    counts: np.ndarray,
    limits: np.ndarray,
    signs: np.ndarray,
    magnitudes: np.ndarray,
    weights: np.ndarray,
    valid: np.ndarray,
    bits: int,
    queries: np.ndarray,
    levels: np.ndarray,
    scale: float,
    softcap: float,
    by_largest: bool,
    chosen: np.ndarray,
    estimates: np.ndarray,
    shares: np.ndarray,
    agreed: np.ndarray,
    entries: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    found: np.ndarray,
) -> None:
    """The best `k` rows of a part of the groups: `select`, `rerank`, `group`, `select`.

    votes, counts: of `tiers.vote`; limits: candidates of a head, int64 `[P]`; chosen int32 `[parts,
    N + 1]`, estimates float32 `[parts, g, most]`, shares, agreed float32, entries int64 `[parts,
    most]`: room. Writes ids int64 `[P, k]`, best first, then -1, scores float32 `[P, k]` and how
    many there are, found int32 `[P]`.
    """
    (groups, k), g = ids.shape, queries.shape[1]
    cuts, left = np.empty(g, np.int64), np.empty(g, np.int64)
    for p in range(groups * part // parts, groups * (part + 1) // parts):
        tally = counts[:, p]
        C = candidates(votes[p], tally, limits[p], valid[p], cuts, left, chosen[part])
        own, some, at = chosen[part, :C], agreed[part, :C], entries[part, :C]
        each = estimates[part, :, :C]
        estimate(own, signs[p], magnitudes[p], weights[p], bits, queries[p], levels, each)
        agree(each, scale, softcap, by_largest, shares[part, :C], some)
        found[p] = min(k, C)
        if C:
            list_best(some, found[p], at)
        for i in range(k):
            row = position_of(at[i]) if i < found[p] else 0
            ids[p, i] = own[row] if i < found[p] else -1
            scores[p, i] = some[row] if i < found[p] else NEVER
