"""Rows where they lie in memory, copied by id."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel, prefetch, uint8_at, uint64_at

AHEAD = 8
"""Rows that are on their way."""

LINE = 64
"""Bytes that come from memory at once."""


@kernel
def copy_bytes(source: int, to: int, count: int) -> None:
    """Copy bytes from one address to another, eight at a time where there are; from 0: zeros."""
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
    """Have bytes at an address brought near."""
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
    """As `ops.fetch.gather_rows`, of rows int64 `[P, K]`, of `wide` bytes, to an address.

    table: addresses int64 `[P]` of the first rows, each `step` bytes after the one before.
    """
    groups, K = ids.shape
    for group in range(groups):
        first, own, to = table[group], ids[group], out + group * K * wide
        for i in range(K * part // parts, K * (part + 1) // parts):
            if i + AHEAD < K and own[i + AHEAD] >= 0:
                ask_for(first + own[i + AHEAD] * step, wide)
            copy_bytes(first + own[i] * step if own[i] >= 0 else 0, to + i * wide, wide)
