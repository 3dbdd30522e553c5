import ctypes
import gc
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.storage.centers import of_rows
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory import async_copy
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.host_memory import HostMemory
from tests.cuda.host_memory import GEOMETRY, ROW, append, assert_same, host_store, settled, tokens

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps memory this way")


class CudaError(RuntimeError):
    """Stands for CuPy's `CUDARuntimeError`."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


OUT_OF_MEMORY = 2, "cudaErrorMemoryAllocation: out of memory"
NOT_SUPPORTED = 801, "cudaErrorNotSupported: cannot register"
INVALID_VALUE = 1, "cudaErrorInvalidValue"


class FakeRuntime:
    """The part of CuPy's runtime that the project uses, on CPU memory."""

    def __init__(self):
        self.copies, self.held, self.registered, self.fails = [], {}, {}, ()
        self.refusal = NOT_SUPPORTED  # the error of `hostRegister`

    @property
    def cupy(self):
        """These functions under CuPy's names."""
        return SimpleNamespace(
            memcpy2DAsync=self.copy,
            memcpyAsync=self.copy_bytes,
            hostAlloc=self.allocate,
            pointerGetAttributes=self.attributes,
            deviceSynchronize=lambda: self.copies.append("synchronized"),
            freeHost=self.held.pop,
            hostRegister=self.register,
            hostUnregister=self.unregister,
            CUDARuntimeError=CudaError,
        )

    def copy(self, to, to_pitch, come, come_pitch, width, height, kind, stream):
        assert min(to_pitch, come_pitch) >= width
        assert max(to_pitch, come_pitch) <= max(async_copy.MAX_PITCH_BYTES, width)
        self.copies.append((width, height, kind, stream))
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, come + row * come_pitch, width)

    def copy_bytes(self, to, come, nbytes, kind, stream):
        self.copies.append((nbytes, 1, kind, stream))
        ctypes.memmove(to, come, nbytes)

    def allocate(self, nbytes, flags):
        if "hostAlloc" in self.fails:
            raise CudaError(*OUT_OF_MEMORY)
        assert flags == 3
        memory = (ctypes.c_uint8 * nbytes)()
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def register(self, address, nbytes, flags):
        if "hostRegister" in self.fails:
            raise CudaError(*self.refusal)
        assert flags == 3
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]
        if "hostUnregister" in self.fails:
            raise CudaError(719, "cudaErrorLaunchFailure")

    def attributes(self, address):
        if "pointerGetAttributes" in self.fails:
            raise CudaError(*INVALID_VALUE)
        return SimpleNamespace(devicePointer=address + 16)


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    cuda = SimpleNamespace(runtime=fake.cupy, Device=lambda index: nullcontext())
    monkeypatch.setattr(async_copy, "checked", lambda device: SimpleNamespace(cuda=cuda))
    return fake


@pytest.mark.parametrize(
    ("start", "count"), [(0, 700), (0, 256), (100, 90), (100, 900), (250, 6), (0, 1)]
)
@pytest.mark.parametrize("max_pitch", [2**31 - 1, 100])
def test_pieces_are_copied_by_their_pitches(start, count, max_pitch, runtime, monkeypatch):
    monkeypatch.setattr(async_copy, "MAX_PITCH_BYTES", max_pitch)
    reference = append(TensorStore(GEOMETRY), tokens(start), tokens(count, 1))
    store = append(host_store(), tokens(start))
    rows = store.join(*tokens(count, 1))
    store.reserve(rows)
    for target, piece in store._table.pieces(rows.values(), start):
        assert not target.numel() or target.stride(1) == piece.stride(1) == 1
        async_copy._copy_rows(runtime.cupy, target, piece, 7)
    store._length += count
    assert_same(store, reference)
    assert {copy[2:] for copy in runtime.copies} == {(2, 7)}
    assert max_pitch > 100 or {height for _, height, *_ in runtime.copies} == {1}
    if (start, count) == (0, 256):  # one block of each sequence
        assert [copy[:2] for copy in runtime.copies] == [(2 * 256 * ROW, 1)] * 2
    if (start, count, max_pitch) == (0, 700, 2**31 - 1):  # contiguous blocks, then heads
        rest = (188 * ROW, 2)
        assert [copy[:2] for copy in runtime.copies[-2:]] == [rest] * 2
        assert (2 * 2 * 256 * ROW, 1) in [copy[:2] for copy in runtime.copies]


