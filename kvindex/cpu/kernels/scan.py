"""Scan: every key's vote from its signs, the upper byte of its weight and its block's center."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, uint8_at, uint64_at
from kvindex.cpu.kernels.numbers import BFLOAT16, read
from kvindex.cpu.kernels.query import BIAS, LANES

PIECE = 256
"""Keys at a time: what is made of them stays in the first cache."""

INVALID = np.int32(np.iinfo(np.int32).min)
"""The vote of a token that no search finds."""

HIGHEST = np.int32(np.iinfo(np.int32).max)

MOST = 2.0**30

BYTE = np.uint64(255)
LANE = np.uint64(0xFFFF)


@kernel
def look_up(signs: int, first: int, count: int, M: int, table: np.ndarray, out: np.ndarray) -> None:
    """Sums of table entries uint64 `[M · 256]` over the sign bytes of keys, into `out[:count]`."""
    if M % 8:
        some = uint8_at(signs + first * M, count * M)
        for i in range(count):
            total = np.uint64(0)
            for b in range(M):
                total += table[b * 256 + np.int64(some[i * M + b])]
            out[i] = total
        return
    W = M // 8
    words = uint64_at(signs + first * M, count * W)
    for w in range(W):
        part = table[w * 2048 : w * 2048 + 2048]
        for i in range(count):
            word = words[i * W + w]
            total = part[word & BYTE]
            total += part[np.uint64(256) + (word >> np.uint64(8) & BYTE)]
            total += part[np.uint64(512) + (word >> np.uint64(16) & BYTE)]
            total += part[np.uint64(768) + (word >> np.uint64(24) & BYTE)]
            total += part[np.uint64(1024) + (word >> np.uint64(32) & BYTE)]
            total += part[np.uint64(1280) + (word >> np.uint64(40) & BYTE)]
            total += part[np.uint64(1536) + (word >> np.uint64(48) & BYTE)]
            total += part[np.uint64(1792) + (word >> np.uint64(56))]
            out[i] = total if w == 0 else out[i] + total


@kernel
def of_heads(sums: np.ndarray, factors: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """Each key's largest vote of up to four heads, if above `out`'s.

    sums: uint64 `[n]`, of `look_up`; factors: int32 `[n]`; offsets: int32 `[heads]`.
    """
    for lane in range(len(offsets)):
        offset, shift = offsets[lane], np.uint64(16 * lane)
        for i in range(len(out)):
            dot = np.int32(sums[i] >> shift & LANE) - np.int32(BIAS)
            out[i] = max(out[i], np.int32(dot * factors[i] + offset))


@kernel
def multiply_center(center: int, queries: np.ndarray, out: np.ndarray) -> None:
    """Inner products of queries float32 `[g, D]` with a center, bfloat16 `[D]` at an address."""
    g, D = queries.shape
    floats = np.empty(D, np.float32)
    read(center, D, BFLOAT16, floats)
    for h in range(g):
        dot = np.float32(0)
        for i in range(D):
            dot += queries[h, i] * floats[i]
        out[h] = dot


@kernel
def offset_of(product: float, unit: float) -> Number:
    """As `ops.coarse.dot_offsets`, of one product and what a vote stands for."""
    if not unit > 0:
        return np.int32(0)
    return np.int32(min(max(np.rint(np.float64(product) / unit), -MOST), MOST))


@kernel
def scan_block(
    signs: int,
    weights: int,
    valid: int,
    count: int,
    M: int,
    tables: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    votes: np.ndarray,
) -> None:
    """Votes int32 `[count]` of a block's keys.

    signs, weights: addresses; valid: of bool `[count]`, or 0; tables: uint64 `[W, M · 256]`;
    factors: int32 `[256]`, by weight; offsets: int32 `[g]`.
    """
    sums = np.empty(PIECE, np.uint64)
    own = np.empty(PIECE, np.int32)
    for start in range(0, count, PIECE):
        n = min(PIECE, count - start)
        bytes_of, out = uint8_at(weights + start, n), votes[start : start + n]
        for i in range(n):
            own[i] = factors[bytes_of[i]]
            out[i] = INVALID
        for w in range(len(tables)):
            look_up(signs, start, n, M, tables[w], sums)
            of_heads(sums, own[:n], offsets[w * LANES : w * LANES + LANES], out)
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
    tables: np.ndarray,
    products: np.ndarray,
    votes: np.ndarray,
    lowest: np.ndarray,
    highest: np.ndarray,
) -> None:
    """Votes of a part of all groups' blocks, as `ops.coarse.votes` of the group's best head.

    signs, weights, centers: addresses int64 `[2, B·G]`, of full blocks and of the open one, the
    keys from `full` on; 0 centers: there are none. valid: addresses int64 `[B·G]` of flags, or 0;
    factors: int32 `[B·G, 256]`; queries, units, tables: as for `query.prepare`. Writes products
    with centers float32 `[B·G, S, g]`, votes int32 `[B·G, N]`, a block's least and largest vote
    int32 `[B·G, S]`.
    """
    groups, g, D = queries.shape
    M, blocks = D // 8, -(-length // block)
    total = groups * blocks
    offsets = np.empty(g, np.int32)
    for unit in range(total * part // parts, total * (part + 1) // parts):
        group, s = unit // blocks, unit % blocks
        start = s * block
        count, opened = min(block, length - start), int(start >= full)
        first = start - full * opened
        for h in range(g):
            offsets[h] = 0
        if centers[opened, group]:
            at = centers[opened, group] + (0 if opened else s * D * 2)
            multiply_center(at, queries[group], products[group, s])
            for h in range(g):
                offsets[h] = offset_of(products[group, s, h], units[group, h])
        some = votes[group, start : start + count]
        scan_block(
            signs[opened, group] + first * M,
            weights[opened, group] + first,
            valid[group] + start if valid[group] else 0,
            count,
            M,
            tables[group],
            factors[group],
            offsets,
            some,
        )
        lowest[group, s], highest[group, s] = HIGHEST, INVALID
        for i in range(count):
            highest[group, s] = max(highest[group, s], some[i])
            low = HIGHEST if some[i] == INVALID else some[i]
            lowest[group, s] = min(lowest[group, s], low)
