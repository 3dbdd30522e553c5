"""Scan: every key's vote from its signs, the upper byte of its weight and its block's center."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined, kernel, uint8_at
from kvindex.cpu.kernels.noise import number_of
from kvindex.cpu.kernels.numbers import BFLOAT16, read
from kvindex.cpu.kernels.sign_votes import CHUNK, INVALID, put_bounds, put_votes, put_words
from kvindex.cpu.kernels.vectors import FOUR as ROWS
from kvindex.cpu.kernels.vectors import four_dots
from kvindex.ops import priority

MOST = 2.0**30

CENTERS = priority.CENTERS


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
def is_sampled(s: int, blocks: int) -> bool:
    """Whether `ops.priority.sampled` has a block."""
    count = min(blocks, CENTERS)
    return blocks * -(-s * count // blocks) // count == s


@kernel
def offset_of(product: float, unit: float) -> Number:
    """As `ops.coarse.dot_offsets`, of one product and what a vote stands for."""
    if not unit > 0:
        return np.int32(0)
    return np.int32(min(max(np.rint(np.float64(product) / unit), -MOST), MOST))


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
    scales: np.ndarray,
    number: Number,
    words: np.ndarray,
    nibbles: np.ndarray,
    dots: np.ndarray,
    own: np.ndarray,
    some: np.ndarray,
    sizes: np.ndarray,
    votes: np.ndarray,
) -> None:
    """Votes int32 `[count]` of a block's keys, or with scales bounds of their priorities.

    signs, weights: addresses; valid: of bool `[count]`, or 0; planes uint64 `[g, P, W]`, tables
    uint8 `[g, W, 16, 16]`, one of them of no words, and totals int32 `[g]`: of the queries;
    factors: int32 `[256]`, by weight; offsets: int32 `[g]`; scales: float32 `[g, 2]`, or of no
    head; number: of the first key, as `noise.number_of`; words uint64 `[W, PIECE]`, nibbles uint8
    `[W, 16, 64]`, dots, own and some int32 `[PIECE]`, sizes float32 `[PIECE]`: room.
    """
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        bytes_of, out = uint8_at(weights + start, n), votes[start : start + n]
        for i in range(n):
            own[i] = factors[bytes_of[i]]
        put_words(signs + start * M, n, M, words)
        if len(scales):
            first = number_of(start, number)
            put_bounds(
                words,
                planes,
                tables,
                totals,
                own,
                offsets,
                scales,
                first,
                nibbles,
                dots,
                some,
                sizes,
                out,
            )
        else:
            put_votes(words, planes, tables, totals, own, offsets, nibbles, dots, some, out)
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
    scales: np.ndarray,
    seeds: np.ndarray,
    products: np.ndarray,
    votes: np.ndarray,
) -> None:
    """Votes of a part of all groups' blocks, as `ops.coarse.votes` of the group's best head.

    Or, with scales, bounds of priorities.

    signs, weights, centers: addresses int64 `[2, B·G]`, of full blocks and of the open one, the
    keys from `full` on; 0 centers: there are none. valid: addresses int64 `[B·G]` of flags, or 0;
    factors: int32 `[B·G, 256]`; queries, units, planes, tables, totals: as for `query.prepare`;
    scales: gains and totals of `ops.priority`, float32 `[B·G, g, 2]`, or of no head, and seeds of
    noise, uint32 `[B·G]`.
    Writes products with centers float32 `[B·G, S, g]`, but for those that scales were made of, and
    votes int32 `[B·G, N]`.
    """
    groups, g, D = queries.shape
    M, blocks = D // 8, -(-length // block)
    total = groups * blocks
    offsets, words = np.empty(g, np.int32), np.zeros((-(-D // 64), CHUNK), np.uint64)
    nibbles, room = np.empty((len(words), 16, 64), np.uint8), np.zeros((3, CHUNK), np.int32)
    sizes = np.empty(CHUNK, np.float32)
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
            if not len(scales[group]) or not is_sampled(s, blocks):  # else there are products
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
            scales[group],
            number_of(start, seeds[group]),
            words,
            nibbles,
            room[0],
            room[1],
            room[2],
            sizes,
            some,
        )