def test_pinning_asks_for_mapped_portable_memory_and_frees_it(runtime):
    allocator = async_copy.PinnedAllocator(torch.device("cuda:0"))
    slab = allocator.allocate(64)
    assert runtime.held.keys() == {slab.host_address}
    assert slab.device_address == slab.host_address + 16
    slab.free()
    assert (runtime.held, runtime.copies) == ({}, ["synchronized"])


@pytest.mark.parametrize("fails", ["hostAlloc", "pointerGetAttributes"])
def test_pinning_that_fails_holds_nothing(fails, runtime):
    allocator, runtime.fails = async_copy.PinnedAllocator(torch.device("cuda:0")), [fails]
    with pytest.raises(MemoryError, match="cudaError"):
        allocator.allocate(64)
    assert not runtime.held


@pytest.fixture
def mapped(monkeypatch):
    """Record the addresses of mapped memory that is not freed yet."""
    live, made = set(), async_copy.map_memory

    @dataclass(frozen=True)
    class Recorded:
        memory: HostMemory

        @property
        def address(self):
            return self.memory.address

        @property
        def nbytes(self):
            return self.memory.nbytes

        def free(self):
            self.memory.free()
            live.remove(self.address)

    def map_memory(nbytes):
        memory = Recorded(made(nbytes))
        live.add(memory.address)
        return memory

    monkeypatch.setattr(async_copy, "map_memory", map_memory)
    return live


LARGE = async_copy.REGISTERED_BYTES + 1000


@on_linux
def test_large_slabs_are_mapped_and_registered(runtime, mapped):
    allocator = async_copy.PinnedAllocator(torch.device("cuda:0"))
    slab = allocator.allocate(LARGE)
    assert mapped == runtime.registered.keys() == {slab.host_address}
    assert not runtime.held
    assert runtime.registered[slab.host_address] >= LARGE
    assert slab.device_address == slab.host_address + 16
    slab.view(LARGE).fill_(3)
    assert slab.view(LARGE).eq(3).all()
    slab.free()
    assert (mapped, runtime.registered, runtime.copies) == (set(), {}, ["synchronized"])


@on_linux
def test_memory_that_cannot_be_unregistered_is_unmapped(runtime, mapped):
    slab = async_copy.PinnedAllocator(torch.device("cuda:0")).allocate(LARGE)
    runtime.fails = ["hostUnregister"]
    with pytest.raises(CudaError, match="LaunchFailure"):
        slab.free()
    assert not mapped


@on_linux
@pytest.mark.parametrize("refusal", [NOT_SUPPORTED, INVALID_VALUE, OUT_OF_MEMORY])
def test_registration_that_is_refused_falls_back_to_the_driver(refusal, runtime, mapped):
    allocator, runtime.fails = async_copy.PinnedAllocator(torch.device("cuda:0")), ["hostRegister"]
    runtime.refusal = refusal
    slab = allocator.allocate(LARGE)
    assert runtime.held.keys() == {slab.host_address}
    assert not mapped
    runtime.fails = []
    other = allocator.allocate(LARGE)  # it tries again after a lack of memory only
    assert (other.mapped is not None) == (refusal == OUT_OF_MEMORY)
    slab.free(), other.free()
    assert (mapped, runtime.registered, runtime.held) == (set(), {}, {})


