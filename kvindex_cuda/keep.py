"""Few rows go to their blocks by a kernel: the host launches it, and no copy or event."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex_cuda.arguments import of_type
from kvindex_cuda.launch import launch
from kvindex_cuda.layout import BLOCK

THREADS, PIECE = 256, 16
"""As in the kernel's source; bytes of which a row has some."""

MOST_BLOCKS = 32
"""Of threads: 128 KB on their way, some microseconds of a bus of 50 GB/s."""


def keep(rows: Tensor, table: Tensor, start: int) -> None:
    """Copy rows uint8 `[B, G, N, row_bytes]` of the tokens from `start` on to their blocks.

    table: addresses of blocks `[G, 256, row_bytes]`, int64 `[B, S]`; row_bytes: a multiple of 16,
    as are the addresses. On the current stream, where whoever reads them must come after it.
    Raises ValueError for wrong dtypes or sizes, or tokens beyond the table.
    """
    B, G, N, row_bytes = of_type("rows", rows, torch.uint8).shape
    if row_bytes % PIECE:
        raise ValueError(f"rows: got rows of {row_bytes} bytes, allowed are multiples of {PIECE}")
    room = of_type("table", table, torch.int64).shape[1] * BLOCK
    if len(table) != B or not 0 <= start <= room - N:
        got = f"{B} times {N} tokens from {start} on"
        raise ValueError(f"rows: got {got}, allowed are {len(table)} times {room} in all")
    pieces, rows = row_bytes // PIECE, rows.contiguous()
    total = B * G * N * pieces
    launch(
        "keep.cu",
        "keep",
        (min(-(-total // THREADS), MOST_BLOCKS),),
        (THREADS,),
        *(rows, table, table.stride(0), start, N, pieces, G, total),
    )
