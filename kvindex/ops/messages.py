"""What ranks tell each other of a step's attention, as bytes, and what they make of it.

One message of a rank: output, log-sum-exp and number of rows of its share, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Attended
from kvindex.ops.attention import NEVER, merge

ALIGNED = 16
"""Bytes to which parts of a message are aligned: what a GPU reads at once."""


def message_parts(messages: Tensor, like: Attended) -> Attended:
    """Outputs `[W, B, H, Dv]`, log-sum-exps `[W, B, H]` and counts `[W, B, G]` of messages uint8
    `[W, n]`, where they lie.

    like: attention of one rank, whose shapes and dtype are those of all.
    """
    start, parts = 0, []
    for shape, dtype in _fields(like):
        nbytes = shape.numel() * dtype.itemsize
        raw = messages[:, start : start + nbytes].view(dtype)
        parts.append(raw.view(len(raw), *shape))
        start += nbytes + -nbytes % ALIGNED
    return Attended(*parts)


def empty_message(like: Attended) -> Tensor:
    """A message uint8 `[n]` with nothing in it."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in _fields(like)]
    nbytes = sum(size + -size % ALIGNED for size in sizes)
    return torch.empty(nbytes, dtype=torch.uint8, device=like.output.device)


def pack(own: Attended, *, seen: bool, take: bool = False) -> Tensor:
    """This rank's message, uint8 `[n]`.

    own: output `[B, H, Dv]`, its log-sum-exp float32 `[B, H]`, and rows found, integers `[B, G]`,
    by the index; seen: whether it attended to other rows, too: else a head that found none says
    nothing, whatever its output holds. take: rows found are set to 0.
    """
    message = empty_message(own)
    output, lse, found = (part[0] for part in _tensors(message_parts(message[None], own)))
    output.copy_(own.output)
    lse.copy_(own.lse)
    found.copy_(own.found)
    if not seen:
        blind = (own.found == 0).repeat_interleave(lse.shape[1] // found.shape[1], dim=1)
        output.masked_fill_(blind[..., None], 0)
        lse.masked_fill_(blind, NEVER)
    if take:
        own.found.zero_()
    return message


def merge_messages(messages: Tensor, like: Attended, *, total: Tensor | None = None) -> Attended:
    """The attention of all ranks (`attention.merge`) from their messages uint8 `[W, n]`, by rank.

    like: as of `message_parts`; total: int64 `[B, G]`, to which the rows found are added.
    """
    parts = zip(*_tensors(message_parts(messages, like)), strict=True)
    merged = merge([Attended(*part) for part in parts])
    if total is not None:
        total += merged.found
    return merged


def _fields(like: Attended) -> list[tuple[torch.Size, torch.dtype]]:
    dtypes = like.output.dtype, torch.float32, torch.int32
    return [(part.shape, dtype) for part, dtype in zip(_tensors(like), dtypes, strict=True)]


def _tensors(attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    return attended.output, attended.lse, attended.found
