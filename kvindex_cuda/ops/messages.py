"""Combine the attention of several ranks (GPUs) that store different rows. One kernel packs the
results of a rank into a message; another merges the messages of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import Attended
from kvindex.ops.messages import empty_message, message_parts
from kvindex_cuda.runtime.arguments import CODES, of_type
from kvindex_cuda.runtime.launch import launch

__all__ = ["merge_messages", "pack"]

FILE, THREADS = "ops/messages.cu", 256


def pack(own: Attended, *, seen: bool, take: bool = False) -> Tensor:
    """Pack the attention results of a rank into one message with a kernel. Arguments and results
    are those of `kvindex.ops.messages.pack`. If `take` is True, `own.found` must be contiguous."""
    found = of_type("found", own.found, torch.int32, torch.int64)
    if take and not found.is_contiguous():
        raise ValueError(f"found: got strides {found.stride()}, allowed is a contiguous tensor")
    message = empty_message(own)
    to = message_parts(message[None], own)
    launch(
        FILE,
        "pack_message",
        (found.numel(),),
        (THREADS,),
        arguments=dict(
            output=own.output.contiguous(),
            lse=own.lse.contiguous(),
            found=found.contiguous(),
            to_output=to.output,
            to_lse=to.lse,
            to_found=to.found,
            seen=int(seen),
            take=int(take),
        ),
        overlap=True,
        **_sizes(own),
        WIDE=int(found.dtype == torch.int64),
    )
    return message


def merge_messages(messages: Tensor, like: Attended, *, total: Tensor | None = None) -> Attended:
    """Merge the attention of all ranks from their messages. Arguments and results are those of
    `kvindex.ops.messages.merge_messages`. Numbers are added up in the order of ranks."""
    parts = message_parts(messages, like)
    if total is not None and not of_type("total", total, torch.int64).is_contiguous():
        raise ValueError(f"total: got strides {total.stride()}, allowed is a contiguous tensor")
    output, lse, found = (
        torch.empty(part.shape[1:], dtype=part.dtype, device=part.device)
        for part in (parts.output, parts.lse, parts.found)
    )
    launch(
        FILE,
        "merge_messages",
        (found.numel(),),
        (THREADS,),
        arguments=dict(
            outputs=parts.output,
            lses=parts.lse,
            founds=parts.found,
            output_rank=parts.output.stride(0),
            lse_rank=parts.lse.stride(0),
            found_rank=parts.found.stride(0),
            output=output,
            lse=lse,
            found=found,
            total=total,
            ranks=len(messages),
        ),
        **_sizes(like),
        WIDE=0,
    )
    return Attended(output, lse, found)


def _sizes(like: Attended) -> dict[str, int]:
    H, G = like.lse.shape[1], like.found.shape[1]
    code = CODES[of_type("output", like.output, *CODES).dtype]
    return dict(DV=like.output.shape[2], GROUP=H // G, DTYPE=code)
