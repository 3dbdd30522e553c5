"""Buffers for decode steps of several batch sizes. Steps never run at the same time, so their
buffers share memory."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Arena:
    """Allocates the buffers of several decode steps such that all of them use the same memory.

    Call `begin` before allocating the buffers of each decode step. The n-th buffer of a step reuses
    the memory of the n-th buffer of earlier steps if that memory is large enough. Otherwise it gets
    new memory, and earlier steps keep theirs. So allocate the buffers of the largest step first.

    `zeros` clears memory only when it is first allocated. In reused memory, a later decode step
    finds what an earlier one has written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._buffers: list[Tensor] = []

    def begin(self) -> Arena:
        """Start allocating the buffers of another decode step: the next tensor returned becomes
        that step's first buffer."""
        self._next = 0
        return self

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the next buffer of this step. It was zero when its memory was allocated, but may
        have been used since."""
        return self._tensor(shape, dtype, zeros=True)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the next buffer of this step. Its contents are undefined."""
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
