"""Compute a coarse score, called vote, for every key of an index.

The vote is computed from the key's sign bits, its weight, and the center of its block. Only the
upper byte of the weight's 16-bit logarithmic code is read.
"""

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
    """Compute inner products of queries with the center of a block.

    Args:
        center: Address of the center, bfloat16 `[D]`.
        queries: Address of the queries, float32 `[g, D]`.
        g: Number of queries.
        D: Dimension of a query.
        room: Buffer, float32 `[D + 4]`.
        places: Buffer, int64 `[4]`.
        out: Result, float32 `[g]`.
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
    """Return True if the list of blocks that `ops.priority.sampled_blocks` returns contains `s`.

    s: number of a block. blocks: number of blocks in the index.
    """
    count = min(blocks, CENTERS)
    return blocks * -(-s * count // blocks) // count == s


@kernel
def offset_of(product: float, unit: float) -> Number:
    """Convert a query's inner product with a block center to the unit of votes (coarse scores).

    `unit` is the inner product that a vote of 1 represents. The result is the number that the
    center adds to the votes of its block's keys. This is the compiled version of
    `ops.coarse.dot_offsets`.
    """
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
    """Compute the votes (coarse scores) of the keys in one block.

    If rows are sampled, upper bounds of the keys' priorities are computed instead. The priority of
    a key is its estimated log weight plus random noise. Votes are computed either with look-up
    tables (`tables`) or with bit planes of the queries (`planes`). In the array that is not used,
    the axis `W` has length 0.

    Args:
        signs: Address of the block's signs.
        weights: Address of the upper bytes of the block's weights.
        valid: Address of the mask of valid keys, bool `[count]`; 0 if all keys are valid.
        count: Number of keys.
        M: Number of bytes that the signs of a key take.
        planes: Bit planes of the queries, uint64 `[g, P, W]` (`query.put_planes`).
        tables: Look-up tables of the queries, uint8 `[g, W, 16, 16]` (`lookup.put_tables`).
        totals: Constants to subtract from the inner products of signs with queries, int32 `[g]`.
        factors: Integer by which the vote of a key is multiplied, indexed by the upper byte of its
            weight, int32 `[256]`.
        offsets: Number that the block's center adds to votes, for each query head, int32 `[g]`.
        scales: Gain and total of each query head (`ops.priority`), float32 `[g, 2]`; `[0, 2]`
            without sampling.
        number: Number from which the noise of the first key is hashed (`noise.number_of`).
        words: Buffer, uint64 `[W, CHUNK]`.
        nibbles: Buffer, uint8 `[W, 16, 64]`.
        dots: Buffer, int32 `[CHUNK]`.
        own: Buffer, int32 `[CHUNK]`.
        some: Buffer, int32 `[CHUNK]`.
        sizes: Buffer, float32 `[CHUNK]`.
        votes: Result, int32 `[count]`.
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
    """Compute the coarse scores (votes) of all keys.

    A group is one KV head of one sequence with its query heads. A key's vote is the largest of its
    votes for these query heads (`ops.coarse.votes`). Each thread processes some of the blocks of
    all groups. If rows are sampled, upper bounds of the keys' priorities are computed instead.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        signs: Addresses of signs, int64 `[2, B·G]`: `[0]` for the full blocks, and `[1]` for the
            last, partly filled block.
        weights: Addresses of the weights' upper bytes, int64 `[2, B·G]`.
        centers: Addresses of centers, int64 `[2, B·G]`; 0 if blocks have no centers.
        valid: Addresses of the masks of valid keys, int64 `[B·G]`; 0 if all keys are valid.
        length: Number of keys.
        full: Number of keys in full blocks; later keys are in the last, partly filled block.
        block: Number of tokens in a block.
        factors: Integer by which the vote of a key is multiplied, indexed by the upper byte of its
            weight, int32 `[B·G, 256]`.
        queries: Float32 `[B·G, g, D]`.
        units: Inner product that corresponds to a vote of 1, float64 `[B·G, g]`.
        planes: Bit planes of the rounded queries, from `query.prepare`.
        tables: Look-up tables of the rounded queries, from `query.prepare`.
        totals: Constants to subtract from inner products, from `query.prepare`.
        scales: Gain and total of each query head (`ops.priority`), float32 `[B·G, g, 2]`; `[B·G, 0,
            2]` without sampling.
        seeds: Seeds of the noise, uint32 `[B·G]`.
        products: Result, inner products with block centers, float32 `[B·G, S, g]`. With sampling,
            `priority.put_scales` has already computed those of the sampled blocks.
        votes: Result, int32 `[B·G, N]`.
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
            if not len(scales[group]) or not is_sampled(s, blocks):  # else `put_scales` computed it
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
