"""Scan: every key's vote from its signs, the upper byte of its weight and its block's center."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined, kernel, popcount, uint8_at, uint64_at
from kvindex.cpu.kernels.lookup import raise_votes
from kvindex.cpu.kernels.numbers import BFLOAT16, read
from kvindex.cpu.kernels.query import GROUP
from kvindex.cpu.kernels.vectors import FOUR as ROWS
from kvindex.cpu.kernels.vectors import four_dots

PIECE = 256
"""Keys at a time: what is made of them stays in the first cache."""

INVALID = np.int32(np.iinfo(np.int32).min)
"""The vote of a token that no search finds."""

MOST = 2.0**30

BYTE = np.uint64(8)
ONE, TWO, THREE, FOUR, FIVE = (np.uint64(n) for n in range(1, 6))


@inlined
def put_words(signs: int, count: int, M: int, out: np.ndarray) -> None:
    """Sign bytes of keys `[count, M]` as words: uint64 `out[:, :count]`, zeros after the last."""
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
    """Inner products of signs with a rounded query: `2 · (sum where they are 1) - total`.

    words: uint64 `[W, PIECE]`; planes: of the query, uint64 `[P, W]`; out: int32 `[n]`.
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
def multiply_center(
    center: int, queries: int, g: int, D: int, room: np.ndarray, places: np.ndarray, out: np.ndarray
) -> None:
    """Inner products of queries with a center, bfloat16 `[D]` at an address.

    queries: an address of float32 `[g, D]`; room: float32 `[D + 4]`; places: int64 `[4]`, room;
    out: float32 `[g]`.
    """
    read(center, D, BFLOAT16, room)
    own, dots = room.ctypes.data, room[D:]
    for first in range(0, g, ROWS):
        for i in range(ROWS):
            places[i] = queries + min(first + i, g - 1) * D * 4
        four_dots(own, places.ctypes.data, D, own + D * 4)
        for h in range(first, min(first + ROWS, g)):
            out[h] = dots[h - first]


@kernel
def offset_of(product: float, unit: float) -> Number:
    """As `ops.coarse.dot_offsets`, of one product and what a vote stands for."""
    if not unit > 0:
        return np.int32(0)
    return np.int32(min(max(np.rint(np.float64(product) / unit), -MOST), MOST))


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
    """As `lookup.raise_votes`, of planes uint64 `[g, P, W]` and any n; dots: int32 `[n]`, room."""
    for h in range(len(planes)):
        put_dots(words, planes[h], totals[h], dots)
        for i in range(len(out)):
            out[i] = max(out[i], np.int32(dots[i] * factors[i] + offsets[h]))


@inlined
def scan_block(
    signs: int,
    weights: int,
    valid: int,
    count: int,
    M: int,
    planes: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    words: np.ndarray,
    nibbles: np.ndarray,
    dots: np.ndarray,
    own: np.ndarray,
    some: np.ndarray,
    votes: np.ndarray,
) -> None:
    """Votes int32 `[count]` of a block's keys.

    signs, weights: addresses; valid: of bool `[count]`, or 0; planes uint64 `[g, P, W]`, tables
    uint8 `[g, W, 16, 16]`, one of them of no words, and totals int32 `[g]`: of the queries;
    factors: int32 `[256]`, by weight; offsets: int32 `[g]`; words uint64 `[W, PIECE]`, nibbles
    uint8 `[W, 16, 64]`, dots, own and some int32 `[PIECE]`: room.
    """
    for start in range(0, count, PIECE):
        n = min(PIECE, count - start)
        bytes_of, out = uint8_at(weights + start, n), votes[start : start + n]
        for i in range(n):
            own[i] = factors[bytes_of[i]]
        some[:] = INVALID
        put_words(signs + start * M, n, M, words)
        if tables.shape[1]:
            raise_votes(words, tables, totals, own, offsets, nibbles, some)
        else:
            raise_by_planes(words, planes, totals, own, offsets, dots[:n], some[:n])
        for i in range(n):
            out[i] = some[i]
        if valid:
            flags = uint8_at(valid + start, n)
            for i in range(n):
                if not flags[i]:
                    out[i] = INVALID


@kernel
def scan(
    part: int,
    parts: int,
    signs: np.ndarray,
    weights: np.ndarray,
    centers: np.ndarray,
    valid: np.ndarray,
    length: int,
    full: int,
    block: int,
    factors: np.ndarray,
    queries: np.ndarray,
    units: np.ndarray,
    planes: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    products: np.ndarray,
    votes: np.ndarray,
) -> None:
    """Votes of a part of all groups' blocks, as `ops.coarse.votes` of the group's best head.

    signs, weights, centers: addresses int64 `[2, B·G]`, of full blocks and of the open one, the
    keys from `full` on; 0 centers: there are none. valid: addresses int64 `[B·G]` of flags, or 0;
    factors: int32 `[B·G, 256]`; queries, units, planes, tables, totals: as for `query.prepare`.
    Writes products with centers float32 `[B·G, S, g]` and votes int32 `[B·G, N]`.
    """
    groups, g, D = queries.shape
    M, blocks = D // 8, -(-length // block)
    total = groups * blocks
    offsets, words = np.empty(g, np.int32), np.zeros((-(-D // 64), PIECE), np.uint64)
    nibbles, room = np.empty((len(words), 16, 64), np.uint8), np.zeros((3, PIECE), np.int32)
    center, places = np.empty(D + ROWS, np.float32), np.empty(ROWS, np.int64)
    for unit in range(total * part // parts, total * (part + 1) // parts):
        group, s = unit // blocks, unit % blocks
        start = s * block
        count, opened = min(block, length - start), int(start >= full)
        first = start - full * opened
        for h in range(g):
            offsets[h] = 0
        if centers[opened, group]:
            at = centers[opened, group] + (0 if opened else s * D * 2)
            asked = queries.ctypes.data + group * g * D * 4
            multiply_center(at, asked, g, D, center, places, products[group, s])
            for h in range(g):
                offsets[h] = offset_of(products[group, s, h], units[group, h])
        some = votes[group, start : start + count]
        scan_block(
            signs[opened, group] + first * M,
            weights[opened, group] + first,
            valid[group] + start if valid[group] else 0,
            count,
            M,
            planes[group],
            tables[group],
            totals[group],
            factors[group],
            offsets,
            words,
            nibbles,
            room[0],
            room[1],
            room[2],
            some,
        )
