"""Pool of memory slabs, which are divided into blocks of equal size. The next slab of host memory
is pinned in advance, on a background thread.

Only one thread may use a pool. The background thread passes slabs to it through deques, whose
operations are atomic, so there are no locks. `close` never waits, because a finalizer may call it
at any time.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvindex_cuda.memory.budget import Budget


class Slab(Protocol):
    """A range of memory that a GPU can read. Addresses are multiples of 16."""

    def view(self, nbytes: int) -> Tensor:
        """Return the slab's bytes, uint8 `[nbytes]`, on the host or the device, valid until
        `free`."""
        ...

    @property
    def device_address(self) -> int:
        """Address by which kernels access the slab."""
        ...

    def settle(self) -> None:
        """Wait until all kernels and copies that may use the slab have finished."""
        ...

    def free(self) -> None:
        """Wait for all kernels and copies that may use the slab, then free it. It must not be used
        afterwards."""
        ...


class Allocator(Protocol):
    """Allocates slabs (ranges of memory). Several threads may call it."""

    @property
    def on_host(self) -> bool:
        """True if slabs are in host memory, which a GPU reads over a bus."""
        ...

    def allocate(self, nbytes: int) -> Slab:
        """Return an uninitialized slab of `nbytes` bytes. This may raise any error."""
        ...


@dataclass(eq=False)
class Announcement:
    """The slabs (ranges of memory) that one caller will soon need. Only this caller changes it.

    Attributes:
        nbytes: Bytes of a slab.
        count: Number of slabs that the caller will still request. 0 withdraws the announcement.
    """

    nbytes: int
    count: int = 0


@runtime_checkable
class Foresees(Protocol):
    """An `Allocator` that can allocate slabs in advance, before they are requested."""

    def expect(self, announcement: Announcement) -> None:
        """Start to allocate the slabs (ranges of memory) of an announcement in the background. Does
        not wait. Call this again after `count` has increased, or to retry after a failure."""
        ...


@dataclass(frozen=True)
class DeviceSlab:
    """A slab (range of memory) that is a torch tensor, uint8 `[bytes]`."""

    memory: Tensor

    @property
    def device_address(self) -> int:
        """Address by which kernels access the slab."""
        return self.memory.data_ptr()

    def view(self, nbytes: int) -> Tensor:
        """Return the slab's bytes, uint8 `[nbytes]`."""
        return self.memory[:nbytes]

    def settle(self) -> None:
        """Wait for all work on the device."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)

    def free(self) -> None:
        """Release the slab: wait for all work on the device.

        Torch can reuse the memory once the last tensor that refers to it is deleted.
        """
        self.settle()


@dataclass(frozen=True)
class DeviceAllocator:
    """Allocates slabs (ranges of memory) on a compute device."""

    device: torch.device
    on_host: ClassVar[bool] = False

    def allocate(self, nbytes: int) -> DeviceSlab:
        """Return a slab of `nbytes` bytes. Raises torch.OutOfMemoryError."""
        return DeviceSlab(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


def host_view(address: int, nbytes: int) -> Tensor:
    """Return the host memory at an address as a tensor, uint8 `[nbytes]`."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True)
class Tier:
    """A kind of memory (device or host), and the budget for it."""

    allocator: Allocator
    budget: Budget


@dataclass(frozen=True)
class _Held:
    slab: Slab
    tier: Tier


