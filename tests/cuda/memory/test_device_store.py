"""Rows in device memory in blocks that never move, compared with rows in one tensor."""

import pytest
import torch

import kvindex_cuda
from kvindex.core.geometry import Geometry
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory.async_copy import PinnedAllocator
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from tests.cuda.host_memory import GEOMETRY, SLAB, append, assert_same, tokens


def made(**options):
    allocator = DeviceAllocator(GEOMETRY.device)
    return BlockStore(GEOMETRY, allocator, slab_bytes=SLAB, **{"max_tokens": 4096, **options})


@pytest.mark.parametrize("pieces", [(1,), (256, 256), (300, 1, 500, 255), (3000,)], ids=str)
def test_it_holds_what_a_tensor_holds(pieces):
    parts = [tokens(count, seed=i) for i, count in enumerate(pieces)]
    store, reference = append(made(), *parts), append(TensorStore(GEOMETRY), *parts)
    assert_same(store, reference)
    for both in (store, reference):
        both.truncate(sum(pieces) // 2)
        append(both, tokens(20, seed=9))
    assert_same(store, reference)
    order = torch.tensor([1, 1, 0])
    assert_same(store.reordered(order), reference.reordered(order), batch=3)


def test_rows_stay_where_they_are_while_it_grows():
    store = append(made(), tokens(300))
    table, before = store.table, store.table.clone()
    append(store, tokens(3000, seed=1))
    assert store.table is table
    assert torch.equal(table[:, :2], before[:, :2])
    assert not before[:, 2:].any()
    assert (table[:, :13] > 0).all()


def test_little_memory_is_taken_before_it_is_needed():
    """Slabs have 4 MiB, and none is allocated ahead, because device memory is allocated quickly and
    every layer would waste its last one.
    """
    store = append(BlockStore(GEOMETRY, DeviceAllocator(GEOMETRY.device)), tokens(300))
    store._pool.settle()
    assert store.pinned_bytes == 2**22 // store.block_bytes * store.block_bytes
    more = append(made(), tokens(3000))
    more._pool.settle()
    assert more._pool.ahead() is None
    more._pool.settle()
    assert more.pinned_bytes == -(-2 * 12 * more.block_bytes // SLAB) * SLAB


def test_reset_gives_the_memory_back_and_begins_anew():
    store = append(made(), tokens(300))
    store.reset()
    assert (len(store), store.pinned_bytes) == (0, 0)
    one = tokens(40, batch=1)
    assert_same(append(store, one), append(TensorStore(GEOMETRY), one), batch=1)


def test_the_backend_keeps_rows_in_blocks():
    stores = [kvindex_cuda.store(GEOMETRY, place) for place in ("device", "host")]
    assert [type(store) for store in stores] == [BlockStore, BlockStore]
    assert not any(store.on_host for store in stores)  # here, the host is the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "host"])
def test_on_a_gpu(place):
    sizes = dict(q_heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    geometry = Geometry.of(**sizes)
    store, reference = kvindex_cuda.store(geometry, place), TensorStore(geometry)
    assert store.on_host == (place == "host")
    for i, count in enumerate((3000, 1, 40_000)):
        part = [piece.to("cuda") for piece in tokens(count, i, geometry=geometry)]
        for both in (store, reference):
            both.append(both.join(*part))
    ids = torch.randint(-1, len(store), (2, 2, 500), device="cuda")
    order = torch.tensor([1, 0])
    for mine, theirs in (
        (store, reference),
        (store.reordered(order), reference.reordered(order)),
    ):
        got, want = mine.gather(ids), theirs.gather(ids)
        assert torch.equal(got.keys, want.keys)
        assert torch.equal(got.values, want.values)


def test_its_rows_need_no_cache_on_the_device():
    assert not made().on_host
    assert PinnedAllocator.on_host
    assert made()._tiers[-1].budget.limit_bytes is None
