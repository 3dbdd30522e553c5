"""Slab pool: memory in slabs, pinned one ahead of need, cut into blocks of equal size.

Locks: a pool is used by one thread; its worker hands over through atomic operations of deques
alone, and `close`, which the garbage collector may run anywhere, waits for nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvindex.core import check

SHARE = 0.9
"""Of the memory available when the first store is made: what all may pin."""


class Slab(Protocol):
    """A stretch of memory that a GPU can read; addresses are multiples of 16."""

    def view(self, nbytes: int) -> Tensor:
        """Its bytes, uint8 `[nbytes]`, on the host or on the device; valid until `free`."""
        ...

    @property
    def device_address(self) -> int:
        """Where kernels find it."""
        ...

    def free(self) -> None:
        """Give it back; called once, after which it is not read."""
        ...


class Allocator(Protocol):
    """Where slabs come from; called from several threads."""

    @property
    def far(self) -> bool:
        """Whether a GPU reads them over a bus: memory of the host, of which there is a budget."""
        ...

    def allocate(self, nbytes: int) -> Slab:
        """A slab of `nbytes`, whatever it holds. May raise anything."""
        ...


@dataclass(frozen=True)
class DeviceSlab:
    """Memory that torch gives, uint8 `[bytes]`; a `Slab`."""

    memory: Tensor

    @property
    def device_address(self) -> int:
        """Where kernels find it."""
        return self.memory.data_ptr()

    def view(self, nbytes: int) -> Tensor:
        """Its bytes, uint8 `[nbytes]`."""
        return self.memory[:nbytes]

    def free(self) -> None:
        """Wait for kernels and copies in flight: torch gives it to others with the last view."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)


