"""Gather rows (keys and values of tokens) by their ids."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import kernel, prefetch, uint8_at, uint64_at

AHEAD = 8
"""Prefetch distance, in rows."""

LINE = 64
"""Bytes of a cache line."""


@kernel
def copy_bytes(source: int, to: int, count: int) -> None:
    """Copy `count` bytes from the address `source` to the address `to`.

    If `source` is 0, zeros are written.
    """
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
    """Prefetch `count` bytes at the address `source`."""
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
    """Gather rows (keys and values of tokens) by their ids, and copy them into the result.

    A group is one KV head of one sequence. Each thread copies some of the rows of every group. This
    is the compiled version of `ops.fetch.gather_rows`.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        table: Address of each group's first row, int64 `[B·G]`.
        step: Distance in bytes from one row to the next.
        wide: Number of bytes to copy per row.
        ids: Ids of the rows to gather, int64 `[B·G, K]`; a negative id gives zeros.
        out: Address of the result.
    """
    groups, K = ids.shape
    for group in range(groups):
        first, own, to = table[group], ids[group], out + group * K * wide
        for i in range(K * part // parts, K * (part + 1) // parts):
            if i + AHEAD < K and own[i + AHEAD] >= 0:
                ask_for(first + own[i + AHEAD] * step, wide)
            copy_bytes(first + own[i] * step if own[i] >= 0 else 0, to + i * wide, wide)
