"""Cache of pinned host memory: when an index is deleted, its memory stays pinned and is reused by
the next index.

Pinning takes time, up to half a second per GB. Freed slabs (ranges of memory) stay pinned in the
cache until a slab of the same size is needed. `release_pinned` returns the memory to the operating
system. A background thread can pin memory before the first token of an index arrives.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from kvindex.core import check, forks
from kvindex_cuda.memory.async_copy import PinnedAllocator
from kvindex_cuda.memory.budget import Budget, shared_budget
from kvindex_cuda.memory.host_memory import Latch
from kvindex_cuda.memory.slab_pool import Allocator, Announcement, Slab


@dataclass(frozen=True)
class _Pinning:
    """A slab that the background thread is pinning. `ended` is opened when it is in the cache, or
    when pinning it has failed."""

    owner: CachingAllocator
    nbytes: int
    ended: Latch = field(default_factory=Latch)


class SlabCache:
    """Stores unused slabs (ranges of pinned memory) of several allocators. One budget limits unused
    slabs and slabs in use together.

    The cache is thread-safe. Finalizers may call it, and Python may run a finalizer in any thread
    whenever an object is made. Therefore, loops iterate over copies of the cache's collections.

    budget: The budget from which slabs in use are taken.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._slabs: dict[int, _Lent] = {}  # address -> slab, the oldest first
        self._kept = 0  # bytes
        self._lock = forks.lock(self, "_lock")  # reentrant: a garbage-collected pool frees slabs
        self._expected: dict[Announcement, CachingAllocator] = {}  # the oldest announcement first
        self._pinning: _Pinning | None = None
        self._worker: threading.Thread | None = None

    @property
    def kept_bytes(self) -> int:
        """Total size in bytes of the unused slabs (ranges of pinned memory) in the cache."""
        return self._kept

    def keep(self, slab: _Lent) -> None:
        """Put an unused slab (a range of pinned memory) into the cache."""
        with self._lock:
            self._slabs[slab.device_address] = slab
            self._kept += slab.nbytes

    def take(self, allocator: Allocator, nbytes: int) -> _Lent | None:
        """Return a slab of `nbytes` bytes from the cache and remove it from there. The slab must
        have been allocated by `allocator`; of several such slabs, take the newest.

        If there is none, but the background thread is pinning one, wait for it. Return None if
        there is neither.
        """
        while True:
            with self._lock:
                for slab in reversed(list(self._slabs.values())):
                    if slab.nbytes == nbytes and slab.owner.allocator is allocator:
                        return self._pop(slab)
                pinning, worker = self._pinning, self._worker
            if pinning is None or (pinning.owner.allocator, pinning.nbytes) != (allocator, nbytes):
                return None
            if worker is None or not worker.is_alive():  # as in a child process after `os.fork`
                return None
            pinning.ended.wait()

    def _pop(self, slab: _Lent) -> _Lent:
        self._kept -= slab.nbytes
        return self._slabs.pop(slab.device_address)

    def expect(self, owner: CachingAllocator, announcement: Announcement) -> None:
        """Start to pin the slabs (ranges of pinned memory) that a caller will soon need from
        `owner`.

        A background thread pins the missing slabs in the order of the announcements. It stops when
        the budget is used up or when an allocation fails. The next call starts it again. This
        method does not wait, and does not fail.
        """
        worker = threading.Thread(target=self._pin, name="kvindex-pin", daemon=True)
        try:
            with self._lock:
                self._expected.setdefault(announcement, owner)
                if _works(self._worker):
                    return
                self._worker, self._pinning = worker, None
            worker.start()  # without the lock, for which a finalizer in the new thread may wait
        except BaseException as error:
            if self._worker is worker:
                self._worker = None
            if not isinstance(error, RuntimeError) or worker.ident is not None:
                raise  # a KeyboardInterrupt after the thread has started may leave a RuntimeError

    def _pin(self) -> None:
        while (pinning := self._next()) is not None:
            slab: _Lent | None = None
            with suppress(Exception):  # the caller that needs the slab will raise the error
                memory = pinning.owner.allocator.allocate(pinning.nbytes)
                slab = _Lent(memory, pinning.nbytes, pinning.owner)
            with self._lock:
                if slab is None:
                    self._worker = None
                else:
                    self.keep(slab)
                self._pinning = None
            pinning.ended.open()

    def _next(self) -> _Pinning | None:
        """Return the next slab that this background thread should pin, or None if it should end: no
        more slabs are needed or allowed, or an allocation has failed."""
        with self._lock:
            if self._worker is not threading.current_thread():
                return None
            for announcement in list(self._expected):
                if announcement.count <= 0:
                    del self._expected[announcement]
            limit = self._budget.limit_bytes
            room = None if limit is None else limit - self._kept - self._budget.used_bytes
            cached = Counter([(slab.owner, slab.nbytes) for slab in list(self._slabs.values())])
            for announcement, owner in list(self._expected.items()):
                nbytes = announcement.nbytes
                cached[owner, nbytes] -= announcement.count
                if cached[owner, nbytes] < 0 and (room is None or nbytes <= room):
                    self._pinning = _Pinning(owner, nbytes)
                    return self._pinning
            self._worker = None
        return None

    def make_room(self) -> None:
        """Free unused slabs, oldest first, until unused slabs and slabs in use together fit into
        the budget."""
        limit = self._budget.limit_bytes
        if limit is not None:
            self.release(max(0, limit - self._budget.used_bytes))

    def release(self, keep_bytes: int = 0) -> int:
        """Free unused slabs, oldest first, until at most `keep_bytes` bytes of unused slabs are
        left. Return the number of bytes freed."""
        freed = 0
        while True:
            with self._lock:
                slabs = list(self._slabs.values())
                if not slabs or self._kept <= keep_bytes:
                    return freed
                slab = self._pop(slabs[0])
            slab.slab.free()
            freed += slab.nbytes


