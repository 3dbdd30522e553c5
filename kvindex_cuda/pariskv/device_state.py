"""Device state: what a step reads of a layer, at fixed addresses that the host writes to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Contents
from kvindex.ops.block_layout import words_of
from kvindex.ops.coarse import TIERS
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.pariskv.base_step import State


def opened(geometry: Geometry, table: Tensor, contents: Contents) -> State:
    """A state with room for all that a table of blocks of codes has room for, int64 `[B, S]`.

    contents: whose statistics have a histogram for steps by tiers, and which has a regression for
    signs that vote together.
    """
    histogram = contents.statistics.get("histogram")
    regression = None if contents.regression is None else contents.regression()
    device, (batch, blocks) = geometry.device, table.shape

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    none = ints(0)
    return State(
        codes=table,
        rows=none,
        valid=ints(batch, blocks, 8),
        length=ints(1, dtype=torch.int64),
        wanted=none,
        counted=ints(batch),
        weight_scale=torch.zeros((batch, geometry.kv_heads), device=device),
        resident=none,
        resident_mask=none,
        resident_count=none,
        row_bytes=0,
        largest=ints(batch, geometry.kv_heads) if histogram is None else None,
        regression=None if regression is None else torch.empty_like(regression).contiguous(),
        histogram=None if histogram is None else torch.zeros_like(histogram).contiguous(),
        tiers=None if histogram is None else ints(batch, len(TIERS), dtype=torch.int64),
    )


def put(target: Tensor, values: Sequence[int]) -> None:
    """Copy numbers, one for each row, into `target` `[B]` without waiting for its device."""
    if len(set(values)) == 1:
        target.fill_(values[0])  # no memory is pinned for what is the same in all rows
        return
    staged = torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cuda":
        staged = staged.pin_memory()
    target.copy_(staged, non_blocking=True)


def put_valid(state: State, valid: Tensor, first: int, last: int) -> None:
    """Bits of tokens that are real, bool `[B, N]`, of the blocks from `first` to `last`."""
    state.valid[:, first:last].copy_(words_of(valid[:, first * BLOCK :], last - first))


def put_tiers(state: State, histogram: Tensor, bounds: Sequence[Sequence[int]]) -> None:
    """Keys per centroid, and for each row of the batch those that bound each tier."""
    if state.histogram is None or state.tiers is None:
        raise ValueError("histogram: got one for a state without tiers, allowed is none")
    state.histogram.copy_(histogram)
    for tier, keys in enumerate(zip(*bounds, strict=True)):
        put(state.tiers[:, tier], keys)
