"""`TokenRing`: copies chosen tokens to the host asynchronously; the host reads them a few decode
steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvindex.core.transaction import in_plain_torch

AHEAD = 4
"""Number of decode steps that the host launches before it reads the token of the first of them.

The device does not have to wait for the host while the host is at most this number of steps late.
"""


class TokenRing:
    """A queue of up to `AHEAD + 1` token tensors in pinned memory, which the device fills.

    Args:
        batch: Number of tokens in each tensor, `B`: one per sequence.
        device: The device of the tokens.
        wait: Function that blocks the host until a CUDA event has occurred.
    """

    @in_plain_torch
    def __init__(
        self,
        batch: int,
        device: torch.device,
        wait: Callable[[torch.cuda.Event], None] = lambda event: event.synchronize(),
    ) -> None:
        self._wait_for = wait
        self._pinned = device.type == "cuda"
        shape = (AHEAD + 1, batch)
        self._slots = torch.empty(shape, dtype=torch.int64, pin_memory=self._pinned)
        self._next = 0
        self._coming: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Return the number of token tensors in the queue."""
        return len(self._coming)

    def put(self, tokens: Tensor) -> None:
        """Add tokens int64 `[B]` to the queue: copy them to the host in the current stream."""
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        self._slots[slot].copy_(tokens, non_blocking=True)
        event = torch.cuda.current_stream(tokens.device).record_event() if self._pinned else None
        self._coming.append((slot, event))

    def take(self) -> Tensor:
        """Remove the oldest tokens from the queue, wait for their copy, and return them: int64
        `[B]`, on the CPU."""
        slot, event = self._coming.popleft()
        if event is not None:
            self._wait_for(event)
        return self._slots[slot].clone()

    def wait(self) -> None:
        """Wait for all copies in the queue, and discard the tokens."""
        while self._coming:
            self.take()
