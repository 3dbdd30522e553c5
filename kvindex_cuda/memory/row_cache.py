"""Cache in device memory of rows that were recently fetched from the host.

Each KV head has a table of slots in sets of 4. A hash of a row's token id selects the set. If the
set contains the row, attention reads it from the cache. Otherwise the row is fetched from the host
and replaces the least recently used row of the set, unless all four slots are used in the same
decode step.

The kernel `attend` looks up, reads and fills the cache (kernels/step/attend.cu). It looks up all
rows of a step in parallel, so a row may be replaced that the same step needs; it is then fetched
from the host (kernels/common/row_cache.cuh). All tensors stay at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_cuda.runtime.constants import WAYS

CAPACITY = 4096
"""Default number of slots per KV head."""


class RowCache:
    """A cache of rows with `row_bytes` bytes for each group (a KV head of a sequence).

    Args:
        groups: Number of groups: sequences times KV heads.
        row_bytes: Bytes of a row.
        device: Device of the cache.
        capacity: Maximum number of rows per group, a power of two and at least 4. Other values
            raise ValueError.
        clock: A counter of decode steps, int32 `[1]`, for several caches together. Their owner
            increments it (`steps.paged`). By default, each group counts its own decode steps.

    Attributes:
        tags: Token id in each slot, int32 `[groups, capacity]`, -1 for none.
        stamps: The decode step in which a slot was last used, as twice its number, plus 1 if the
            slot got another row in that step, int32 `[groups, capacity]`.
        clocks: Number of decode steps so far, int32 `[groups]` or `[1]`.
        counts: Number of rows that were looked up, and number of these that were found, int32
            `[groups, 2]`. Both wrap around.
        data: The rows, uint8 `[groups, capacity, row_bytes]`.
    """

    def __init__(
        self,
        groups: int,
        row_bytes: int,
        device: torch.device,
        capacity: int = CAPACITY,
        *,
        clock: Tensor | None = None,
    ) -> None:
        if check.at_least("capacity", capacity, WAYS) & (capacity - 1):
            raise ValueError(
                f"capacity: got {capacity}, allowed is a power of two, at least {WAYS}"
            )
        self.capacity, self.row_bytes = capacity, row_bytes

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tags, self.stamps = ints(groups, capacity) - 1, ints(groups, capacity)
        self.clocks = ints(groups) if clock is None else clock
        self.counts = ints(groups, 2)
        self.data = torch.empty((groups, capacity, row_bytes), dtype=torch.uint8, device=device)

    def forget(self, groups: slice = slice(None)) -> None:
        """Empty the row caches of some groups (KV heads of sequences). This is necessary if the
        keys and values of cached tokens may have changed. The call does not wait for the device."""
        self.tags[groups].fill_(-1)

    def hit_rate(self) -> float:
        """Return the fraction of looked-up rows that the cache contained. Waits for the device."""
        looked_up, found = self.use()
        return found / looked_up if looked_up else 0.0

    def use(self) -> tuple[int, int]:
        """Return the number of rows that were looked up, and the number that the cache contained.
        Waits for the device."""
        looked_up, found = self.counts.sum(0).tolist()
        return looked_up, found

    def nbytes(self) -> int:
        """Return the bytes that the cache takes on the device."""
        parts: tuple[Tensor, ...] = (self.tags, self.stamps, self.clocks, self.counts, self.data)
        return sum(part.nbytes for part in parts)


class LookupCounter:
    """Reads the counters of several row caches from time to time, without waiting for the device.

    Args:
        caches: The caches, which have the same number of groups.
        interval: Number of calls of `read` from one copy of the counters to the next.
    """

    def __init__(self, caches: Sequence[RowCache], interval: int = 64) -> None:
        self._caches, self._interval, self._calls = list(caches), interval, 0
        self._known = torch.stack([cache.counts for cache in self._caches]).cpu().long()
        self._copy = torch.zeros_like(self._known, dtype=torch.int32)
        self._copied: Any = None  # an event that is recorded when `_copy` is complete
        if self._caches[0].counts.is_cuda:
            self._copy = self._copy.pin_memory()

    def read(self) -> tuple[int, int]:
        """Return how many rows have been looked up, and how many of these the caches contained,
        since the previous call that returned numbers other than 0.

        Call this once in each decode step. Most calls return 0 and 0.
        """
        self._calls += 1
        found = self._differences() if self._copied is not None and self._copied.query() else (0, 0)
        if self._calls % self._interval == 0 and self._copied is None:
            counts = torch.stack([cache.counts for cache in self._caches])
            self._copy.copy_(counts, non_blocking=True)
            if not counts.is_cuda:
                return self._differences()
            self._copied = torch.cuda.current_stream(counts.device).record_event()
        return found

    def _differences(self) -> tuple[int, int]:
        self._copied = None
        counts = self._copy.long()
        more = (counts - self._known) % 2**32  # the counters wrap around
        self._known = counts
        looked_up, found = more.sum((0, 1)).tolist()
        return looked_up, found
