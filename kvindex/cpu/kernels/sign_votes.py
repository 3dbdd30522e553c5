"""Compute the votes of up to 256 keys or, with sampling, upper bounds of their priorities.

A priority is a key's size plus random noise. Its upper bound is the size plus an upper bound of the
noise (`noise.bound_of`), which is faster to compute. The exact noise is computed later, only for
the few keys whose bound reaches the threshold.
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
"""Vote of a padded token."""

BYTE = np.uint64(8)
ONE, TWO, THREE, FOUR, FIVE = (np.uint64(n) for n in range(1, 6))


@inlined
def put_words(signs: int, count: int, M: int, out: np.ndarray) -> None:
    """Convert the sign bytes of keys, `[count, M]`, to 64-bit words, uint64 `[W, count]`.

    `signs` is the address of the bytes. Each key's bytes are padded with zeros to whole words.
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
    """Compute the inner products of keys' signs (±1) with a rounded query, from bit planes.

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
    """Compute the maximum of each key's votes over the query heads and of `out`, in place.

    Votes are computed with bit planes of the queries, `planes`, uint64 `[g, P, W]`. `dots` is a
    buffer, int32 `[n]`. All other arguments are those of `lookup.raise_votes`, which uses tables
    instead. Here the number of keys `n` does not need to be a multiple of 64.
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
    """Compute the maximum of each key's sizes over the query heads and of `out`, in place.

    A size estimates the logarithm of a key's attention weight. Sizes are computed with bit planes
    of the queries, `planes`, uint64 `[g, P, W]`. `dots` is a buffer, int32 `[n]`. All other
    arguments are those of `lookup.raise_sizes`, which uses tables instead. Here the number of keys
    `n` does not need to be a multiple of 64.
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
    """Compute the votes of `n` keys into `out`, int32 `[n]`, where `n` is at most `CHUNK`.

    `words` are the signs of the keys (`put_words`), and `factors` are the integers that multiply
    their votes, int32 `[CHUNK]`. All other arguments are those of `scan.scan_block`.
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
    """Compute upper bounds of the priorities of `n` keys into `out`, int32 `[n]`.

    `n` is at most `CHUNK`. `words` are the signs of the keys (`put_words`), and `factors` are the
    integers that multiply their votes, int32 `[CHUNK]`. All other arguments are those of
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
