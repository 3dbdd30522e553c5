"""`TokenRing`: passes tokens from the device to the host, which reads them a few steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvindex.core.transaction import in_plain_torch

AHEAD = 4
"""Number of decode steps that are launched before a token is read. The host delays the device only
if it is late by more than this number of steps."""


class TokenRing:
    """A queue of up to `AHEAD + 1` tensors of tokens that the device copies to pinned memory.

    Args:
        batch: Number of tokens in each tensor, `B`.
        device: The device of the tokens.
        wait: Waits for a CUDA event.
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
        """Return the number of tensors that are in the queue."""
        return len(self._coming)

    def put(self, tokens: Tensor) -> None:
        """Copy tokens int64 `[B]` to the host, in the current stream."""
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        self._slots[slot].copy_(tokens, non_blocking=True)
        event = torch.cuda.current_stream(tokens.device).record_event() if self._pinned else None
        self._coming.append((slot, event))

    def take(self) -> Tensor:
        """Wait for the oldest tokens int64 `[B]`, and return them on the CPU."""
        slot, event = self._coming.popleft()
        if event is not None:
            self._wait_for(event)
        return self._slots[slot].clone()

    def wait(self) -> None:
        """Wait for all tokens, and drop them."""
        while self._coming:
            self.take()
