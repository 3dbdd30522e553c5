"""Allocates buffers for decode steps of several batch sizes. The buffers share memory, because
these steps never run at the same time."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Arena:
    """Allocates the buffers of decode steps, and gives later steps the memory of earlier ones.

    Call `begin` before a step allocates its buffers. The step's n-th tensor then uses the memory of
    the previous step's n-th tensor if that memory is large enough; otherwise it gets new memory,
    and the previous step keeps its own. So create the largest step first.

    `zeros` clears memory only when the memory is allocated. A later step finds there the values
    that an earlier step has written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._buffers: list[Tensor] = []

    def begin(self) -> Arena:
        """Begin the allocations of another step. The next tensor is the first one of that step."""
        self._next = 0
        return self

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return a tensor for the present step. Its memory was set to zero when it was
        allocated."""
        return self._tensor(shape, dtype, zeros=True)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized tensor for the present step."""
        return self._tensor(shape, dtype, zeros=False)

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, zeros: bool) -> Tensor:
        place, count = self._next, prod(shape)
        self._next += 1
        known = self._buffers[place] if place < len(self._buffers) else None
        if known is None or known.dtype != dtype or known.numel() < count:
            make = torch.zeros if zeros else torch.empty
            known = make((count,), dtype=dtype, device=self._device)
            self._buffers[place : place + 1] = [known]
        return known[:count].view(shape)
