"""Slab cache: pinned slabs that outlive an index, so that the next prompt pins none.

Pinning is slow: a host gives some 3 GB/s. A slab that is freed waits here, pinned, for whoever
needs as many bytes next; `release_pinned` gives the memory back. What will be needed can be pinned
here on a thread, before the index that needs it has its first token.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvindex.core import check, forks
from kvindex_cuda.memory.async_copy import PinnedAllocator
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.slab_pool import Allocator, Slab


class SlabCache:
    """Slabs that nobody uses, of several allocators; with those in use within one budget.

    budget: of the slabs in use. Safe between threads, and in a finalizer, which the collector may
    run wherever a thread makes an object: what is looped over are copies.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._slabs: dict[int, _Lent] = {}  # by address, the oldest first
        self._kept = 0  # bytes
        self._lock = forks.lock(
            self, "_lock"
        )  # again by its own thread, where a collected pool frees
        self._expected: dict[tuple[CachingAllocator, int], int] = {}  # slabs of so many bytes
        self._worker: threading.Thread | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of all slabs here."""
        return self._kept

    def keep(self, slab: _Lent) -> None:
        """Take a slab that nobody uses any more."""
        with self._lock:
            self._slabs[slab.device_address] = slab
            self._kept += slab.nbytes

    def take(self, allocator: Allocator, nbytes: int) -> _Lent | None:
        """The newest slab of an allocator that has so many bytes, if there is one."""
        with self._lock:
            for slab in reversed(list(self._slabs.values())):
                if slab.nbytes == nbytes and slab.owner.allocator is allocator:
                    return self._pop(slab)
        return None

    def _pop(self, slab: _Lent) -> _Lent:
        self._kept -= slab.nbytes
        return self._slabs.pop(slab.device_address)

    def expect(self, owner: CachingAllocator, nbytes: int, count: int) -> None:
        """So many more slabs will be asked for, or fewer: a thread pins what is not here.

        As long as the budget has room and the machine memory. Never fails.
        """
        with self._lock:
            before = self._expected.get((owner, nbytes), 0)
            self._expected[owner, nbytes] = max(0, before + count)
            if count <= 0 or self._worker is not None:
                return
            worker = threading.Thread(target=self._pin, name="kvindex-pin", daemon=True)
            self._worker = worker
            try:
                worker.start()
            except RuntimeError:  # no more threads: whoever needs memory pins it
                self._worker = None

    def _pin(self) -> None:
        """On the worker."""
        while (wanted := self._missing()) is not None:
            owner, nbytes = wanted
            try:
                slab = owner.allocator.allocate(nbytes)
            except Exception:  # whoever needs it will say so
                with self._lock:
                    self._expected.clear()
                continue
            self.keep(_Lent(slab, nbytes, owner))

    def _missing(self) -> tuple[CachingAllocator, int] | None:
        """Of which slabs there are fewer than are expected, with room for one; else it is done."""
        with self._lock:
            limit = self._budget.limit_bytes
            room = None if limit is None else limit - self._kept - self._budget.used_bytes
            here = Counter((slab.owner, slab.nbytes) for slab in list(self._slabs.values()))
            for wanted, count in list(self._expected.items()):
                if here[wanted] < count and (room is None or wanted[1] <= room):
                    return wanted
            self._worker = None
        return None

    def make_room(self) -> None:
        """Free the oldest slabs, until those in use and those here are within the budget."""
        limit = self._budget.limit_bytes
        if limit is not None:
            self.release(max(0, limit - self._budget.used_bytes))

    def release(self, keep_bytes: int = 0) -> int:
        """Free the oldest slabs until no more than `keep_bytes` are left; gives the bytes freed."""
        freed = 0
        while True:
            with self._lock:
                if not self._slabs or self._kept <= keep_bytes:
                    return freed
                slab = self._pop(next(iter(self._slabs.values())))
            slab.slab.free()
            freed += slab.nbytes


@dataclass(frozen=True)
class CachingAllocator:
    """An `Allocator` whose slabs go to a cache when they are freed, and come from there."""

    allocator: Allocator
    cache: SlabCache

    @property
    def far(self) -> bool:
        """As of the allocator."""
        return self.allocator.far

    def expect(self, nbytes: int, count: int) -> None:
        """As `Foresees.expect`."""
        self.cache.expect(self, nbytes, count)

    def allocate(self, nbytes: int) -> Slab:
        """A slab of `nbytes`: one that was kept, or a new one. Raises as the allocator.

        What is kept makes room for a new one: before the budget is passed, and where the machine
        has no more.
        """
        kept = self.cache.take(self.allocator, nbytes)
        if kept is not None:
            return kept
        self.cache.make_room()
        try:
            slab = self.allocator.allocate(nbytes)
        except Exception:
            if not self.cache.release():
                raise
            slab = self.allocator.allocate(nbytes)
        return _Lent(slab, nbytes, self)


@dataclass(frozen=True)
class _Lent:
    """A `Slab` that goes back to a cache."""

    slab: Slab
    nbytes: int
    owner: CachingAllocator

    def view(self, nbytes: int) -> Tensor:
        """As of the slab."""
        return self.slab.view(nbytes)

    @property
    def device_address(self) -> int:
        """As of the slab."""
        return self.slab.device_address

    def settle(self) -> None:
        """As of the slab."""
        self.slab.settle()

    def free(self) -> None:
        """Keep it for others, once kernels and copies in flight are done."""
        self.slab.settle()
        self.owner.cache.keep(self)


@lru_cache(maxsize=1)
def shared_cache() -> SlabCache:
    """The process's, of pinned memory."""
    return SlabCache(shared_budget())


@lru_cache
def pinned(device: torch.device) -> CachingAllocator:
    """What pins memory for a CUDA device. Raises as `PinnedAllocator`."""
    return CachingAllocator(PinnedAllocator(device), shared_cache())


def release_pinned(keep_bytes: int = 0) -> int:
    """Give pinned memory that no index uses back to the machine; gives the bytes given back.

    keep_bytes: so many may stay for the next prompt.
    """
    return shared_cache().release(check.at_least("keep_bytes", keep_bytes, 0))