def test_mapping_that_fails_falls_back_to_the_driver(runtime, monkeypatch):
    def fail(nbytes):
        raise MemoryError("platform: got win32, allowed is linux")

    monkeypatch.setattr(async_copy, "map_memory", fail)
    allocator = async_copy.PinnedAllocator(torch.device("cuda:0"))
    slab = allocator.allocate(LARGE)
    assert runtime.held.keys() == {slab.host_address}
    slab.free()
    runtime.fails = ["hostAlloc"]
    with pytest.raises(MemoryError, match="out of memory; before that: platform: got win32"):
        allocator.allocate(LARGE)


@on_linux
@pytest.mark.parametrize("first", ["hostRegister", "pointerGetAttributes"])
def test_large_slabs_that_cannot_be_pinned_leave_nothing(first, runtime, mapped):
    allocator = async_copy.PinnedAllocator(torch.device("cuda:0"))
    runtime.fails = [first, "hostAlloc"]
    with pytest.raises(MemoryError, match="out of memory; before that, to register memory failed"):
        allocator.allocate(LARGE)
    assert (mapped, runtime.registered, runtime.held) == (set(), {}, {})
    runtime.fails = []
    allocator.allocate(LARGE).free()  # it was a lack of memory, so it tries again
    assert len(runtime.copies) == 1
    assert not mapped


def test_pinned_memory_needs_a_gpu():
    with pytest.raises(ValueError, match="device: got cpu, allowed is a CUDA device"):
        async_copy.PinnedAllocator(GEOMETRY.device)


