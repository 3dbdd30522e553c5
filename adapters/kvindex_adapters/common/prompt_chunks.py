"""Divide a prompt into the chunks in which an adapter reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]
"""A function that is called with a phase ("prefill" or "decode"), tokens done, and tokens in
total."""

MIN_CHUNK, MAX_CHUNK = 1024, 4096
"""Tokens of a chunk: MIN_CHUNK on a CPU, MIN_CHUNK to MAX_CHUNK on a GPU."""

CHUNK_BYTES = 2**29
"""Maximum bytes of a layer's activations in a chunk of more than `MIN_CHUNK` tokens, for all
sequences of a batch."""


def chunk_of(token_bytes: int, device: torch.device) -> int:
    """Choose the default number of tokens of a chunk.

    The number of kernels that the host launches per chunk does not depend on its length, so long
    chunks are faster. On a GPU, the number is the largest power of two from 1,024 to 4,096 for
    which a layer's activations take at most `CHUNK_BYTES`.

    Args:
        token_bytes: Bytes of one layer's activations per token.
        device: The device of the model.
    """
    if device.type != "cuda":
        return MIN_CHUNK
    room = CHUNK_BYTES // token_bytes
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << room.bit_length() >> 1))


def chunks(stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the chunks in which `prefill` reads `stop` tokens."""
    start = 0
    while start < stop:
        end = start + chunk if stop - start - chunk > 1 else stop
        yield start, end
        start = end


def check_prompt(ids: Tensor, vocabulary: int) -> None:
    """Raise ValueError for a prompt without tokens, or with an id outside of the vocabulary.

    Args:
        ids: Int64 `[N]`.
        vocabulary: Size of the vocabulary, or 0 if unknown.
    """
    if len(ids) == 0:
        raise ValueError("prompt: got no tokens, allowed is at least one")
    last = (vocabulary or 2**63) - 1
    wrong = ids[(ids < 0) | (ids > last)]
    if len(wrong):
        raise ValueError(f"prompt: got id {int(wrong[0])}, allowed is 0 to {last}")
