"""A pool of memory blocks with reference counts, for stores that share blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch

from kvindex.core import forks
from kvindex_cuda.memory.slab_pool import Pool, Tier


class CountedPool(Pool):
    """A `Pool` whose blocks may belong to several stores, for example stores with a common prefix.

    A store is a member of the pool, with a ledger: a list of all blocks that it has used. A block
    in the ledger belongs to the member until the member leaves, so that a rollback to a checkpoint
    still finds the block. The pool closes when the last member leaves. Members may be used by
    different threads.

    device: The device whose kernels read the blocks.
    """

    def __init__(
        self,
        block_bytes: int,
        slab_blocks: int,
        *tiers: Tier,
        device: torch.device,
    ) -> None:
        super().__init__(block_bytes, slab_blocks, *tiers)
        self._device = device
        self._more: Counter[int] = Counter()  # block -> its members beyond the first
        self._ledgers: dict[int, list[int]] = {}  # id -> ledger of a member
        self._left: deque[list[int]] = deque()  # ledgers of members that left, not yet processed
        self._unread: list[int] = []  # free blocks that kernels may still read
        self._lock = forks.lock(
            self, "_lock"
        )  # reentrant: a garbage-collected member calls `leave`

    def join(self, ledger: list[int]) -> None:
        """Add a member with the given ledger. Blocks in the ledger may already belong to other
        members."""
        with self._lock:
            self._more.update(ledger)
            self._ledgers[id(ledger)] = ledger

    def leave(self, ledger: list[int]) -> None:
        """Remove the member with the given ledger. This never waits, so that a finalizer may call
        it at any time."""
        if self._ledgers.pop(id(ledger), None) is None:
            return
        self._left.append(ledger)
        if not self._ledgers:
            self.close()

    def shared(self, blocks: Sequence[int]) -> list[bool]:
        """Return for each block whether it belongs to more than one member."""
        with self._lock:
            self._count()
            return [self._more[block] > 0 for block in blocks]

    def take(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, ascending.

        Blocks of members that have left are reused before memory is allocated. Raises the errors of
        `Pool.take`.
        """
        with self._lock:
            self._count()
            if len(self._free) < count and self._unread:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                super().give(self._unread)
                self._unread = []
            return super().take(count)

    def give(self, blocks: list[int]) -> None:
        """Give up a member's blocks. A block that also belongs to another member stays in use."""
        with self._lock:
            super().give(self._released(blocks))

    def ahead(self) -> None:
        """Start allocating a slab in the background if few blocks are free (`Pool.ahead`). Blocks
        of members that have left count as free."""
        with self._lock:
            self._count()
            if len(self._free) + len(self._unread) < self.slab_blocks:
                super().ahead()

    def _count(self) -> None:
        """Free the blocks of members that have left since the last call."""
        while self._left:
            self._unread += self._released(self._left.popleft())

    def _released(self, blocks: list[int]) -> list[int]:
        """Remove one member from each block, and return the blocks that have no member left."""
        shared = [block for block in blocks if self._more[block] > 0]
        self._more.subtract(shared)
        self._more = +self._more  # drops entries of 0
        return [*set(blocks) - set(shared)]
