"""Messages in which GPUs send each other their parts of an attention output, and their merge.

A message contains the bytes of a rank's output, log-sum-exp and number of rows, in this order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Attended
from kvindex.ops.attention import NEVER, merge

ALIGNED = 16
"""Alignment of the parts of a message, in bytes. A GPU reads this many in one instruction."""


def message_parts(messages: Tensor, like: Attended) -> Attended:
    """Return views of the parts of messages.

    Args:
        messages: Uint8 `[W, n]`, one message of each of `W` ranks.
        like: Attention of one rank, whose shapes and dtype all messages have.

    Returns:
        Outputs `[W, B, H, Dv]`, log-sum-exps `[W, B, H]` and numbers of rows `[W, B, G]`.
    """
    start, parts = 0, []
    for shape, dtype in _fields(like):
        nbytes = shape.numel() * dtype.itemsize
        raw = messages[:, start : start + nbytes].view(dtype)
        parts.append(raw.view(len(raw), *shape))
        start += nbytes + -nbytes % ALIGNED
    return Attended(*parts)


def empty_message(like: Attended) -> Tensor:
    """Allocate a message, uint8 `[n]`, with undefined contents.

    Args:
        like: Attention whose shapes and dtype the message has.
    """
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in _fields(like)]
    nbytes = sum(size + -size % ALIGNED for size in sizes)
    return torch.empty(nbytes, dtype=torch.uint8, device=like.output.device)


def pack(own: Attended, *, seen: bool, take: bool = False) -> Tensor:
    """Write this rank's message.

    Args:
        own: Output `[B, H, Dv]`, its log-sum-exp float32 `[B, H]`, and the number of rows that the
            index found, integers `[B, G]`.
        seen: True if the rank also attended to other rows, such as the window. If False, a head
            without found rows sends an output of 0 and a log-sum-exp of `-inf`.
        take: Set the numbers of rows in `own` to 0 afterwards.

    Returns:
        Uint8 `[n]`.
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
    """Merge the attention of all ranks (`attention.merge`).

    Args:
        messages: Uint8 `[W, n]`, in the order of the ranks.
        like: Attention of one rank, whose shapes and dtype all messages have.
        total: Int64 `[B, G]`, to which the numbers of found rows are added, or None.
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
