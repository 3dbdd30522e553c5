import gc
import threading

import pytest
import torch

from kvindex.storage.store import TensorStore
from kvindex_cuda.memory.budget import Budget, available_bytes, shared_budget
from tests.cuda.host_memory import (
    GEOMETRY,
    SLAB,
    FakeAllocator,
    append,
    assert_same,
    host_store,
    settled,
    tokens,
)


def test_the_next_slab_is_pinned_on_a_thread_before_it_is_needed():
    allocator = FakeAllocator()
    store = settled(append(host_store(allocator), tokens(10)))  # 2 of 3 blocks
    here = threading.current_thread().name
    assert allocator.threads == [here, "kvindex-pin"]
    settled(append(store, tokens(300, 1)))  # 4 of 6: fewer than 3 are free
    settled(append(store, tokens(10, 2)))  # 4 of 9
    assert allocator.threads == [here, "kvindex-pin", "kvindex-pin"]
    assert all(thread != here for thread in allocator.threads[1:])


def test_an_append_waits_for_the_worker_only_if_nothing_is_free():
    allocator = FakeAllocator()
    store = host_store(allocator)
    append(store, tokens(100, batch=1))
    settled(store)
    allocator.gate.clear()
    append(store, tokens(900, 1, batch=1))  # 4 of 6 blocks are used: the worker starts, and blocks
    append(store, tokens(500, 2, batch=1))  # the other two blocks
    assert store._pool._worker.is_alive()
    threading.Timer(0.05, allocator.gate.set).start()
    append(store, tokens(50, 3, batch=1))
    assert allocator.gate.is_set()
    assert len(store) == 1550
    assert allocator.threads[2] == "kvindex-pin"


@pytest.mark.parametrize(("error", "kind"), [(MemoryError, MemoryError), (OSError, RuntimeError)])
def test_an_error_of_the_worker_surfaces_where_memory_is_needed(error, kind):
    allocator, budget = FakeAllocator(fails=[1], error=error), Budget()
    store = settled(append(host_store(allocator, budget=budget), tokens(10)))
    append(store, tokens(20, 1))  # fits
    reference = append(TensorStore(GEOMETRY), tokens(10), tokens(20, 1))
    more = store.join(*tokens(600, 2))
    with pytest.raises(kind, match="host store: cannot pin 73728 bytes: none left"):
        store.reserve(more)
    assert_same(store, reference)
    assert budget.used_bytes == SLAB == store.pinned_bytes
    append(store, tokens(600, 2))  # the next attempt succeeds
    assert_same(store, append(reference, tokens(600, 2)))


@pytest.mark.parametrize("fails", [0, 2, 3])
def test_a_slab_that_cannot_be_pinned_leaves_the_store_as_it_was(fails):
    allocator, budget = FakeAllocator(fails=[fails]), Budget()
    store, reference = host_store(allocator, budget=budget), TensorStore(GEOMETRY)
    if fails:
        settled(append(store, tokens(10))), append(reference, tokens(10))  # slabs 0 and 1
    held, table = store.pinned_bytes, store.table.clone()
    with pytest.raises(MemoryError, match="none left"):
        append(store, tokens(3000, 1))
    assert len(allocator.live) * SLAB == budget.used_bytes == store.pinned_bytes == held
    assert_same(store, reference)
    if fails:
        assert torch.equal(store.table, table)
    for part in (store, reference):
        append(part, tokens(3000, 1))
    assert_same(store, reference)


