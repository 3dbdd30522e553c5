"""The device tensors of a layer that decode steps read. Their addresses do not change, so that CUDA
graphs can read them."""

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
    """The tensors of a layer that the kernels of a decode step read. They are on the device, and
    their addresses do not change.

    Attributes:
        codes: Addresses of blocks of codes, int64 `[B, S]`.
        rows: Addresses of blocks of rows (keys and values), int64 `[B, S]`.
        valid: One bit per token, int32 `[B, S, 8]`.
        length: Number of tokens in the index, int64 `[1]`, or `[B]` if sequences have different
            lengths (a ragged batch).
        wanted: Number of candidates `C` of each sequence, int32 `[B]`.
        counted: Number of valid keys of each sequence, int32 `[B]`.
        weight_scale: float32 `[B, G]`.
        resident: Rows of sink and window, `[B, G, W, D + Dv]`.
        resident_mask: uint8 `[B, W]`.
        resident_count: How many of the `W` resident rows are in use, int64 `[1]` or `[B]`, as for
            `length`.
        row_bytes: Bytes of a row in a block.
        codec: Codec of rows in blocks, a name in `kvindex.storage.codecs`.
        row_center: Center that was subtracted from coded keys, float32 `[B, G, D]`; None if it is
            0.
        on_host: True if rows are in host memory. Only kernels for latents use this.
        on_device: 1 for blocks of rows on the device, uint8 `[B, S]`; None if no block is on the
            host.
        cache: Cache of rows that were fetched from the host.
        wrong: int32 of one element, which a step sets to 1 if a query is not finite.
        largest: Upper byte of the largest weight in full blocks, int32 `[B, G]`. Steps do not read
            it.
        regression: Matrices that decode the signs, as `step_state.State`.
        histogram: Keys per centroid, int64 `[B, G, M, 256]`, for tiered votes only.
        tiers: The limit of each tier, a number of keys, int64 `[B, 6]`, for tiered votes only.
        found_sum: int64 `[B, G]`, to which a step adds the number of rows it found, or None.
        variances: Largest variance of attention weights (`protocol.ErrorLimit`), float32 `[B, G]`;
            None if every step selects `k` rows.
        limit_lse: `protocol.ErrorLimit.resident_lse`, float32 `[B, H]`, or None.
        found_histogram: int64 `[n + 1]`, which counts how often a step selected each number of rows
            for a KV head (`core.protocol.Attended.histogram`), or None.
        token: Key `[B, G, 1, D]` and value `[B, G, 1, Dv]` of the newest token, contiguous, or
            None. A step with `BaseStep.stages` appends them to the resident rows.
        ticket: A counter for the kernel that appends `token`, int32 `[1]`, 0 between steps.
        sink: Only if rows are in the pages of an inference engine: number of first tokens of a
            searched sequence that are resident. Resident rows (sink and window) are then in the
            blocks of `rows`. Those of the window come after the `length` tokens that are searched.
        page_head_bytes: Only if rows are in an engine's pages: bytes from one KV head's rows to the
            next head's.
        key_scale: Only if rows are in an engine's pages in FP8: scale of all keys, float32 of one
            element on the device. `codec` is then "fp8", and rows have no scales of their own.
        value_scale: The same for values.
        known: Only if rows are in an engine's pages and their number follows from the expected
            error: whether limits of the error are known, bool `[1]`. Before, all sequences have
            full attention.
        squares: As `known`: squares of the newest value in each KV head and of the output in each
            query head, float32 `[B, G + H]`, which a step writes as long as limits are not known.
        segments: Only if rows are in an engine's pages in host memory: numbers of the blocks of
            `rows` among all pages, int32 `[B, S]`. Then `cache` has one group per KV head, for the
            rows of all sequences.
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
    on_host: bool = False
    on_device: Tensor | None = None
    cache: RowCache | None = None
    wrong: Tensor | None = None
    largest: Tensor | None = None
    regression: Tensor | None = None
    histogram: Tensor | None = None
    tiers: Tensor | None = None
    found_sum: Tensor | None = None
    variances: Tensor | None = None
    limit_lse: Tensor | None = None
    found_histogram: Tensor | None = None
    token: Rows | None = None
    ticket: Tensor | None = None
    sink: int | None = None
    page_head_bytes: int | None = None
    segments: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    known: Tensor | None = None
    squares: Tensor | None = None

    # The following properties have the names of kernel parameters, because `runtime.resolve` finds
    # the arguments of a kernel by name.

    @property
    def row(self) -> int:
        """Largest number of blocks of codes per sequence that fit into the table `codes`."""
        return self.codes.shape[1]

    @property
    def table_row(self) -> int:
        """Largest number of blocks per sequence whose addresses fit into the table `rows`."""
        return self.rows.shape[1]

    @property
    def room(self) -> int:
        """Largest number of resident rows (rows of the sink and the local window) per sequence that
        fit into the tensor `resident`."""
        return self.resident.shape[2]

    @property
    def rows_head_bytes(self) -> int:
        """Distance in bytes between the rows of two KV heads in a block."""
        return self.page_head_bytes or BLOCK * self.row_bytes

    @property
    def sink_rows(self) -> int:
        """Number of tokens at the beginning of each sequence that attention always reads (the
        sink), if the rows are in the pages of an inference engine such as vLLM; otherwise 0."""
        return self.sink or 0

    @property
    def most_found(self) -> int:
        """Number of rows from which on the histogram of the numbers of rows does not distinguish
        them."""
        return 0 if self.found_histogram is None else len(self.found_histogram) - 1

    @property
    def cached(self) -> int:
        """Number of slots per group in the row cache, or 0 without a cache."""
        return self.cache.capacity if self.cache else 0

    @property
    def cached_rows(self) -> Tensor | None:
        """The rows in the row cache, or None without a cache."""
        return self.cache.data if self.cache else None

    @property
    def tags(self) -> Tensor | None:
        """Token id in each slot of the row cache, or None without a cache."""
        return self.cache.tags if self.cache else None

    @property
    def stamps(self) -> Tensor | None:
        """Time stamp of the decode step that last used each slot of the row cache.

        None without a cache (`RowCache.stamps`).
        """
        return self.cache.stamps if self.cache else None

    @property
    def clocks(self) -> Tensor | None:
        """Number of decode steps that have used the row cache, or None without a cache."""
        return self.cache.clocks if self.cache else None

    @property
    def lookups(self) -> Tensor | None:
        """How many rows were looked up in the row cache, and how many of these it contained, int32
        `[groups, 2]`; None without a cache."""
        return self.cache.counts if self.cache else None


def opened(geometry: Geometry, table: Tensor, contents: Contents) -> State:
    """Return the `State` of a layer that has no tokens yet.

    Args:
        geometry: Sizes of heads and vectors.
        table: Addresses of blocks of codes, int64 `[B, S]`.
        contents: Contents of the index. If they include a histogram (for tiered votes) or a
            regression (a matrix that decodes the signs of keys), the state gets tensors for it.
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
    """Write one number per sequence to `target` `[B]`, without waiting for the device."""
    if len(set(values)) == 1:
        target.fill_(values[0])  # for equal numbers, no pinned memory is needed
        return
    staged = torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cuda":
        staged = staged.pin_memory()
    target.copy_(staged, non_blocking=True)


