"""A pool of memory blocks with reference counts, for stores that share blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch

from kvindex.core import forks
from kvindex_cuda.memory.slab_pool import Pool, Tier


class CountedPool(Pool):
    """A `Pool` whose blocks may belong to several stores, for example stores with a common prefix.

    Each store that uses the pool passes it a list of all blocks that the store has used (`ledger`
    in the code). These blocks belong to the store until it leaves the pool, even if it no longer
    needs some of them. So a rollback to a checkpoint still finds its blocks. The pool closes when
    the last store leaves. Different threads may use the stores.

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
        """Add a store that uses this pool. `ledger` is the list of all blocks that the store has
        used; some of them may already belong to other stores."""
        with self._lock:
            self._more.update(ledger)
            self._ledgers[id(ledger)] = ledger

    def leave(self, ledger: list[int]) -> None:
        """Remove a store from this pool.

        `ledger` is the list of blocks that the store passed to `join`. An announcement that it made
        as the `announcer` of `expect` is withdrawn. This method never waits for a lock or the
        device, so a finalizer may call it at any time.
        """
        if self._ledgers.pop(id(ledger), None) is None:
            return
        self._left.append(ledger)
        self.expect(0, ledger)
        if not self._ledgers:
            self.close()

    def shared(self, blocks: Sequence[int]) -> list[bool]:
        """Return for each block whether it belongs to more than one store."""
        with self._lock:
            self._count()
            return [self._more[block] > 0 for block in blocks]

    def take(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, ascending.

        Blocks of stores that have left the pool are reused before memory is allocated. Raises the
        errors of `Pool.take`.
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
        """Give up a store's blocks. A block that also belongs to another store stays in use."""
        with self._lock:
            super().give(self._released(blocks))

    def ahead(self) -> None:
        """Start allocating a slab (a range of memory) in the background if few blocks are free
        (`Pool.ahead`). Blocks of stores that have left the pool count as free."""
        with self._lock:
            self._count()
            if len(self._free) + len(self._unread) < self.slab_blocks:
                super().ahead()

    def _count(self) -> None:
        """Free the blocks of stores that have left the pool since the last call."""
        while self._left:
            self._unread += self._released(self._left.popleft())

    def _released(self, blocks: list[int]) -> list[int]:
        """Decrease the number of users of each block by one. Return the blocks that no store uses
        any more."""
        shared = [block for block in blocks if self._more[block] > 0]
        self._more.subtract(shared)
        self._more = +self._more  # drops entries of 0
        return [*set(blocks) - set(shared)]
