"""Full-precision rows on the compute device, in blocks that never move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.block_store import SLAB_BYTES, HostStore
from kvindex_cuda.memory.layout import MAX_TOKENS
from kvindex_cuda.memory.slab_pool import Budget


@dataclass(frozen=True)
class DeviceSlab:
    """Memory that torch gives, uint8 `[bytes]`; a `kvindex_cuda.memory.slab_pool.Slab`."""

    memory: Tensor

    @property
    def device_address(self) -> int:
        """Where kernels find it."""
        return self.memory.data_ptr()

    def view(self, nbytes: int) -> Tensor:
        """Its bytes, uint8 `[nbytes]`."""
        return self.memory[:nbytes]

    def free(self) -> None:
        """Wait for kernels and copies in flight: torch gives it to others with the last view."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)


@dataclass(frozen=True)
class DeviceAllocator:
    """Slabs of a device."""

    device: torch.device

    def allocate(self, nbytes: int) -> DeviceSlab:
        """A slab of `nbytes`. Raises torch.OutOfMemoryError."""
        return DeviceSlab(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


class DeviceStore(HostStore):
    """`HostStore` on the compute device, for whose memory is large; no budget but the device's."""

    far = False

    def __init__(
        self,
        geometry: Geometry,
        *,
        row_codec: str = "plain",
        max_tokens: int = MAX_TOKENS,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        allocator, budget = DeviceAllocator(geometry.device), Budget()
        sizes = dict(max_tokens=max_tokens, slab_bytes=slab_bytes)
        super().__init__(geometry, row_codec=row_codec, allocator=allocator, budget=budget, **sizes)
