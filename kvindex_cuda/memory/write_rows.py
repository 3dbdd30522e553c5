"""Append a small number of rows (keys and values) to their blocks with one kernel. Compared with
asynchronous copies, this needs no events."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.runtime.arguments import of_type, wide
from kvindex_cuda.runtime.constants import WRITE_THREADS
from kvindex_cuda.runtime.launch import launch, load

FILE = "append/write_rows.cu"

PIECE = 16
"""Bytes that a thread copies at once. The size of a row is a multiple of it."""

MOST_BLOCKS = 32
"""Most thread blocks. They have 128 KB in flight, which a bus of 50 GB/s transfers in a few
microseconds."""


STRIDES = tuple(f"{part}_{of}" for part in ("one", "other") for of in ("batch", "head", "token"))


def write_rows(parts: Sequence[Tensor], table: Tensor, start: int) -> None:
    """Copy the rows of consecutive tokens to their blocks, on the current stream.

    Args:
        parts: Encoded rows, or keys and values, `[B, G, N, ...]`, for which `fits` returns True.
        table: Addresses of blocks `[G, 256, row_bytes]`, int64 `[B, S]`, each a multiple of 16.
        start: Position of the first of these tokens in its sequence.

    Raises:
        ValueError: Shapes do not fit, or the table has no room for the tokens.
    """
    B, G, N, _ = outer = parts[0].shape
    room = of_type("table", table, torch.int64).shape[1] * BLOCK
    if len(table) != B or not 0 <= start <= room - N:
        raise ValueError(
            f"rows: got {N} tokens of {B} sequences from position {start} on, but the table has "
            f"room for {room} tokens of {len(table)} sequences"
        )
    widths, strides = [], []
    for part in parts:
        size = part.element_size()
        if part.shape[:3] != outer[:3] or not fits(part):
            raise ValueError(
                f"rows: got {part.dtype} {tuple(part.shape)} with strides {part.stride()}, allowed "
                f"are contiguous rows whose address and size are multiples of {PIECE} bytes"
            )
        widths.append(part.shape[3] * size // PIECE)
        strides += [step * size // PIECE for step in part.stride()[:3]]
    pieces = sum(widths)
    total = B * G * N * pieces
    launch(
        FILE,
        "write_rows",
        (min(-(-total // WRITE_THREADS), MOST_BLOCKS),),
        (WRITE_THREADS,),
        arguments=dict(
            one=parts[0],
            other=parts[1] if len(parts) > 1 else None,
            rows=table,
            row=table.stride(0),
            start=start,
            count=N,
            width=widths[0],
            pieces=pieces,
            kv_heads=G,
            total=total,
            **dict(zip(STRIDES, [*strides, 0, 0, 0], strict=False)),
        ),
    )


def load_kernel(device: torch.device) -> None:
    """Load the kernel on a device before it is needed."""
    load(FILE, "write_rows", device)


def fits(part: Tensor) -> bool:
    """Return True if each row of a tensor `[B, G, N, ...]` is contiguous, begins at a multiple of
    `PIECE` bytes, and has a size that is a multiple of `PIECE` bytes."""
    whole = part.shape[3] * part.element_size() % PIECE == 0
    return whole and part.stride(3) == 1 and wide(part)