class Pool:
    """Memory blocks of `block_bytes` bytes, numbered from 0. A block stays at its address until
    `close`.

    Args:
        block_bytes: Bytes of a block.
        slab_blocks: Number of blocks in a slab.
        *tiers: Kinds of memory, in order of preference. A slab is allocated in the first tier that
            has room; only a failure of the last tier is an error.
    """

    def __init__(self, block_bytes: int, slab_blocks: int, *tiers: Tier) -> None:
        self.slab_blocks = slab_blocks
        self.block_bytes = block_bytes
        self._slab_bytes = block_bytes * slab_blocks
        *self._preferred, self._last = tiers
        self._views: list[Tensor] = []  # uint8 [slab_blocks, block_bytes] of each slab
        self._addresses: list[int] = []  # addresses for kernels
        self._on_host: list[bool] = []  # True for host memory
        self._free: list[int] = []  # ascending, so that blocks taken together are adjacent
        self._held: deque[_Held] = deque()  # slabs that `close` frees
        self._ready: deque[_Held] = deque()  # allocated by the worker, not yet numbered
        self._worker: threading.Thread | None = None
        self._expected = Announcement(self._slab_bytes)
        self._announcer: object = None  # the caller of `expect`
        self._error: Exception | None = None
        self._closed = False

    @property
    def mixed(self) -> bool:
        """True if some blocks may be in device memory and others in host memory."""
        return bool(self._preferred)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all allocated slabs."""
        return len(self._held) * self._slab_bytes

    def view(self, slab: int) -> Tensor:
        """Return a slab by its number, as uint8 `[slab_blocks, block_bytes]`. Its first block has
        the number `slab · slab_blocks`. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("host store: its memory has been freed")
        return self._views[slab]

    def device_address(self, block: int) -> int:
        """Return the address by which kernels access a block."""
        slab, inside = divmod(block, self.slab_blocks)
        return self._addresses[slab] + inside * self.block_bytes

    def is_on_host(self, block: int) -> bool:
        """Return True if the block is in host memory."""
        return self._on_host[block // self.slab_blocks]

    def take(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, ascending, and mark them as used. Allocates
        slabs if needed.

        Raises MemoryError if the budget is exceeded, and MemoryError or RuntimeError if memory
        cannot be pinned, also if this happened on the background thread. After an error, no block
        is taken, and new memory is freed.
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
        """Mark blocks as free, so that the pool can reuse them."""
        self._free = sorted(self._free + blocks)

    def ahead(self) -> None:
        """Start to allocate the next slab on a background thread, before it is needed.

        The method does this only if the free blocks are fewer than the blocks of one slab, and if
        the memory budget allows another slab. It does nothing in a pool that uses only device
        memory, because only host memory needs to be pinned. It never raises an error.
        """
        if self._worker is not None and self._worker.is_alive():
            return
        self._adopt()
        if len(self._free) >= self.slab_blocks or self._error is not None:
            return
        if not self._last.allocator.on_host:
            return
        tier = self._with_room(*self._preferred, self._last)
        if tier is None:
            return  # the append that needs the slab will raise the error
        work = threading.Thread(target=self._get, args=(tier,), name="kvindex-pin", daemon=True)
        self._worker = work
        try:
            work.start()
        except RuntimeError:
            if work.ident is not None:
                raise  # the thread has started, and a KeyboardInterrupt has left this error
            self._worker = None  # no thread could start: memory is allocated when needed
            tier.budget.give(self._slab_bytes)

    def expect(self, blocks: int, announcer: object = None) -> None:
        """Announce how many blocks will be used in total, so that their slabs can be pinned in
        advance, and one more slab. This replaces an earlier announcement. With 0 blocks, the
        announcement is withdrawn if it was made by the same `announcer`. The method does nothing if
        the pool has both device memory and host memory."""
        if self._preferred or (not blocks and announcer is not self._announcer):
            return
        self._announcer = announcer
        slabs = -(-blocks // self.slab_blocks) + 1 if blocks else 0
        self._expected.count = max(0, slabs - len(self._held))
        allocator = self._last.allocator
        if self._expected.count and isinstance(allocator, Foresees):
            allocator.expect(self._expected)

    def settle(self) -> None:
        """Wait until the background thread has finished the allocation of its current slab."""
        if self._worker is not None:
            self._worker.join()

    def close(self) -> None:
        """Free all slabs. If the background thread is pinning a slab, that slab is freed as soon as
        it is pinned."""
        self._closed = True
        self._expected.count = 0
        self._drain()

    def _grow(self, slabs: int) -> None:
        new: list[_Held] = []
        try:
            while len(new) < slabs and (tier := self._with_room(*self._preferred)):
                new.append(self._allocated(tier))
            rest = slabs - len(new)
            self._last.budget.take(rest * self._slab_bytes)
            while rest:
                rest -= 1  # if it fails, `_allocated` gives back the bytes of its slab
                try:
                    new.append(self._allocated(self._last))
                except BaseException:
                    self._last.budget.give(rest * self._slab_bytes)
                    raise
        except BaseException:
            for held in new:
                held.slab.free()
                held.tier.budget.give(self._slab_bytes)
            raise
        self._held.extend(new)
        self._ready.extend(new)
        self._adopt()

    def _with_room(self, *tiers: Tier) -> Tier | None:
        """Return the first tier (kind of memory) whose budget has room for a slab, and take the
        slab's bytes from this budget. Return None if no budget has room."""
        return next((tier for tier in tiers if tier.budget.try_take(self._slab_bytes)), None)

    def _allocated(self, tier: Tier) -> _Held:
        """Allocate a slab from a tier (a kind of memory). The caller has already taken the bytes of
        the slab from the budget of this tier. If the allocation fails, allocate from the last
        tier."""
        try:
            if self._expected.count > 0:  # first, so that no slab is pinned in place of this one
                self._expected.count -= 1
            return _Held(tier.allocator.allocate(self._slab_bytes), tier)
        except BaseException as error:
            tier.budget.give(self._slab_bytes)
            if not isinstance(error, Exception):
                raise
            if tier is self._last:
                kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
                what = (
                    "host store: cannot pin"
                    if tier.allocator.on_host
                    else "device store: no room for"
                )
                raise kind(f"{what} {self._slab_bytes} bytes: {error}") from error
        self._last.budget.take(self._slab_bytes)
        return self._allocated(self._last)

    def _get(self, tier: Tier) -> None:
        try:
            held = self._allocated(tier)
        except Exception as error:
            self._error = error
            return
        self._held.append(held)
        self._ready.append(held)
        if self._closed:
            self._drain()

    def _join(self) -> None:
        self.settle()
        self._adopt()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _adopt(self) -> None:
        """Number the blocks of new slabs, and add them to the free blocks."""
        while self._ready:
            held = self._ready.popleft()
            first = len(self._views) * self.slab_blocks
            self._views.append(held.slab.view(self._slab_bytes).view(self.slab_blocks, -1))
            self._addresses.append(held.slab.device_address)
            self._on_host.append(held.tier.allocator.on_host)
            self._free.extend(range(first, first + self.slab_blocks))

    def _drain(self) -> None:
        with ExitStack() as stack:  # free all slabs even if one fails
            while self._held:
                try:
                    held = self._held.pop()
                except IndexError:  # another thread took it
                    break
                stack.callback(held.tier.budget.give, self._slab_bytes)
                stack.callback(held.slab.free)
