"""Select rows after tiered votes have been computed (`coarse="tiered_votes"`).

Tiered votes are coarse scores of keys. The kernels here run the later stages of a search: they
select candidates by their votes, rerank them, and select rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import float32_at, keep, kernel, prefetch
from kvindex.cpu.kernels.decode import WORD
from kvindex.cpu.kernels.numbers import BFLOAT16, read
from kvindex.cpu.kernels.rerank import AHEAD, NEVER, agree, put_direction
from kvindex.cpu.kernels.select import position_of
from kvindex.cpu.kernels.tiered_votes import candidates
from kvindex.cpu.kernels.top import list_best
from kvindex.cpu.kernels.vectors import FLOAT, FOUR, chunk, element, four_dots, shuffle

PAIR, WIDE = (ir.VectorType(ir.IntType(bits), 2) for bits in (16, 32))
"""LLVM types of vectors of two weights, in 16 and in 32 bits each.

Two weights belong to 16 consecutive coordinates, since a subspace of 8 coordinates has one weight.
"""


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _scale(_: Any, weights: Any, chunks: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weights, chunks, out = arguments
        with cgutils.for_range(builder, chunks) as loop:
            two = builder.load(element(builder, weights, PAIR, loop.index), align=2)
            up = builder.shl(builder.zext(two, WIDE), ir.Constant(WIDE, [16, 16]))
            sizes = builder.bitcast(up, ir.VectorType(FLOAT, 2))
            both = shuffle(builder, sizes, sizes, [0] * 8 + [1] * 8)
            here = chunk(builder, out, loop.index)
            builder.store(builder.fmul(builder.load(here, align=4), both), here, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@kernel
def scale(weights: int, M: int, out: int) -> None:
    """Multiply each subspace (8 coordinates) of a decoded key by its weight, in place.

    Args:
        weights: Address of the weights, bfloat16 `[M]`.
        M: Number of subspaces.
        out: Address of the key, float32 `[M, 8]`.
    """
    if M == 8:  # a constant number of subspaces, so that LLVM unrolls the loop
        _scale(weights, 4, out)
        return
    _scale(weights, M // 2, out)
    if M % 2:
        size, last = np.empty(1, np.float32), float32_at(out + (M - 1) * 32, 8)
        read(weights + (M - 1) * 2, 1, BFLOAT16, size)
        for j in range(8):
            last[j] *= size[0]


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
    """Estimate the inner products of queries with candidates, for one KV head of one sequence.

    The codes of a candidate contain one weight for each subspace of 8 coordinates. This is the
    compiled version of `ops.rerank.estimate`.

    Args:
        ids: Token ids of the candidates, int32 `[C]`.
        signs: Address of the KV head's signs.
        magnitudes: Address of the KV head's magnitudes.
        weights: Address of the KV head's weights.
        bits: Number of bits of a magnitude.
        queries: Rotated queries, float32 `[g, D]`.
        levels: Quantized absolute values of a coordinate, float32 `[2^bits]`, padded to 16 or more.
        out: Result, estimated inner products, float32 `[g, C]`.
    """
    (g, D), C = queries.shape, len(ids)
    M, words = D // 8, -(-D // WORD)
    values, places = np.zeros((FOUR, words * WORD), np.float32), np.empty(FOUR, np.int64)
    dots, room = np.empty((g, FOUR), np.float32), np.zeros(8 * (1 + bits), np.uint8)
    asked, table, to = queries.ctypes.data, levels.ctypes.data, dots.ctypes.data
    rows, spare = places.ctypes.data, room.ctypes.data
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
            plane = magnitudes + own * M * bits
            put_direction(signs + own * M, plane, bits, M, table, spare, places[i])
            scale(weights + own * M * 2, M, places[i])
        for h in range(g):
            four_dots(asked + h * D * 4, rows, D, to + h * FOUR * 4)
        for i in range(count):
            for h in range(g):
                out[h, c + i] = dots[h, i]
    keep(values, places, dots, room)


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
    sums: np.ndarray,
    agreed: np.ndarray,
    entries: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    found: np.ndarray,
) -> None:
    """Select the best `k` rows of each group, given the coarse scores (votes) of all keys.

    A group is one KV head of one sequence. Each thread processes some of the groups. `most` is the
    largest number of candidates of a group.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        votes: Votes of all keys, from `tiered_votes.vote`.
        counts: Number of keys with each vote, from `tiered_votes.vote`.
        limits: Number of candidates of each query head, int64 `[B·G]`.
        signs: Addresses of signs, int64 `[B·G]`.
        magnitudes: Addresses of magnitudes, int64 `[B·G]`.
        weights: Addresses of weights, int64 `[B·G]`.
        valid: Addresses of the masks of valid keys, int64 `[B·G]`; 0 if all keys are valid.
        bits: Number of bits of a magnitude.
        queries: Rotated queries, float32 `[B·G, g, D]`.
        levels: Quantized absolute values of a coordinate, float32 `[2^bits]`, padded to 16 or more.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        by_largest: True for "max_share", False for "mean_share".
        chosen: Buffer, int32 `[parts, N + 1]`.
        estimates: Buffer, float32 `[parts, g, most]`.
        sums: Buffer, float32 `[parts, most]`.
        agreed: Buffer, float32 `[parts, most]`.
        entries: Buffer, int64 `[parts, most]`.
        ids: Result, token ids of the rows, best first, padded with -1, int64 `[B·G, k]`.
        scores: Result, scores of the rows, float32 `[B·G, k]`.
        found: Result, number of selected rows, int32 `[B·G]`.
    """
    (groups, k), g = ids.shape, queries.shape[1]
    cuts, left = np.empty(g, np.int64), np.empty(g, np.int64)
    for p in range(groups * part // parts, groups * (part + 1) // parts):
        tally = counts[:, p]
        C = candidates(votes[p], tally, limits[p], valid[p], cuts, left, chosen[part])
        own, some, at = chosen[part, :C], agreed[part, :C], entries[part, :C]
        each = estimates[part, :, :C]
        estimate(own, signs[p], magnitudes[p], weights[p], bits, queries[p], levels, each)
        agree(each, scale, softcap, by_largest, sums[part, :C], some)
        found[p] = min(k, C)
        if C:
            list_best(some, found[p], at)
        for i in range(k):
            row = position_of(at[i]) if i < found[p] else 0
            ids[p, i] = own[row] if i < found[p] else -1
            scores[p, i] = some[row] if i < found[p] else NEVER
