"""Pages of rows (keys and values) in pinned host memory, for an inference engine such as vLLM.
Kernels read and write them."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.budget import Budget, OverBudgetError, shared_budget
from kvindex_cuda.memory.host_blocks import HostBlocks
from kvindex_cuda.memory.slab_pool import Allocator


class HostPages:
    """Pages of rows in host memory for each layer of a model, `[pages, G, tokens, 2 D]`,
    uninitialized. `close` or the garbage collector frees them.

    Args:
        geometry: Geometry that all layers have.
        layers: Number of layers.
        pages: Number of pages of each layer.
        tokens: Tokens of a page.
        dtype: Dtype of the rows, by default that of the geometry. It is uint8 for rows in FP8.
        allocator: Allocates the memory. The default allocates pinned memory, or ordinary memory if
            the device is a CPU.
        budget: Limit of the memory. The default is the process's budget for pinned memory.

    Attributes:
        rows: The rows of each layer, as tensors on the CPU.
        places: The address by which kernels access the rows of each layer.

    Raises:
        MemoryError: The budget or the memory of the machine is too small. Everything that was
            allocated is freed.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        layers: int,
        pages: int,
        tokens: int,
        dtype: torch.dtype | None = None,
        allocator: Allocator | None = None,
        budget: Budget | None = None,
    ) -> None:
        check.at_least("layers", layers, 1)
        check.at_least("pages", pages, 1)
        device, dtype = geometry.device, geometry.dtype if dtype is None else dtype
        shape = pages, geometry.kv_heads, tokens, geometry.head_dim + geometry.value_dim
        budget = shared_budget() if budget is None else budget
        layer_bytes = prod(shape) * dtype.itemsize
        self.nbytes = layers * layer_bytes
        try:
            self._blocks = HostBlocks(
                device, count=layers, block_bytes=layer_bytes, allocator=allocator, budget=budget
            )
        except OverBudgetError:
            room = budget.room_bytes
            assert room is not None  # without a limit, there would have been room
            raise MemoryError(
                f"pages: got {pages} pages of {tokens} tokens for each of {layers} layers, which "
                f"take {self.nbytes / 1e9:.1f} GB, but {room / 1e9:.1f} GB may be pinned; use up "
                f"to {room // (self.nbytes // pages)} pages"
            ) from None
        try:
            made = [self._blocks.add() for _ in range(layers)]
        except BaseException:
            self.close()
            raise
        self.rows: list[Tensor] = [block.view(dtype).view(shape) for block, _ in made]
        self.places = [place for _, place in made]

    def close(self) -> None:
        """Free the memory, after kernels and copies that may use it have finished."""
        self._blocks.close()
