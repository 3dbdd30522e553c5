"""Update what a step reads on the device of how many tokens there are, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import UPDATE_THREADS
from kvindex_cuda.runtime.launch import launch

WORDS, PIECES, MOST_BLOCKS = BLOCK // 32, BLOCK // 16, 16
"""Of a block: words of bits of tokens, 16 bytes of weights; thread blocks of a head at most."""


def update_state(
    state: State,
    tokens: int,
    *,
    first: int | None = None,
    count: int | None = None,
    wanted: Tensor | None = None,
    candidates: int = 0,
    codes_from: int | None = None,
    layout: Layout | None = None,
) -> None:
    """Put into a state, in place, what holds for so many tokens; what is None stays as it was.

    first: the block from which on all tokens are real, in all rows; count: valid keys, the same in
    all rows; wanted: int32 `[B]`, to hold so many `candidates` each; codes_from: the block from
    which on codes, of a `layout` with log weights, are read for `largest` and `weight_scale`:
    blocks before it were full and read at the last call, and 0 forgets what was read. Raises
    ValueError for wrong dtypes or shapes, a block or tokens that there is no room for.
    """
    (B, room, _), last = state.valid.shape, -(-tokens // BLOCK)
    if not 0 <= last <= room:
        raise ValueError(f"tokens: got {tokens}, allowed is 0 to {room * BLOCK}")
    if first is not None and not 0 <= first <= last:
        raise ValueError(f"first: got {first}, allowed is 0 to {last}")
    if wanted is not None:
        of_shape("wanted", of_type("wanted", wanted, torch.int32), B)
    reads = {} if codes_from is None else _reads(state, tokens, codes_from, layout)
    begin = last if first is None else first
    heads = state.weight_scale.numel() if reads else 1
    words = -(-B * WORDS * (last - begin) // (heads * UPDATE_THREADS))
    blocks = -(-(last - (codes_from or 0)) * PIECES // UPDATE_THREADS) if reads else 0
    launch(
        "append/update_state.cu",
        "update_state",
        (min(max(words, blocks, 1), MOST_BLOCKS), heads),
        (UPDATE_THREADS,),
        arguments=dict(
            valid=None if first is None else state.valid,
            length=state.length,
            counted=None if count is None else state.counted,
            wanted=wanted,
            weight_scale=state.weight_scale,
            row=room,
            first=begin,
            last=last,
            tokens=tokens,
            count=count or 0,
            candidates=candidates,
            batches=B,
            **(reads or NOTHING),
        ),
    )


NOTHING = dict(codes=None, largest=None, kv_heads=0, head_bytes=0, weights=0, codes_from=0)
"""Is read of codes."""


def _reads(
    state: State, tokens: int, codes_from: int, layout: Layout | None
) -> dict[str, Tensor | int | None]:
    """What the kernel reads of codes. Raises ValueError where there are none with log weights."""
    if not 0 <= codes_from <= tokens // BLOCK:
        raise ValueError(f"codes_from: got {codes_from}, allowed is 0 to {tokens // BLOCK}")
    if layout is None or isinstance(layout, SubspaceLayout) or state.largest is None:
        raise ValueError(
            f"layout, largest: got {layout}, {state.largest}, allowed are a Layout with log "
            "weights and a tensor, or codes_from=None"
        )
    of_shape("largest", of_type("largest", state.largest, torch.int32), *state.weight_scale.shape)
    return dict(
        codes=state.codes,
        largest=state.largest,
        kv_heads=state.weight_scale.shape[1],
        head_bytes=layout.head_bytes,
        weights=layout.weights,
        codes_from=codes_from,
    )
