"""Messages with which ranks (processes) exchange attention outputs, and the merge of the outputs.

Each rank attends to its own rows. Its message is one byte tensor with the attention output, the
log-sum-exp, and the number of rows, in this order. So a single all-gather exchanges all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Attended
from kvindex.ops.attention import NEVER, merge

ALIGNED = 16
"""Alignment, in bytes, of the three tensors in a message: what a GPU thread can read at a time."""


def message_parts(messages: Tensor, like: Attended) -> Attended:
    """Return the tensors in the messages of all ranks, as views.

    Args:
        messages: Messages of `W` ranks, uint8 `[W, n]`.
        like: Attention of one rank. All messages have its shapes and dtypes.

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
    """Allocate a tensor for the message that a rank sends to the other ranks, uint8 `[n]`.

    Its contents are undefined.

    Args:
        like: Attention output whose tensors have the shapes and dtypes of those in the message.
    """
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in _fields(like)]
    nbytes = sum(size + -size % ALIGNED for size in sizes)
    return torch.empty(nbytes, dtype=torch.uint8, device=like.output.device)


def pack(own: Attended, *, seen: bool, take: bool = False) -> Tensor:
    """Write the attention of this rank into a new message.

    Args:
        own: Output `[B, H, Dv]`, log-sum-exp float32 `[B, H]`, and number of rows from the index,
            integers `[B, G]`.
        seen: Whether this rank has also attended to other rows, such as the window. If not, a head
            that found no rows in the index sends an output of 0 and a log-sum-exp of `-inf`.
        take: Whether to set the numbers of rows in `own` to 0 after they are copied. Pass True if
            these numbers are counters to which every attention call adds.

    Returns:
        The message, uint8 `[n]`.
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
    """Merge the attention in the messages of all ranks, with `attention.merge`.

    Args:
        messages: Messages of `W` ranks, uint8 `[W, n]`, in the order of the ranks.
        like: Attention of one rank. All messages have its shapes and dtypes.
        total: Counter, int64 `[B, G]`, to which the numbers of rows of all ranks are added; or
            None.
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