class FixedCopy:
    """A copy of a tensor at a fixed address. The source may be another tensor in each step."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self._source: Tensor | None = None  # copied last, or None
        self._version: int | None = None  # of the source when it was copied

    def put(self, source: Tensor) -> Tensor:
        """Copy a tensor on the current stream, unless its contents were copied last.

        Another shape gets another address.

        Returns:
            The copy.
        """
        if self.tensor is None or self.tensor.shape != source.shape:
            self.tensor, self._source = torch.empty_like(source.contiguous()), None
        # tensors of `torch.inference_mode` do not count their changes
        version = None if source.is_inference() else source._version
        if self._source is not source or version is None or version != self._version:
            self._source = None  # until the copy is complete
            self.tensor.copy_(source)
            self._source, self._version = source, version
        return self.tensor


def put_valid(state: State, valid: Tensor, first: int, last: int) -> None:
    """Copy flags to the device that say which tokens are valid.

    `valid`, bool `[B, N]`, contains the flags of all tokens. Those of the blocks `first` to
    `last - 1` are copied.
    """
    state.valid[:, first:last].copy_(words_of(valid[:, first * BLOCK :], last - first))


def put_tiers(state: State, histogram: Tensor, bounds: Sequence[Sequence[int]]) -> None:
    """Copy two inputs of tiered votes to the state: the number of keys per centroid (`histogram`),
    and the limit of each tier, which is a number of keys (`bounds`)."""
    if state.histogram is None or state.tiers is None:
        raise ValueError(
            "histogram: got a tensor, allowed is one only if the state was created for tiered votes"
        )
    state.histogram.copy_(histogram)
    for tier, keys in enumerate(zip(*bounds, strict=True)):
        put(state.tiers[:, tier], keys)