def on_gpu(dtype=torch.bfloat16, **options):
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 128}
    geometry = Geometry.of(**sizes, dtype=dtype, device="cuda")
    return geometry, BlockStore(
        geometry,
        async_copy.PinnedAllocator(geometry.device),
        slab_bytes=2**20,
        budget=Budget(),
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pinned_rows_come_back_from_the_host(dtype):
    geometry, store = on_gpu(dtype)
    pieces = [tokens(count, count, geometry=geometry) for count in (0, 1, 255, 256, 257, 3000)]
    for keys, values in pieces:
        append(store, (keys.cuda(), values.cuda()))
    keys, values = (torch.cat(parts, dim=2).cuda() for parts in zip(*pieces, strict=True))
    ids = torch.randint(0, len(store), (2, 2, 500), device="cuda")
    rows = store.gather(ids)
    assert rows.keys.device == ids.device
    assert torch.equal(rows.keys, keys.gather(2, ids[..., None].expand(-1, -1, -1, 128)))
    assert torch.equal(rows.values, values.gather(2, ids[..., None].expand(-1, -1, -1, 128)))
    assert store.table.device == ids.device


@pytest.mark.gpu
def test_the_copy_waits_for_what_makes_the_rows_and_outlives_them():
    geometry, store = on_gpu()
    big = torch.randn(4096, 4096, device="cuda")
    keys, values = (part.cuda() for part in tokens(2000, geometry=geometry))
    want = keys.clone(), values.clone()
    for _ in range(20):
        big = (big @ big).tanh()  # keeps the stream busy while the append is queued
    late = keys + 0 * big[0, 0].to(keys.dtype)
    append(store, (late, values))
    del late
    for _ in range(8):
        torch.full((2, 2, 2000, 256), float("nan"), device="cuda")  # reuses the freed memory
    ids = torch.arange(2000, device="cuda").expand(2, 2, -1)
    rows = store.gather(ids)
    assert torch.equal(rows.keys, want[0])
    assert torch.equal(rows.values, want[1])


@pytest.mark.gpu
def test_device_addresses_are_those_of_the_rows():
    import cupy

    geometry, store = on_gpu(row_codec="int8")
    given = [part.cuda() for part in tokens(600, geometry=geometry)]
    store.append(store.join(*given))
    store.wait()
    rows = store._codec.encode(*given, of_rows(store.center))
    for b, slot in [(0, 0), (1, 1), (0, 2)]:
        address = int(store.table[b, slot])
        memory = cupy.cuda.UnownedMemory(address, store.block_bytes, store)
        block = cupy.ndarray((2, 256, store.row_bytes), "u1", cupy.cuda.MemoryPointer(memory, 0))
        held = min(256, 600 - 256 * slot)
        got = torch.from_dlpack(cupy.ascontiguousarray(block[:, :held]).copy())
        assert torch.equal(got, rows[b, :, 256 * slot : 256 * slot + held])


@pytest.mark.gpu
def test_pinned_memory_is_given_back():
    geometry, store = on_gpu()
    budget = store._tiers[-1].budget
    append(store, tuple(part.cuda() for part in tokens(5000, geometry=geometry)))
    settled(store)
    assert budget.used_bytes == store.pinned_bytes > 0
    del store
    gc.collect()
    assert budget.used_bytes == 0


def resident():
    """Return the resident bytes of this process."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])


@pytest.mark.gpu
@on_linux
def test_kernels_and_copies_read_registered_memory():
    import cupy

    nbytes, device = 64 * 2**20 + 48, torch.device("cuda", torch.cuda.current_device())
    allocator = async_copy.PinnedAllocator(device)
    allocator.allocate(LARGE).free()  # loads what the driver needs
    before = resident()
    slab = allocator.allocate(nbytes)
    assert slab.mapped is not None
    assert resident() - before > 60 * 2**20
    want = torch.randint(256, (nbytes,), dtype=torch.uint8)
    slab.view(nbytes).copy_(want)
    assert torch.equal(slab.view(nbytes).to(device), want.to(device))
    memory = cupy.cuda.UnownedMemory(slab.device_address, nbytes, slab)
    array = cupy.ndarray((nbytes,), "u1", cupy.cuda.MemoryPointer(memory, 0))
    assert torch.equal(torch.from_dlpack(array + 1).cpu(), want + 1)
    array += 2  # a kernel writes to it
    torch.cuda.synchronize()
    assert torch.equal(slab.view(nbytes), want + 2)
    held = resident()
    slab.free()
    assert held - resident() > 60 * 2**20


@pytest.mark.gpu
@on_linux
def test_memory_may_be_registered_during_the_capture_of_a_graph():
    device = torch.device("cuda", torch.cuda.current_device())
    allocator, slabs = async_copy.PinnedAllocator(device), []
    given = torch.zeros(8, device=device)
    given.add(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread = threading.Thread(target=lambda: slabs.append(allocator.allocate(LARGE)))
        thread.start()
        thread.join()
        made = given.add(1)
    graph.replay()
    assert made.eq(1).all()
    slabs.pop().free()


def busy_for_a_while():
    """Put work on the current stream that takes far longer than any call in this file."""
    load = torch.randn(8192, 8192, device="cuda")
    for _ in range(30):
        load = (load @ load).clamp_(-1, 1)
    return load


@pytest.mark.gpu
def test_an_append_waits_for_nothing():
    """There is room in the store, and the rows are still being computed when the call returns."""
    geometry, store = on_gpu()
    rows = store.join(*(part.cuda() for part in tokens(4000, geometry=geometry)))
    store.append(rows)
    store._offload.synchronize()
    store.truncate(0)
    settled(store)
    busy_for_a_while()
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.append(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not store._offload._done.query()
    store.wait()
    after = torch.cuda.current_stream().record_event()
    after.synchronize()
    assert store._offload._done.query()


@pytest.mark.gpu
def test_rows_are_not_overwritten_while_they_are_read():
    """A kernel that was launched before a truncation still finds what it reads."""
    geometry, store = on_gpu()
    first, second = (
        store.join(*(part.cuda() for part in tokens(512, seed, geometry=geometry)))
        for seed in (1, 2)
    )
    store.append(first)
    store.wait()
    torch.cuda.synchronize()
    ids = torch.arange(512, device="cuda").expand(store.table.shape[0], geometry.kv_heads, -1)
    busy_for_a_while()
    found = [store.gather(ids)]
    store.truncate(0)
    store.append(second)
    store.wait()
    found.append(store.gather(ids))
    for seed, rows in enumerate(found, start=1):
        keys, values = tokens(512, seed, geometry=geometry)
        assert torch.equal(rows.keys.cpu(), keys)
        assert torch.equal(rows.values.cpu(), values)
