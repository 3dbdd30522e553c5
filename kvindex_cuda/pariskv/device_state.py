"""Device state: what a step reads of a layer, at fixed addresses that the host writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Contents, Rows
from kvindex.ops.coarse import TIERS
from kvindex.pariskv.block_layout import words_of
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.row_cache import RowCache


@dataclass(frozen=True)
class State:
    """What a step reads of a layer, all on the device and at fixed addresses.

    codes, rows: addresses of blocks, int64 `[B, S]` each; valid: bits of tokens, int32 `[B, S, 8]`;
    length: int64 `[1]`, tokens in the index, or `[B]`, in that of each row of the batch; wanted,
    counted: int32 `[B]`, candidates `C` and valid keys; weight_scale: float32 `[B, G]`; resident:
    rows of sink and window `[B, G, W, D + Dv]`; resident_mask: uint8 `[B, W]`; resident_count:
    int64 `[1]`, how many of the `W` there are, or `[B]`, as of `length`; row_bytes: of a row in a
    block; codec: of those rows, a name of `kvindex.storage.codecs`; row_center: that they are codes
    from, float32 `[B, G, D]`, or None for zeros; far: whether they lie on the host, which kernels
    over latents alone are told; near: which of those blocks are on the device, uint8 `[B, S]`,
    where they lie in two places; cache: of rows that were fetched from the host, as they lie;
    wrong: int32 of one element, which a step sets to 1 where a query is not finite; regression: as
    of `step_state.State`, where signs vote together; found_sum: int64 `[B, G]`, to which it adds
    how many rows it found, or None; token: rows `[B, G, 1, D]` and `[B, G, 1, Dv]`, contiguous,
    which a step that `stages` puts behind the resident ones where `resident_count` tells, and moves
    that on, by a `ticket`, int32 `[1]`, 0 between steps; or None.

    Of log weights alone: largest: upper byte of a weight in full blocks, int32 `[B, G]`, which no
    step reads. Of tiers alone: histogram: keys per centroid, int64 `[B, G, M, 256]`; tiers: keys
    that bound each, int64 `[B, 6]`. Of an engine's pages alone (`steps.paged`): sink: how many of a
    sequence's first tokens are resident where any token is searched; resident rows lie in the
    blocks of `rows` then, those of the window behind the `length` tokens searched; page_head_bytes:
    from a KV head's rows of a block to the next one's; segments: numbers of those blocks among all
    pages, int32 `[B, S]`, where the pages are on the host: then `cache` has a group for each KV
    head, of all sequences' rows by their slots.
    """

    codes: Tensor
    rows: Tensor
    valid: Tensor
    length: Tensor
    wanted: Tensor
    counted: Tensor
    weight_scale: Tensor
    resident: Tensor
    resident_mask: Tensor
    resident_count: Tensor
    row_bytes: int
    codec: str = "plain"
    row_center: Tensor | None = None
    far: bool = False
    near: Tensor | None = None
    cache: RowCache | None = None
    wrong: Tensor | None = None
    largest: Tensor | None = None
    regression: Tensor | None = None
    histogram: Tensor | None = None
    tiers: Tensor | None = None
    found_sum: Tensor | None = None
    token: Rows | None = None
    ticket: Tensor | None = None
    sink: int | None = None
    page_head_bytes: int | None = None
    segments: Tensor | None = None

    # What kernels' parameters have the names of, beside the fields (`runtime.resolve`)

    @property
    def row(self) -> int:
        """Blocks that each row of `codes` has room for."""
        return self.codes.shape[1]

    @property
    def table_row(self) -> int:
        """Blocks that each row of `rows` has room for."""
        return self.rows.shape[1]

    @property
    def room(self) -> int:
        """Resident rows that there is room for."""
        return self.resident.shape[2]

    @property
    def rows_head_bytes(self) -> int:
        """Bytes from a KV head's rows of a block to the next head's."""
        return self.page_head_bytes or BLOCK * self.row_bytes

    @property
    def sink_rows(self) -> int:
        """First tokens of a sequence that are resident, 0 outside of an engine's pages."""
        return self.sink or 0

    @property
    def cached(self) -> int:
        """Slots of the row cache per group, 0 without one."""
        return self.cache.capacity if self.cache else 0

    @property
    def cached_rows(self) -> Tensor | None:
        """Rows in the cache."""
        return self.cache.data if self.cache else None

    @property
    def tags(self) -> Tensor | None:
        """Which row each slot of the cache has."""
        return self.cache.tags if self.cache else None

    @property
    def stamps(self) -> Tensor | None:
        """When each slot of the cache was last used."""
        return self.cache.stamps if self.cache else None

    @property
    def clocks(self) -> Tensor | None:
        """Steps that the cache has served."""
        return self.cache.clocks if self.cache else None

    @property
    def lookups(self) -> Tensor | None:
        """Rows that were looked up in the cache, and found."""
        return self.cache.counts if self.cache else None


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
