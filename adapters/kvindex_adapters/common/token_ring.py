"""`TokenRing`: tokens that the host reads from pinned memory, a few after they were launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvindex.core.transaction import in_plain_torch

AHEAD = 4
"""Tokens that are launched before one is read: a host that is late by less delays none."""


class TokenRing:
    """Tokens on their way to the host, in the order that they were put in: `B` of them each time.

    At most `AHEAD + 1` at once. wait: for an event of the device.
    """

    @in_plain_torch
    def __init__(
        self,
        batch: int,
        device: torch.device,
        wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize,
    ) -> None:
        self._wait_for = wait
        self._pinned = device.type == "cuda"
        shape = (AHEAD + 1, batch)
        self._slots = torch.empty(shape, dtype=torch.int64, pin_memory=self._pinned)
        self._next = 0
        self._coming: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """How many were put in and not taken."""
        return len(self._coming)

    def put(self, tokens: Tensor) -> None:
        """Send tokens int64 `[B]`, when the current stream has come to here."""
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        self._slots[slot].copy_(tokens, non_blocking=True)
        event = torch.cuda.current_stream(tokens.device).record_event() if self._pinned else None
        self._coming.append((slot, event))

    def take(self) -> Tensor:
        """The oldest tokens int64 `[B]`, on the CPU, once they are there."""
        slot, event = self._coming.popleft()
        if event is not None:
            self._wait_for(event)
        return self._slots[slot].clone()

    def wait(self) -> None:
        """Until all of them are there."""
        while self._coming:
            self.take()
