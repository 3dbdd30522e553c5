"""Blocks of pinned host memory that one object uses and frees together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.slab_cache import pinned
from kvindex_cuda.memory.slab_pool import Allocator, DeviceAllocator, Slab


@dataclass
class _Held:
    """Slabs, and the bytes that are taken from a budget for them."""

    budget: Budget
    slabs: list[Slab] = field(default_factory=list)
    nbytes: int = 0

    def free(self) -> None:
        """Free everything. After an interruption, call this again."""
        while self.slabs:
            self.slabs[-1].settle()  # waits for the device, so an interruption is likely here
            self.slabs.pop().free()
        nbytes, self.nbytes = self.nbytes, 0
        self.budget.give(nbytes)


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
        nbytes = check.at_least("count", count, 1) * check.at_least("block_bytes", block_bytes, 1)
        self.block_bytes = block_bytes
        self._allocator = _allocator(device) if allocator is None else allocator
        self._held = _Held(shared_budget() if budget is None else budget)
        weakref.finalize(self, self._held.free)
        self._held.budget.take(nbytes)
        self._held.nbytes = nbytes

    def add(self) -> tuple[Tensor, int]:
        """Allocate the next block. Return it, uint8 `[block_bytes]` on the CPU, and the address by
        which kernels access it. Raises MemoryError if the machine has no memory left."""
        self._held.slabs.append(self._allocator.allocate(self.block_bytes))
        slab = self._held.slabs[-1]
        return slab.view(self.block_bytes), slab.device_address

    def close(self) -> None:
        """Free the blocks, after kernels and copies that may use them have finished."""
        self._held.free()


def _allocator(device: torch.device) -> Allocator:
    if device.type != "cuda":
        return DeviceAllocator(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    return pinned(torch.device("cuda", number))
