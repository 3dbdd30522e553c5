"""Host stores on fake memory, for the tests of `BlockStore` and its parts."""

import ctypes
import threading

import torch

from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.slab_pool import Tier, host_view

GEOMETRY = Geometry.of(q_heads=4, kv_heads=2, head_dim=8, value_dim=3)
ROW = 48  # 11 float32 numbers, padded to a multiple of 16 bytes
BLOCK = 2 * 256 * ROW
SLAB = 3 * BLOCK
POISON = 0xEE


class FakeSlab:
    """CPU memory whose device address differs from its host address, so that mixing them up reads
    nothing.
    """

    def __init__(self, owner, nbytes):
        self.memory = (ctypes.c_uint8 * nbytes)()
        self.host_address = ctypes.addressof(self.memory)
        ctypes.memset(self.host_address, POISON, nbytes)
        self.device_address = self.host_address + owner.shift
        self.owner = owner

    def view(self, nbytes):
        return host_view(self.host_address, nbytes)

    def settle(self):
        self.owner.settled += 1

    def free(self):
        ctypes.memset(self.host_address, POISON, len(self.memory))
        self.owner.live.remove(self)  # KeyError if freed twice


class FakeAllocator:
    """An allocator that counts allocations, fails at those in a given set (counted from 0), and
    pins memory only while `gate` is open.
    """

    shift, on_host = 1 << 50, True

    def __init__(self, fails=(), error=MemoryError):
        self.fails, self.error = fails, error
        self.live, self.calls, self.threads, self.settled = set(), 0, [], 0
        self.gate = threading.Event()
        self.gate.set()

    def allocate(self, nbytes):
        call, self.calls = self.calls, self.calls + 1
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(10)
        if call in self.fails:
            raise self.error("none left")
        slab = FakeSlab(self, nbytes)
        self.live.add(slab)
        return slab


class OnDeviceAllocator(FakeAllocator):
    """An allocator of memory that stands for the device's."""

    shift, on_host = 1 << 51, False


def tokens(count, seed=0, batch=2, geometry=GEOMETRY):
    generator = torch.Generator().manual_seed(seed)
    shape, options = (batch, geometry.kv_heads, count), {"generator": generator}
    keys = torch.randn(*shape, geometry.head_dim, **options).to(geometry.dtype)
    return keys, torch.randn(*shape, geometry.value_dim, **options).to(geometry.dtype)


def host_store(allocator=None, **options):
    options = {"slab_bytes": SLAB, "budget": Budget(), "max_tokens": 4096, **options}
    return BlockStore(GEOMETRY, allocator or FakeAllocator(), **options)


def mixed_store(on_device, on_host, slabs, **options):
    """A store that uses the device allocator `on_device` until a budget of slabs is used up."""
    preferred = Tier(on_device, Budget(slabs * SLAB))
    return host_store(on_host, preferred=preferred, **options)


def settled(store):
    """Return the store once no worker thread has work left."""
    finish()
    return store


def finish():
    for thread in threading.enumerate():
        if thread.name == "kvindex-pin":
            thread.join()


def append(store, *pieces):
    for piece in pieces:
        store.append(store.join(*piece))
    return store


def assert_same(store, reference, batch=2, seed=0):
    assert len(store) == len(reference)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, len(reference), (batch, 2, 300), generator=generator)
    everything = torch.arange(len(reference)).expand(batch, 2, -1)
    for wanted in (ids, everything, ids[..., :0]):
        got, want = store.gather(wanted), reference.gather(wanted)
        assert torch.equal(got.keys, want.keys)
        assert torch.equal(got.values, want.values)
    for (first, got), (start, want) in zip(store.blocks(100), reference.blocks(100), strict=True):
        assert first == start
        assert torch.equal(got.keys, want.keys)
        assert torch.equal(got.values, want.values)
