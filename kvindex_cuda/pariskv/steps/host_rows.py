"""Pages of rows (keys and values) in host memory, for an inference engine. Each layer has a cache
of recently used rows on the device.

Codes stay on the device. All layers share one scratch buffer on the device: for the attention of a
prompt, the rows of whole sequences are copied to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.host_pages import HostPages
from kvindex_cuda.memory.page_rows import gather_pages, load_kernels, write_pages
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.memory.row_cache import LookupCounter, RowCache
from kvindex_cuda.pariskv.steps.paged import PagedSteps


class HostRows:
    """Rows of all layers in pinned host memory.

    An engine creates this object before it knows how many pages fit into memory. `open` allocates
    the pages later.

    Args:
        geometry: Geometry that all layers have.
        tokens: Length of the longest sequence.
        page_tokens: Number of tokens per page.
        cached: Number of rows per KV head and layer that the device caches for all sequences
            together. It is a power of two, at least 4.
        fp8: Whether rows are stored in FP8 (e4m3), one byte per number. `open` then needs scales.
        processes: Number of processes on this host that create such an object, for example those
            of tensor parallelism. Each of them may pin its part of the memory that is available
            when this object is created, which must be before the first of them calls `open`.

    Attributes:
        scratch: Copy of a sequence's rows, `[tokens / page_tokens, G, page_tokens, 2 D]`, uint8 if
            they are in FP8.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        tokens: int,
        page_tokens: int,
        cached: int,
        fp8: bool = False,
        processes: int = 1,
    ) -> None:
        self._geometry, self._cached, self._fp8 = geometry, cached, fp8
        self._tokens, self._page_tokens = check.at_least("tokens", tokens, 1), page_tokens
        g, device = geometry, geometry.device
        count, width = -(-tokens // page_tokens), g.head_dim + g.value_dim
        shape = count, g.kv_heads, page_tokens, width
        # zeros, because attention may multiply masked rows
        self.scratch = torch.zeros(shape, dtype=torch.uint8 if fp8 else g.dtype, device=device)
        self._numbers = torch.arange(count, dtype=torch.int32, device=device)
        self._clock = torch.zeros(1, dtype=torch.int32, device=device)
        self._budget: Budget | None = None  # the whole memory
        if check.at_least("processes", processes, 1) > 1:
            limit = shared_budget().limit_bytes
            self._budget = Budget(None if limit is None else limit // processes)
        self.caches: list[RowCache] = []
        self._host: HostPages | None = None
        self._pages: Pages | None = None

    @property
    def pages(self) -> Pages:
        """The pages of all layers. Raises RuntimeError if `open` has not been called."""
        if self._pages is None:
            raise RuntimeError("rows on the host: no pages are allocated; call open() first")
        return self._pages

    @property
    def opened(self) -> bool:
        """True if `open` has allocated the pages."""
        return self._pages is not None

    def check_layer(self, geometry: Geometry, *, fp8: bool = False) -> None:
        """Raise ValueError if a layer's geometry differs from that of the other layers, or if only
        some layers have rows in FP8."""
        if fp8 is not self._fp8:
            raise ValueError(f"FP8: got {fp8}, but all layers must have {self._fp8}")
        if geometry != self._geometry:
            raise ValueError(f"geometry: got {geometry}, but all layers must have {self._geometry}")

    def add_layer(self) -> int:
        """Allocate the row cache of one more layer, and return the number of this layer."""
        g = self._geometry
        row_bytes = (g.head_dim + g.value_dim) * self.scratch.element_size()
        made = RowCache(g.kv_heads, row_bytes, g.device, self._cached, clock=self._clock)
        self.caches.append(made)
        return len(self.caches) - 1

    def open(
        self,
        config: ParisKVConfig,
        codes: Sequence[Tensor],
        *,
        scales: Sequence[tuple[Tensor, Tensor]] | None = None,
        **options: Any,
    ) -> PagedSteps:
        """Pin memory for as many pages of rows as there are pages of codes. Return an object that
        runs decode steps over these pages.

        Frees the pages of an earlier call first.

        Args:
            config: Configuration of the index.
            codes: Codes of each layer, as in `Pages`.
            scales: If rows are in FP8: scales of each layer, as in `Pages`.
            **options: Further arguments of `PagedSteps`.

        Raises:
            MemoryError: The host has too little memory for the pages. The message states how much
                is needed.
            ValueError: See `PagedSteps`.
        """
        if len(codes) != len(self.caches):
            raise ValueError(
                f"codes: got {len(codes)} layers, but add_layer added {len(self.caches)}"
            )
        self.close()
        self._host = HostPages(
            self._geometry,
            layers=len(self.caches),
            pages=len(codes[0]),
            tokens=self._page_tokens,
            dtype=self.scratch.dtype,
            budget=self._budget,
        )
        try:
            pages = Pages(codes, self._host.rows, self._host.places, scales)
            options |= dict(tokens=self._tokens, caches=self.caches)
            made = PagedSteps(self._geometry, config, pages, **options)
            g = self._geometry
            load_kernels(g.device, fp8=g.dtype if self._fp8 else None)
        except BaseException:
            self.close()
            raise
        self._pages = pages
        return made

    def close(self) -> None:
        """Free the pinned memory. All kernels that read it must have finished."""
        for cache in self.caches:
            cache.forget()
        self._pages = None
        if self._host is not None:
            self._host.close()
            self._host = None

    def lookup_counter(self) -> LookupCounter:
        """Return an object that reads the lookups in the row caches of all layers."""
        return LookupCounter(self.caches)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write the keys and values of new tokens to a layer's pages (see `write_pages`)."""
        write_pages(self.pages, layer, keys, values, slots, cache=self.caches[layer])

    def gather(
        self,
        layer: int,
        *,
        tables: Tensor,
        lengths: Tensor,
        starts: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Copy the rows of sequences to the buffer `scratch`, and return this buffer.

        The next call overwrites the buffer. The method `table` returns which pages of the buffer
        belong to each sequence. See `gather_pages` for the other arguments.

        Args:
            tables: Pages of each sequence, int32 `[R, width]`.

        Raises:
            ValueError: `scratch` has fewer than `R · width` pages.
        """
        count, width = tables.shape
        if count * width > len(self.scratch):
            raise ValueError(
                f"tables: got {count} sequences of {width} pages, but the buffer `scratch` has "
                f"room for {len(self.scratch)} pages"
            )
        copy = self.scratch[: count * width].view(count, width, *self.scratch.shape[1:])
        gather_pages(
            self.pages,
            layer,
            copy,
            tables=tables,
            lengths=lengths,
            starts=starts,
            keys=keys,
            values=values,
        )
        return self.scratch

    def table(self, count: int, width: int) -> Tensor:
        """Return which pages of the buffer `scratch` contain the rows that `gather` has copied, for
        `count` sequences of `width` pages, int32 `[count, width]`."""
        return self._numbers[: count * width].view(count, width)

    def explain(self) -> str:
        """Describe in one sentence where codes and rows are stored."""
        size = {name: f"{nbytes / 1e9:.2f} GB" for name, nbytes in self.nbytes().items()}
        pages = 0 if self._host is None else len(self._host.rows[0])
        return (
            f"rows of {pages} pages are on the host, {size['host']} pinned"
            f"{' (FP8)' if self._fp8 else ''}; on the device "
            f"{size['device']} in addition to the codes: {self._cached} rows per KV head and "
            f"layer, and a copy of {self._tokens} tokens of a layer for prompts"
        )

    def nbytes(self) -> dict[str, int]:
        """Return the bytes on the device (without codes) and in pinned memory, under the keys
        "device" and "host"."""
        device = self.scratch.nbytes + sum(cache.nbytes() for cache in self.caches)
        return dict(device=device, host=0 if self._host is None else self._host.nbytes)
