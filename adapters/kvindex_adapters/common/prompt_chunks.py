"""Divide a prompt into chunks for chunked prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Progress = Callable[[str, int, int], None]
"""A progress callback. Its arguments are the phase ("prefill" or "decode"), the number of tokens
done, and the total number of tokens."""

MIN_CHUNK, MAX_CHUNK = 1024, 4096
"""Default number of tokens in a chunk of a prompt.

It is `MIN_CHUNK` on a CPU, and between `MIN_CHUNK` and `MAX_CHUNK` on a GPU.
"""

CHUNK_BYTES = 2**29
"""Maximum bytes of a layer's activations in a chunk of more than `MIN_CHUNK` tokens, for all
sequences of a batch."""


def chunk_of(token_bytes: int, device: torch.device) -> int:
    """Choose the default number of tokens in a chunk of a prompt.

    Long chunks are faster on a GPU, because each chunk needs the same number of kernel launches.
    The result is the largest power of two from 1,024 to 4,096 for which one layer's activations
    take at most `CHUNK_BYTES`. On a CPU it is 1,024.

    Args:
        token_bytes: Bytes of one layer's activations per token of a chunk, for the whole batch.
        device: The device of the model.
    """
    if device.type != "cuda":
        return MIN_CHUNK
    room = CHUNK_BYTES // token_bytes
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << room.bit_length() >> 1))


def chunks(stop: int, chunk: int, *, first: int = 0, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Divide `stop` tokens into chunks, and yield the start and the end position of each chunk.

    Chunks have `chunk` tokens. The last chunk can be shorter. If only one token would remain for
    it, the chunk before it takes this token too.

    Args:
        stop: Number of tokens.
        chunk: Number of tokens of a chunk.
        first: Number of tokens of the sequence before these tokens.
        unit: Chunks of at least this size end at multiples of `unit` in the sequence. They are up
            to `unit` tokens shorter, or up to `unit / 2` tokens longer so that they have at least
            that many tokens. The last chunk ends at `stop`.
    """
    start = 0
    while start < stop:
        end = start + chunk
        if chunk >= unit > 1:
            end = aligned(end, first, unit)
            end = end if 2 * (end - start) >= unit else end + unit
        end = end if stop - end > 1 else stop
        yield start, end
        start = end


def aligned(stop: int, first: int, unit: int) -> int:
    """Reduce a number of tokens so that they end at a multiple of `unit` in the sequence.

    `first` is the number of tokens of the sequence before them. The result is at least 0.
    """
    return max((first + stop) // unit * unit - first, 0)


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
