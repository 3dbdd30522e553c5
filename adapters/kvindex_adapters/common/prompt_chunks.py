"""The chunks in which an adapter reads a prompt: their size, their bounds, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]
"""Called with a phase ("prefill" or "decode"), tokens done, tokens in all."""

MIN_CHUNK, MAX_CHUNK = 1024, 4096
"""Tokens of a piece: what a CPU computes at a time, and the most that a GPU does."""

CHUNK_BYTES = 2**29
"""Of a layer's activations of a piece of more than `MIN_CHUNK` tokens, in all rows of a batch."""


def chunk_of(token_bytes: int, device: torch.device) -> int:
    """Tokens of a piece, where nobody says: token_bytes, a layer's activations of one of them.

    The host launches as many kernels for a piece however long it is. So on a GPU pieces are the
    largest power of two, from 1,024 to 4,096 tokens, whose activations take at most `CHUNK_BYTES`.
    """
    if device.type != "cuda":
        return MIN_CHUNK
    room = CHUNK_BYTES // token_bytes
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << room.bit_length() >> 1))


def chunks(stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """First and end of the pieces in which `prefill` reads `stop` tokens."""
    start = 0
    while start < stop:
        end = start + chunk if stop - start - chunk > 1 else stop
        yield start, end
        start = end


def check_prompt(ids: Tensor, vocabulary: int) -> None:
    """Raises ValueError for a prompt without tokens, or with an id that the model has no row for.

    ids: int64 `[N]`; vocabulary: how many there are, 0 where nobody knows.
    """
    if len(ids) == 0:
        raise ValueError("prompt: got no tokens, allowed is at least one")
    last = (vocabulary or 2**63) - 1
    wrong = ids[(ids < 0) | (ids > last)]
    if len(wrong):
        raise ValueError(f"prompt: got id {int(wrong[0])}, allowed is 0 to {last}")
