"""Buffers of steps of several sizes, which take turns in the same memory."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Arena:
    """Gives the tensors that a step asks for, in the order in which it asks.

    Whoever asks anew, from `begin` on, gets the same memory, as far as that has room; else new one,
    and the former owner keeps what it has. So make the largest first. Zeros are zeros when they are
    new: later ones are what the step before has left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._buffers: list[Tensor] = []

    def begin(self) -> Arena:
        """Who asks from here on may have what others were given."""
        self._next = 0
        return self

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor that was zeros when its memory was taken."""
        return self._tensor(shape, dtype, zeros=True)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that holds anything."""
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