@dataclass(frozen=True)
class DeviceAllocator:
    """Slabs of a compute device; an `Allocator`."""

    device: torch.device
    far: ClassVar[bool] = False

    def allocate(self, nbytes: int) -> DeviceSlab:
        """A slab of `nbytes`. Raises torch.OutOfMemoryError."""
        return DeviceSlab(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


def host_view(address: int, nbytes: int) -> Tensor:
    """Bytes of host memory, uint8 `[nbytes]`."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Budget:
    """A limit in bytes over all pools that share it; None: no limit. Safe between threads."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = None if limit_bytes is None else check.at_least("limit", limit_bytes, 0)
        self._used = 0
        self._lock = threading.RLock()  # again by its own thread, where a collected pool gives

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._used

    def try_take(self, nbytes: int) -> bool:
        """Take `nbytes`, if that many are left."""
        with self._lock:
            fits = self.limit_bytes is None or self._used + nbytes <= self.limit_bytes
            self._used += nbytes if fits else 0
            return fits

    def take(self, nbytes: int) -> None:
        """Take `nbytes`. Raises MemoryError if fewer are left, and takes none."""
        if not self.try_take(nbytes):
            raise MemoryError(
                f"host store: needs {nbytes} bytes more, {self._used} are in use, the limit is "
                f"{self.limit_bytes}"
            )

    def give(self, nbytes: int) -> None:
        """Give back `nbytes`."""
        with self._lock:
            self._used -= nbytes


@lru_cache(maxsize=1)
def shared_budget() -> Budget:
    """The process's: 90% of what is available at the first call, no limit where that is unknown."""
    available = available_bytes()
    return Budget(None if available is None else int(SHARE * available))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that the machine can give, or None where Linux does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


class Pool:
    """Blocks of `block_bytes`, numbered from 0; a number stays at its address until `close`.

    slab_blocks: blocks in a slab.
    """

    def __init__(
        self, block_bytes: int, slab_blocks: int, allocator: Allocator, budget: Budget
    ) -> None:
        self.slab_blocks = slab_blocks
        self.block_bytes = block_bytes
        self._slab_bytes = block_bytes * slab_blocks
        self._allocator, self._budget = allocator, budget
        self._views: list[Tensor] = []  # uint8 [slab_blocks, block_bytes] of each slab
        self._addresses: list[int] = []  # on the device
        self._free: list[int] = []  # ascending, so that what is taken together lies together
        self._held: deque[Slab] = deque()  # what close frees
        self._ready: deque[Slab] = deque()  # pinned by the worker, not yet numbered
        self._worker: threading.Thread | None = None
        self._error: Exception | None = None
        self._closed = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all slabs."""
        return len(self._held) * self._slab_bytes

    def view(self, slab: int) -> Tensor:
        """Uint8 `[slab_blocks, block_bytes]`: blocks from `slab · slab_blocks` on.

        Raises RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("host store: its memory has been freed")
        return self._views[slab]

    def device_address(self, block: int) -> int:
        """Where kernels find the block."""
        slab, inside = divmod(block, self.slab_blocks)
        return self._addresses[slab] + inside * self.block_bytes

    def take(self, count: int) -> list[int]:
        """Numbers of `count` blocks, ascending; pins what is missing, after waiting for the worker.

        Raises MemoryError beyond the budget, MemoryError or RuntimeError if pinning fails here or
        has failed on the worker; then nothing is taken and no memory kept.
        """
        self._adopt()
        if len(self._free) < count:
            self._join()
        missing = count - len(self._free)
        if missing > 0:
            self._grow(-(-missing // self.slab_blocks))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: list[int]) -> None:
        """Take back blocks, for reuse."""
        self._free = sorted(self._free + blocks)

    def ahead(self) -> None:
        """Let a worker pin a slab if less than one is free, and the budget allows. Never fails."""
        if self._worker is not None and self._worker.is_alive():
            return
        self._adopt()
        if len(self._free) >= self.slab_blocks or self._error is not None:
            return
        if not self._budget.try_take(self._slab_bytes):
            return  # the append that needs it will say so
        self._worker = threading.Thread(target=self._pin, name="kvindex-pin", daemon=True)
        try:
            self._worker.start()
        except RuntimeError:  # no more threads: whoever needs memory pins it
            self._worker = None
            self._budget.give(self._slab_bytes)

    def settle(self) -> None:
        """Wait for the worker."""
        if self._worker is not None:
            self._worker.join()

    def close(self) -> None:
        """Free every slab, now or (the one being pinned) as soon as the worker has it."""
        self._closed = True
        self._drain()

    def _grow(self, slabs: int) -> None:
        self._budget.take(slabs * self._slab_bytes)
        new: list[Slab] = []
        try:
            for _ in range(slabs):
                new.append(self._allocated())
        except BaseException:
            for slab in new:
                slab.free()
            self._budget.give(slabs * self._slab_bytes)
            raise
        self._held.extend(new)
        self._ready.extend(new)
        self._adopt()

    def _allocated(self) -> Slab:
        try:
            return self._allocator.allocate(self._slab_bytes)
        except Exception as error:
            kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
            what = "host store: cannot pin" if self._allocator.far else "device store: no room for"
            raise kind(f"{what} {self._slab_bytes} bytes: {error}") from error

    def _pin(self) -> None:
        """On the worker."""
        try:
            slab = self._allocated()
        except Exception as error:
            self._budget.give(self._slab_bytes)
            self._error = error
            return
        self._held.append(slab)
        self._ready.append(slab)
        if self._closed:
            self._drain()

    def _join(self) -> None:
        self.settle()
        self._adopt()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _adopt(self) -> None:
        """Number the slabs that are ready."""
        while self._ready:
            slab = self._ready.popleft()
            first = len(self._views) * self.slab_blocks
            self._views.append(slab.view(self._slab_bytes).view(self.slab_blocks, -1))
            self._addresses.append(slab.device_address)
            self._free.extend(range(first, first + self.slab_blocks))

    def _drain(self) -> None:
        with ExitStack() as stack:  # every slab is freed, though one may fail
            while self._held:
                try:
                    slab = self._held.pop()
                except IndexError:  # the other thread had it
                    break
                stack.callback(self._budget.give, self._slab_bytes)
                stack.callback(slab.free)
