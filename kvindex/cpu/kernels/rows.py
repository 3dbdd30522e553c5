"""Copy rows by id."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel, prefetch, uint8_at, uint64_at

AHEAD = 8
"""How many rows ahead of the current one are prefetched."""

LINE = 64
"""Bytes of a cache line."""


@kernel
def copy_bytes(source: int, to: int, count: int) -> None:
    """Copy bytes between addresses, eight at a time; a source of 0 gives zeros."""
    words, tail = count // 8, uint8_at(to, count)
    if not source:
        tail[:] = 0
        return
    own, out = uint64_at(source, words), uint64_at(to, words)
    for i in range(words):
        out[i] = own[i]
    some = uint8_at(source, count)
    for i in range(words * 8, count):
        tail[i] = some[i]


@kernel
def ask_for(source: int, count: int) -> None:
    """Prefetch bytes at an address."""
    for line in range(0, count, LINE):
        prefetch(source + line)


@kernel
def gather_rows(
    part: int,
    parts: int,
    table: np.ndarray,
    step: int,
    wide: int,
    ids: np.ndarray,
    out: int,
) -> None:
    """Compiled version of `ops.fetch.gather_rows` for a part of the rows of each group.

    Args:
        part: Index of the part that this call processes, below `parts`.
        parts: Number of parts into which the work is divided, one per thread.
        table: Addresses of the groups' first rows, int64 `[P]`.
        step: Bytes between rows.
        wide: Bytes to copy per row.
        ids: Int64 `[P, K]`.
        out: Address of the result.
    """
    groups, K = ids.shape
    for group in range(groups):
        first, own, to = table[group], ids[group], out + group * K * wide
        for i in range(K * part // parts, K * (part + 1) // parts):
            if i + AHEAD < K and own[i + AHEAD] >= 0:
                ask_for(first + own[i + AHEAD] * step, wide)
            copy_bytes(first + own[i] * step if own[i] >= 0 else 0, to + i * wide, wide)
