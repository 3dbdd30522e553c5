"""Limit the GPU memory for rows (keys and values of tokens).

The limit applies to a store that can place rows in GPU memory or in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from kvindex.core import check
from kvindex_cuda.memory.budget import Budget

FRACTION = 0.6
"""Default fraction of the device's free memory for rows.

The codes of an index take 15% as many bytes as its rows with the codec `plain`, and 30% as many as
with `int8` or `fp8`. Codes are always on the device, also those of rows on the host, and take 10%
to 20% of the memory that was free. The rest is left for the model."""


class DeviceBudget(Budget):
    """Limits the GPU memory that rows (keys and values) use. Rows may use at most a fraction of the
    memory that is available to them: the memory that they already use, plus the free memory of the
    device.

    The free memory is read each time memory is requested. So memory for the model, for codes or for
    another process reduces the limit. Rows that are already stored keep their memory. The rows of
    all stores on a device are counted together, while each store has its own `fraction`, in (0, 1].

    free: A function that returns the free bytes of a device.
    """

    def __init__(
        self,
        device: torch.device,
        fraction: float | None = None,
        free: Callable[[torch.device], int] | None = None,
    ) -> None:
        super().__init__()
        self.fraction = (
            FRACTION if fraction is None else check.within("device_fraction", fraction, 0, 1)
        )
        self._device, self._free = device, free or free_bytes
        self._rows = rows_of(device)

    @property
    def used_bytes(self) -> int:
        """Number of bytes that the rows of all stores on this device take."""
        return self._rows.used_bytes

    def try_take(self, nbytes: int) -> bool:
        """Take `nbytes` bytes from the budget and return True, or return False if fewer bytes are
        left."""
        used = self._rows.used_bytes
        if used + nbytes > self.fraction * (self._free(self._device) + used):
            return False
        return self._rows.try_take(nbytes)

    def give(self, nbytes: int) -> None:
        """Give `nbytes` bytes back to the budget."""
        self._rows.give(nbytes)


@lru_cache
def rows_of(device: torch.device) -> Budget:
    """Return the object that counts the bytes of all rows on a device. All stores on the device
    share this counter."""
    return Budget()


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, including memory that torch has reserved but does not
    use."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
