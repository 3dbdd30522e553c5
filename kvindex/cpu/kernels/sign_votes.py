"""Compute the votes (coarse scores) of up to 256 keys.

If rows are sampled, upper bounds of the keys' priorities are computed instead. The priority of a
key is its estimated log weight plus random noise. Its upper bound is the estimated log weight plus
an upper bound of the noise (`noise.bound_of`), which is faster to compute. The exact noise is
computed later, only for the few keys whose bound reaches the threshold.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined, kernel, popcount, uint8_at, uint64_at
from kvindex.cpu.kernels.lookup import raise_sizes, raise_votes
from kvindex.cpu.kernels.noise import LARGEST, add_bounds
from kvindex.cpu.kernels.query import GROUP

CHUNK = 256
"""Number of keys that are processed at a time; their intermediate results fit in the L1 cache."""

INVALID = np.int32(np.iinfo(np.int32).min)
"""Vote (coarse score) of a padded token, which is lower than all other votes."""

BYTE = np.uint64(8)
ONE, TWO, THREE, FOUR, FIVE = (np.uint64(n) for n in range(1, 6))


@inlined
def put_words(signs: int, count: int, M: int, out: np.ndarray) -> None:
    """Pack the sign bits of keys, uint8 `[count, M]`, into 64-bit words, uint64 `[W, count]`.

    `signs` is the address of the bytes. The `M` bytes of each key are padded with zeros to `W`
    words.
    """
    if M % 8 == 0:
        W = M // 8
        words = uint64_at(signs, count * W)
        for w in range(W):
            for i in range(count):
                out[w, i] = words[i * W + w]
        return
    some = uint8_at(signs, count * M)
    for w in range(len(out)):
        for i in range(count):
            word = np.uint64(0)
            for b in range(w * 8, min(w * 8 + 8, M)):
                word |= np.uint64(some[i * M + b]) << (BYTE * np.uint64(b - w * 8))
            out[w, i] = word


@kernel
def put_dots(words: np.ndarray, planes: np.ndarray, total: int, out: np.ndarray) -> None:
    """Compute the inner products of the signs of keys (±1) with a query, from its bit planes.

    The inner product is twice the sum of the coordinates whose sign bit is 1, minus the sum of all
    coordinates.

    Args:
        words: Sign bits of the keys, uint64 `[W, CHUNK]`.
        planes: Bit planes of the query (`query.put_planes`), uint64 `[P, W]`.
        total: Sum of the query's coordinates.
        out: Result, int32 `[n]`.
    """
    for i in range(len(out)):
        out[i] = -total
    for w in range(len(words)):
        own = words[w]
        for p in range(0, len(planes), GROUP):
            a, b, c = planes[p, w], planes[p + 1, w], planes[p + 2, w]
            d, e, f = planes[p + 3, w], planes[p + 4, w], planes[p + 5, w]
            up = np.uint64(p + 1)
            for i in range(len(out)):
                word = own[i]
                sum_of = popcount(word & a) + (popcount(word & b) << ONE)
                sum_of += (popcount(word & c) << TWO) + (popcount(word & d) << THREE)
                sum_of += popcount(word & e) << FOUR
                out[i] += np.int32((sum_of - (popcount(word & f) << FIVE)) << up)


@inlined
def raise_by_planes(
    words: np.ndarray,
    planes: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    dots: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute the largest vote (coarse score) of each key over all query heads.

    `out[i]` becomes the largest of its old value and the votes of key `i` for the query heads. The
    function does the same as `lookup.raise_votes`, but with bit planes of the queries instead of
    look-up tables. The number of keys `n` does not need to be a multiple of 64.

    Args:
        words: As for `lookup.raise_votes`.
        planes: Bit planes of the queries (`query.put_planes`), uint64 `[g, P, W]`.
        totals: Sum of the coordinates of each query, int32 `[g]`.
        factors: As for `lookup.raise_votes`.
        offsets: As for `lookup.raise_votes`.
        dots: Buffer, int32 `[n]`.
        out: As for `lookup.raise_votes`.
    """
    for h in range(len(planes)):
        put_dots(words, planes[h], totals[h], dots)
        for i in range(len(out)):
            out[i] = max(out[i], np.int32(dots[i] * factors[i] + offsets[h]))


@inlined
def raise_sizes_by_planes(
    words: np.ndarray,
    planes: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    scales: np.ndarray,
    dots: np.ndarray,
    out: np.ndarray,
) -> None:
    """Estimate the log attention weights of keys, and compute the maximum over the query heads.

    `out[i]`, float32, becomes the maximum of `out[i]` and the estimates for key `i` and all query
    heads. The function does the same as `lookup.raise_sizes`, but with bit planes of the queries
    instead of look-up tables. The number of keys `n` does not need to be a multiple of 64. `scales`
    is an argument of `lookup.raise_sizes`, and all other arguments are those of `raise_by_planes`.
    """
    for h in range(len(planes)):
        put_dots(words, planes[h], totals[h], dots)
        gain, total = np.float64(scales[h, 0]), np.float64(scales[h, 1])
        for i in range(len(out)):
            vote = np.float32(np.int32(dots[i] * factors[i] + offsets[h]))
            size = np.float32(np.float64(vote) * gain + total)
            out[i] = size if size > out[i] else out[i]


@inlined
def put_votes(
    words: np.ndarray,
    planes: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    nibbles: np.ndarray,
    dots: np.ndarray,
    some: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute the votes (coarse scores) of `n` keys, where `n` is at most `CHUNK`.

    The votes are written to `out`, int32 `[n]`. `words` are the sign bits of the keys
    (`put_words`), and `factors` are the integers by which their votes are multiplied, int32
    `[CHUNK]`. All other arguments are those of `scan.scan_block`.
    """
    n = len(out)
    some[:] = INVALID
    if tables.shape[1]:
        raise_votes(words, tables, totals, factors, offsets, nibbles, some)
    else:
        raise_by_planes(words, planes, totals, factors, offsets, dots[:n], some[:n])
    for i in range(n):
        out[i] = some[i]


@inlined
def put_bounds(
    words: np.ndarray,
    planes: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    scales: np.ndarray,
    number: Number,
    nibbles: np.ndarray,
    dots: np.ndarray,
    some: np.ndarray,
    sizes: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute upper bounds of the priorities of up to `CHUNK` keys, for a search that samples rows.

    The priority of a key is its estimated log weight plus random noise. The bounds are written to
    `out`, int32 `[n]`. `words` are the sign bits of the keys (`put_words`), and `factors` are the
    integers by which their votes are multiplied, int32 `[CHUNK]`. All other arguments are those of
    `scan.scan_block`.
    """
    n = len(out)
    sizes[:] = -LARGEST
    if tables.shape[1]:
        raise_sizes(words, tables, totals, factors, offsets, scales, nibbles, sizes)
    else:
        raise_sizes_by_planes(words, planes, totals, factors, offsets, scales, dots[:n], sizes[:n])
    add_bounds(sizes, number, some)
    for i in range(n):
        out[i] = some[i]
