"""Row cache: rows fetched lately from the host, kept on the device; what a cached row costs.

Per KV head a table of `rows` slots in sets of 4, by a hash of the id. A selected row that lies in
its set is read there; else it is fetched and takes the place of the set's row that was used
longest ago, unless all four serve this very step. Rows of a step are looked up side by side: one
may lose its place to another before it is found (kernels/common/row_cache.cuh), and is fetched.
`attend` decides, reads and fills (kernels/step/attend.cu). All at fixed addresses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_cuda.runtime.constants import WAYS

CAPACITY = 4096
"""Per KV head."""


class RowCache:
    """A cache for `groups` (batch rows times KV heads) of rows of so many bytes.

    capacity: slots per group, a power of two from 4. tags: ids int32 `[groups, capacity]`, -1 for
    none; stamps: the step that used a slot last, twice its number or one more, int32 `[groups,
    capacity]`; clocks: steps so far, int32 `[groups]`, or one that is given, `[1]`, which several
    caches share and somebody else sets (`steps.paged`); counts: rows looked up and found, int32
    `[groups, 2]`, which wrap around; data: uint8 `[groups, capacity, row_bytes]`.
    Raises ValueError for another size.
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
            raise ValueError(f"capacity: got {capacity}, allowed is a power of two from {WAYS}")
        self.capacity, self.row_bytes = capacity, row_bytes

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tags, self.stamps = ints(groups, capacity) - 1, ints(groups, capacity)
        self.clocks = ints(groups) if clock is None else clock
        self.counts = ints(groups, 2)
        self.data = torch.empty((groups, capacity, row_bytes), dtype=torch.uint8, device=device)

    def forget(self, groups: slice = slice(None)) -> None:
        """Ids, of some groups, may stand for other rows from now on. Waits for nothing."""
        self.tags[groups].fill_(-1)

    def hit_rate(self) -> float:
        """Share of the rows looked up so far that were found; 0 before any.

        Waits for the device.
        """
        looked_up, found = self.use()
        return found / looked_up if looked_up else 0.0

    def use(self) -> tuple[int, int]:
        """Rows looked up so far, and found. Waits for the device."""
        looked_up, found = self.counts.sum(0).tolist()
        return looked_up, found

    def nbytes(self) -> int:
        """Bytes on the device."""
        parts: tuple[Tensor, ...] = (self.tags, self.stamps, self.clocks, self.counts, self.data)
        return sum(part.nbytes for part in parts)
