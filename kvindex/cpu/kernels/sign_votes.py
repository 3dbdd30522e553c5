"""Compute the votes of a chunk of a block's keys, or upper bounds of their priorities.

Sampling needs the bounds: a key's size plus an upper bound of its noise (`noise.bound_of`). The
exact noise is computed later, only for the few keys whose bound reaches the threshold.
"""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined, kernel, popcount, uint8_at, uint64_at
from kvindex.cpu.kernels.lookup import raise_sizes, raise_votes
from kvindex.cpu.kernels.noise import LARGEST, add_bounds
from kvindex.cpu.kernels.query import GROUP

CHUNK = 256
"""Keys that are processed at a time, so that intermediate results stay in the L1 cache."""

INVALID = np.int32(np.iinfo(np.int32).min)
"""Vote of a padded token."""

BYTE = np.uint64(8)
ONE, TWO, THREE, FOUR, FIVE = (np.uint64(n) for n in range(1, 6))


@inlined
def put_words(signs: int, count: int, M: int, out: np.ndarray) -> None:
    """Convert sign bytes of keys `[count, M]` to words uint64 `out[:, :count]`, zero-padded."""
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
    """Compute inner products of signs with a rounded query: `2 · (sum where signs are 1) - total`.

    `words` are uint64 `[W, CHUNK]`, `planes` of the query uint64 `[P, W]`, `out` is int32 `[n]`.
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
    """Raise `out` to the largest votes as `lookup.raise_votes`, with bit planes and for any `n`.

    `planes` are uint64 `[g, P, W]`; `dots` is a buffer, int32 `[n]`.
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
    """Raise `out` to the largest sizes as `lookup.raise_sizes`, with bit planes and for any `n`.

    `planes` are uint64 `[g, P, W]`; `dots` is a buffer, int32 `[n]`.
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
    """Compute votes int32 `out[n]` of up to `CHUNK` keys; `some` is a buffer, int32 `[CHUNK]`."""
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
    """Compute upper bounds of priorities, int32 `out[n]`, of up to `CHUNK` keys.

    `number` is `noise.number_of` the first key; `some` int32 and `sizes` float32 `[CHUNK]` are
    buffers.
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