def test_no_thread_is_no_error(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    budget = Budget()
    store = host_store(budget=budget)
    monkeypatch.setattr(threading.Thread, "start", start)
    append(store, tokens(10), tokens(1000, 1))
    assert len(store) == 1010
    assert budget.used_bytes == store.pinned_bytes == SLAB * 3


def test_the_budget_is_one_for_all_stores_that_share_it():
    allocator, budget = FakeAllocator(), Budget(limit_bytes=4 * SLAB)
    first = settled(append(host_store(allocator, budget=budget), tokens(10)))
    second = settled(append(host_store(allocator, budget=budget), tokens(10)))
    assert budget.used_bytes == 4 * SLAB
    reference = append(TensorStore(GEOMETRY), tokens(10))
    message = f"needs {SLAB} more bytes, but {4 * SLAB} are in use, and the limit is {4 * SLAB}"
    with pytest.raises(MemoryError, match=message):
        append(first, tokens(800, 1))
    assert_same(first, reference)
    assert allocator.calls == 4
    del second
    append(first, tokens(800, 1))
    assert_same(first, append(reference, tokens(800, 1)))


def test_a_limit_reached_ahead_of_need_is_no_error():
    budget = Budget(limit_bytes=SLAB)
    store = append(host_store(budget=budget), tokens(10), tokens(246, 1))
    with pytest.raises(MemoryError, match="the limit is 73728"):
        append(store, tokens(257, 2))
    assert len(store) == 256


def test_reordering_beyond_the_budget_leaves_the_store():
    allocator, budget = FakeAllocator(), Budget(limit_bytes=3 * SLAB)
    store = settled(append(host_store(allocator, budget=budget), tokens(10)))
    with pytest.raises(MemoryError, match="the limit is"):
        store.reordered(torch.tensor([0, 1, 1, 0]))
    assert_same(store, append(TensorStore(GEOMETRY), tokens(10)))
    assert budget.used_bytes == store.pinned_bytes == len(allocator.live) * SLAB


def test_more_tokens_than_the_table_has_room_for_are_refused():
    store = append(host_store(max_tokens=300), tokens(290))
    with pytest.raises(ValueError, match="max_tokens: got 301 tokens, allowed are up to 300"):
        append(store, tokens(11))
    assert len(append(store, tokens(10))) == 300
    assert store.table.shape == (2, 2)


def test_nothing_is_pinned_ahead_of_a_full_table():
    allocator = FakeAllocator()
    settled(append(host_store(allocator, max_tokens=256), tokens(10)))
    assert allocator.calls == 1


def test_a_first_append_that_failed_may_come_again_in_another_batch():
    store = host_store()
    store.reserve(store.join(*tokens(300)))
    store.reserve(store.join(*tokens(300, batch=3)))
    store.append(store.join(*tokens(20, batch=1)))
    assert_same(store, append(TensorStore(GEOMETRY), tokens(20, batch=1)), batch=1)
    assert store._pool.pinned_bytes <= 3 * SLAB
    with pytest.raises(ValueError, match="rows: got 2 sequences, but the store has 1"):
        append(store, tokens(2))


def test_the_default_limit_is_what_the_machine_has_left(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000 kB\nMemAvailable:    1000 kB\n")
    assert available_bytes(meminfo) == 1000 * 1024
    meminfo.write_text("MemTotal:  4000 kB\n")
    assert available_bytes(meminfo) is None
    assert available_bytes(tmp_path / "none") is None
    limit = shared_budget().limit_bytes
    assert limit is None or limit > 0
    assert shared_budget() is shared_budget()


def test_memory_goes_with_the_store():
    allocator, budget = FakeAllocator(), Budget()
    store = settled(append(host_store(allocator, budget=budget), tokens(1000)))
    assert len(allocator.live) * SLAB == budget.used_bytes > 0
    del store
    assert (len(allocator.live), budget.used_bytes) == (0, 0)


def test_memory_goes_with_reset_and_comes_back_with_the_next_append():
    allocator, budget = FakeAllocator(), Budget()
    store = settled(append(host_store(allocator, budget=budget), tokens(1000)))
    store.reset()
    assert (len(allocator.live), budget.used_bytes, store.pinned_bytes) == (0, 0, 0)
    assert (len(store), store.nbytes(), store.table.shape) == (0, 0, (0, 16))
    assert_same(append(store, tokens(7, 1)), append(TensorStore(GEOMETRY), tokens(7, 1)))


def test_memory_goes_with_the_owner_of_an_exception():
    allocator = FakeAllocator()

    def failing():
        settled(append(host_store(allocator), tokens(1000)))
        raise KeyError("something else")

    with pytest.raises(KeyError):
        failing()
    gc.collect()
    assert not allocator.live


def test_memory_goes_with_a_cycle_that_is_collected():
    allocator = FakeAllocator()
    store = settled(append(host_store(allocator), tokens(10)))
    store.itself = store
    del store
    gc.collect()
    assert not allocator.live


def test_a_slab_under_way_is_freed_as_soon_as_it_is_there():
    allocator, budget = FakeAllocator(), Budget()
    store = settled(append(host_store(allocator, budget=budget), tokens(10)))
    allocator.gate.clear()
    append(store, tokens(300, 1))
    worker = store._pool._worker
    del store
    assert not allocator.live
    allocator.gate.set()
    worker.join()
    assert (allocator.calls, len(allocator.live), budget.used_bytes) == (3, 0, 0)


def test_one_slab_that_cannot_be_freed_keeps_no_other():
    allocator, budget = FakeAllocator(), Budget()
    store = settled(append(host_store(allocator, budget=budget), tokens(1000)))
    stuck = next(iter(allocator.live))

    def fail():
        raise RuntimeError("the driver is gone")

    stuck.free = fail
    with pytest.raises(RuntimeError, match="the driver is gone"):
        store.reset()
    assert allocator.live == {stuck}
    assert budget.used_bytes == 0
    assert_same(append(store, tokens(7)), append(TensorStore(GEOMETRY), tokens(7)))
