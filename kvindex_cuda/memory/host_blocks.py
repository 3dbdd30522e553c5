"""Blocks of pinned host memory that one object uses and frees together."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.slab_cache import pinned
from kvindex_cuda.memory.slab_pool import Allocator, DeviceAllocator, Slab


class HostBlocks:
    """Blocks of pinned host memory of the same size, uninitialized. `add` allocates them one by
    one. `close` or the garbage collector frees them.

    Args:
        device: The device that accesses the memory.
        count: Number of blocks. The budget for all of them is taken at once.
        block_bytes: Bytes of a block.
        allocator: Allocates the memory. The default allocates pinned memory, or ordinary memory if
            the device is a CPU.
        budget: Limit of the memory. The default is the process's budget for pinned memory.

    Attributes:
        nbytes: Bytes of all blocks.
        close: Frees the blocks, after kernels and copies that may use them have finished.

    Raises:
        OverBudgetError: The budget is too small. (OverBudgetError is a MemoryError.)
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count: int,
        block_bytes: int,
        allocator: Allocator | None = None,
        budget: Budget | None = None,
    ) -> None:
        check.at_least("count", count, 1)
        check.at_least("block_bytes", block_bytes, 1)
        self.nbytes, self._block_bytes = count * block_bytes, block_bytes
        budget = shared_budget() if budget is None else budget
        self._allocator = _allocator(device) if allocator is None else allocator
        budget.take(self.nbytes)
        self._slabs: list[Slab] = []
        self.close: Callable[[], object] = weakref.finalize(
            self, _free, self._slabs, budget, self.nbytes
        )

    def add(self) -> tuple[Tensor, int]:
        """Allocate the next block. Return it, uint8 `[block_bytes]` on the CPU, and the address by
        which kernels access it. Raises MemoryError if the machine has no memory left."""
        slab = self._allocator.allocate(self._block_bytes)
        self._slabs.append(slab)
        return slab.view(self._block_bytes), slab.device_address


def _allocator(device: torch.device) -> Allocator:
    if device.type != "cuda":
        return DeviceAllocator(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    return pinned(torch.device("cuda", number))


def _free(slabs: list[Slab], budget: Budget, nbytes: int) -> None:
    while slabs:
        slabs.pop().free()
    budget.give(nbytes)
