"""Update the token counts that a step reads on the device, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.pariskv.base_step import State
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import UPDATE_THREADS
from kvindex_cuda.runtime.launch import launch

WORDS, MOST_BLOCKS = BLOCK // 32, 64
"""Of the bits of a block's tokens; blocks of threads at most."""


def update_state(
    state: State,
    tokens: int,
    *,
    first: int | None = None,
    count: int | None = None,
    wanted: Tensor | None = None,
    candidates: int = 0,
    weight_scale: Tensor | None = None,
) -> None:
    """Put into a state, in place, what holds for so many tokens; what is None stays as it was.

    first: the block from which on all tokens are real, in all rows; count: valid keys, the same in
    all rows; wanted: int32 `[B]`, to hold so many `candidates` each; weight_scale: float32 `[B,
    G]`. Raises ValueError for wrong dtypes or shapes, a block or tokens that there is no room for.
    """
    (B, room, _), last = state.valid.shape, -(-tokens // BLOCK)
    if not 0 <= last <= room:
        raise ValueError(f"tokens: got {tokens}, allowed is 0 to {room * BLOCK}")
    if first is not None and not 0 <= first <= last:
        raise ValueError(f"first: got {first}, allowed is 0 to {last}")
    if wanted is not None:
        of_shape("wanted", of_type("wanted", wanted, torch.int32), B)
    if weight_scale is not None:
        of_shape(
            "weight_scale",
            of_type("weight_scale", weight_scale, torch.float32),
            *state.weight_scale.shape,
        )
        weight_scale = weight_scale.contiguous()  # a view's is not
    begin = last if first is None else first
    items = max(1, B * WORDS * (last - begin), state.weight_scale.numel())
    launch(
        "append/update_state.cu",
        "update_state",
        (min(-(-items // UPDATE_THREADS), MOST_BLOCKS),),
        (UPDATE_THREADS,),
        arguments=dict(
            valid=None if first is None else state.valid,
            length=state.length,
            counted=None if count is None else state.counted,
            wanted=wanted,
            weight_scale=state.weight_scale,
            new_scale=weight_scale,
            row=room,
            first=begin,
            last=last,
            tokens=tokens,
            count=count or 0,
            candidates=candidates,
            batches=B,
            scales=state.weight_scale.numel(),
        ),
    )