def _works(thread: threading.Thread | None) -> bool:
    """Return True if a thread will start or is running. A child process after `os.fork` has none of
    the threads of its parent."""
    return thread is not None and (thread.ident is None or thread.is_alive())


@dataclass(frozen=True)
class CachingAllocator:
    """An `Allocator` that reuses slabs from a cache, and returns freed slabs to the cache."""

    allocator: Allocator
    cache: SlabCache

    @property
    def on_host(self) -> bool:
        """True if the slabs are in host memory."""
        return self.allocator.on_host

    def expect(self, announcement: Announcement) -> None:
        """Start to pin the slabs (ranges of pinned memory) of an announcement in the background.
        Does not wait."""
        self.cache.expect(self, announcement)

    def allocate(self, nbytes: int) -> Slab:
        """Return a slab of `nbytes` bytes, cached or new. Raises the errors of the wrapped
        allocator.

        If a background thread is pinning such a slab, wait for it instead of pinning another one.
        Cached slabs are freed if a new slab would exceed the budget, or if the machine has no
        memory left.
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
    """A slab that returns to a cache when it is freed."""

    slab: Slab
    nbytes: int
    owner: CachingAllocator

    def view(self, nbytes: int) -> Tensor:
        """Return the slab's bytes, uint8 `[nbytes]`."""
        return self.slab.view(nbytes)

    @property
    def device_address(self) -> int:
        """Address by which kernels access the slab."""
        return self.slab.device_address

    def settle(self) -> None:
        """Wait until all kernels and copies that may use the slab have finished."""
        self.slab.settle()

    def free(self) -> None:
        """Return the slab to the cache, after kernels and copies that may use it have finished."""
        self.slab.settle()
        self.owner.cache.keep(self)


@lru_cache(maxsize=1)
def shared_cache() -> SlabCache:
    """Return the cache of pinned memory that the whole process shares."""
    return SlabCache(shared_budget())


@lru_cache
def pinned(device: torch.device) -> CachingAllocator:
    """Return the caching allocator of pinned memory for a CUDA device. Raises the errors of
    `PinnedAllocator`."""
    return CachingAllocator(PinnedAllocator(device), shared_cache())


def release_pinned(keep_bytes: int = 0) -> int:
    """Unpin and free memory that no index uses.

    Args:
        keep_bytes: Bytes that may stay pinned for the next prompt.

    Returns:
        The bytes that were freed.
    """
    return shared_cache().release(check.at_least("keep_bytes", keep_bytes, 0))
