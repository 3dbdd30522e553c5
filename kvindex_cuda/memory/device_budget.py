"""Device budget: how much of a GPU's memory rows may take that may lie on the host as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from kvindex.core import check
from kvindex_cuda.memory.budget import Budget

SHARE = 0.6
"""By default. Codes of a plain row are 15% of its bytes, of a coded one 30%, and those of rows on
the host are on the device, too: .1 to .2 of what was free; the rest is the model's."""


class DeviceBudget(Budget):
    """Of a device: at most a share of what such rows hold and what is free make together.

    That is looked at when memory is to be taken, so that whatever else takes some (the model,
    codes, another process) leaves less for rows; what they hold already stays. All stores of a
    device count together, each with a share of its own, in (0, 1]. free: bytes that it can give.
    """

    def __init__(
        self,
        device: torch.device,
        share: float | None = None,
        free: Callable[[torch.device], int] | None = None,
    ) -> None:
        super().__init__()
        self.share = SHARE if share is None else check.within("device_share", share, 0, 1)
        self._device, self._free = device, free or free_bytes
        self._rows = rows_of(device)

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back, by all stores of the device."""
        return self._rows.used_bytes

    def try_take(self, nbytes: int) -> bool:
        """Take `nbytes`, if that many are left."""
        used = self._rows.used_bytes
        if used + nbytes > self.share * (self._free(self._device) + used):
            return False
        return self._rows.try_take(nbytes)

    def give(self, nbytes: int) -> None:
        """Give back `nbytes`."""
        self._rows.give(nbytes)


@lru_cache
def rows_of(device: torch.device) -> Budget:
    """What counts such rows of a device."""
    return Budget()


def free_bytes(device: torch.device) -> int:
    """Memory that a CUDA device can give, or that torch has of it and nobody uses."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
