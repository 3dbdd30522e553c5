"""Slab pool: memory in slabs, cut into blocks of equal size; the host's are had one ahead of need.

Locks: a pool is used by one thread; its worker hands over through atomic operations of deques
alone, and `close`, which the garbage collector may run anywhere, waits for nothing. Longer than
most files: what a slab is and where it comes from, beside the pool.
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
    """A stretch of memory that a GPU can read; addresses are multiples of 16."""

    def view(self, nbytes: int) -> Tensor:
        """Its bytes, uint8 `[nbytes]`, on the host or on the device; valid until `free`."""
        ...

    @property
    def device_address(self) -> int:
        """Where kernels find it."""
        ...

    def settle(self) -> None:
        """Wait for kernels and copies in flight, which may read it or write to it."""
        ...

    def free(self) -> None:
        """Give it back, settled; called once, after which it is not read."""
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


@runtime_checkable
class Foresees(Protocol):
    """An `Allocator` that can have slabs ready."""

    def expect(self, nbytes: int, count: int) -> None:
        """So many more slabs of `nbytes` will be asked for; fewer, below 0. Does not wait."""
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

    def settle(self) -> None:
        """Wait for kernels and copies in flight."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)

    def free(self) -> None:
        """Settle: torch gives it to others with the last view."""
        self.settle()


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


@dataclass(frozen=True)
class Tier:
    """A place of slabs, and how much of it may be taken."""

    allocator: Allocator
    budget: Budget


@dataclass(frozen=True)
class _Held:
    """A slab, and where it came from."""

    slab: Slab
    tier: Tier


class Pool:
    """Blocks of `block_bytes`, numbered from 0; a number stays at its address until `close`.

    slab_blocks: blocks in a slab; tiers: where slabs come from: the first that has room, and only
    what the last one says is an error.
    """

    def __init__(self, block_bytes: int, slab_blocks: int, *tiers: Tier) -> None:
        self.slab_blocks = slab_blocks
        self.block_bytes = block_bytes
        self._slab_bytes = block_bytes * slab_blocks
        *self._preferred, self._last = tiers
        self._views: list[Tensor] = []  # uint8 [slab_blocks, block_bytes] of each slab
        self._addresses: list[int] = []  # on the device
        self._far: list[bool] = []  # whether it is the host's
        self._free: list[int] = []  # ascending, so that what is taken together lies together
        self._held: deque[_Held] = deque()  # what close frees
        self._ready: deque[_Held] = deque()  # allocated by the worker, not yet numbered
        self._worker: threading.Thread | None = None
        self._expected = 0  # slabs that the last tier has been told of
        self._error: Exception | None = None
        self._closed = False

    @property
    def mixed(self) -> bool:
        """Whether blocks may lie in several places."""
        return bool(self._preferred)

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

    def is_far(self, block: int) -> bool:
        """Whether a GPU reads the block over a bus."""
        return self._far[block // self.slab_blocks]

    def take(self, count: int) -> list[int]:
        """Numbers of `count` blocks, ascending; what is missing is allocated, after the worker.

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
        """Let a worker get a slab if less than one is free, and a budget allows. Never fails.

        Nothing where all are the device's, whose memory is had at once.
        """
        if self._worker is not None and self._worker.is_alive():
            return
        self._adopt()
        if len(self._free) >= self.slab_blocks or self._error is not None:
            return
        if not self._last.allocator.far:
            return
        tier = self._with_room(*self._preferred, self._last)
        if tier is None:
            return  # the append that needs it will say so
        work = threading.Thread(target=self._get, args=(tier,), name="kvindex-pin", daemon=True)
        self._worker = work
        try:
            work.start()
        except RuntimeError:  # no more threads: whoever needs memory gets it
            self._worker = None
            tier.budget.give(self._slab_bytes)

    def expect(self, blocks: int) -> None:
        """So many blocks will be held in all: what they lack, and the slab ahead, may be got now.

        Nothing where blocks may lie in several places.
        """
        slabs = -(-blocks // self.slab_blocks) + 1 - len(self._held) - self._expected
        if slabs > 0 and not self._preferred:
            self._tell(slabs)

    def _tell(self, slabs: int) -> None:
        allocator = self._last.allocator
        if isinstance(allocator, Foresees):
            self._expected += slabs
            allocator.expect(self._slab_bytes, slabs)

    def settle(self) -> None:
        """Wait for the worker."""
        if self._worker is not None:
            self._worker.join()

    def close(self) -> None:
        """Free every slab, now or (the one being pinned) as soon as the worker has it."""
        self._closed = True
        self._tell(-self._expected)
        self._drain()

    def _grow(self, slabs: int) -> None:
        new: list[_Held] = []
        try:
            while len(new) < slabs and (tier := self._with_room(*self._preferred)):
                new.append(self._allocated(tier))
            rest = slabs - len(new)
            self._last.budget.take(rest * self._slab_bytes)
            while rest:
                rest -= 1  # what is allocated gives back its own
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
        """The first whose budget has room for a slab, which is then taken from it."""
        return next((tier for tier in tiers if tier.budget.try_take(self._slab_bytes)), None)

    def _allocated(self, tier: Tier) -> _Held:
        """A slab of a tier, of whose budget it is taken, or else of the last one."""
        try:
            held = _Held(tier.allocator.allocate(self._slab_bytes), tier)
            if self._expected:
                self._tell(-1)
            return held
        except BaseException as error:
            tier.budget.give(self._slab_bytes)
            if not isinstance(error, Exception):
                raise
            if tier is self._last:
                kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
                what = (
                    "host store: cannot pin" if tier.allocator.far else "device store: no room for"
                )
                raise kind(f"{what} {self._slab_bytes} bytes: {error}") from error
        self._last.budget.take(self._slab_bytes)
        return self._allocated(self._last)

    def _get(self, tier: Tier) -> None:
        """On the worker."""
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
        """Number the slabs that are ready."""
        while self._ready:
            held = self._ready.popleft()
            first = len(self._views) * self.slab_blocks
            self._views.append(held.slab.view(self._slab_bytes).view(self.slab_blocks, -1))
            self._addresses.append(held.slab.device_address)
            self._far.append(held.tier.allocator.far)
            self._free.extend(range(first, first + self.slab_blocks))

    def _drain(self) -> None:
        with ExitStack() as stack:  # every slab is freed, though one may fail
            while self._held:
                try:
                    held = self._held.pop()
                except IndexError:  # the other thread had it
                    break
                stack.callback(held.tier.budget.give, self._slab_bytes)
                stack.callback(held.slab.free)
