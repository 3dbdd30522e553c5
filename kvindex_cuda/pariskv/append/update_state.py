"""Update the numbers of tokens, keys and candidates after an append.

The kernels of a decode step read these numbers on the device. One kernel launch updates all of
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import UPDATE_THREADS
from kvindex_cuda.runtime.launch import launch

WORDS, PIECES, MOST_BLOCKS = BLOCK // 32, BLOCK // 16, 16
"""WORDS: 32-bit words of valid bits in a block of tokens. PIECES: 16-byte pieces of weights in a
block. MOST_BLOCKS: most thread blocks of a KV head."""


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
    """Update an index's `State` in place, after the number of tokens in the index has changed.

    A `State` contains the tensors that decode steps read. A field of `state` whose argument is None
    stays unchanged.

    Args:
        state: The state to update.
        tokens: Number of tokens that the index has now.
        first: Index of the first block in which all tokens become valid. The tokens of all later
            blocks also become valid, for all sequences.
        count: Number of valid keys of each sequence.
        wanted: int32 `[B]`, a tensor whose entries the kernel sets to `candidates`.
        candidates: Number of candidates that a search should find in each sequence.
        codes_from: Index of the first block whose weights are read to update `State.largest` and
            `State.weight_scale`. The previous call must have read all earlier blocks when they were
            full. 0 reads all blocks again.
        layout: Layout of the codes, which must have log weights. Required with `codes_from`.

    Raises:
        ValueError: Dtypes or shapes are wrong, or the state has no room for the tokens.
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
"""Arguments of the kernel when it reads no codes."""


def _reads(
    state: State, tokens: int, codes_from: int, layout: Layout | None
) -> dict[str, Tensor | int | None]:
    """Return the kernel arguments that are needed to read the keys' log weights from the codes.

    Raises ValueError if the codes contain no log weights.
    """
    if not 0 <= codes_from <= tokens // BLOCK:
        raise ValueError(f"codes_from: got {codes_from}, allowed is 0 to {tokens // BLOCK}")
    if layout is None or isinstance(layout, SubspaceLayout) or state.largest is None:
        raise ValueError(
            f"layout, largest: got {layout} and {state.largest}; codes_from needs a Layout with "
            "log weights and a tensor State.largest"
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
