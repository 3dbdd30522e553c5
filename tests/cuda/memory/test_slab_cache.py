"""Pinned slabs that outlive a store are reused, limited in number, and released."""

import gc
import threading

import pytest
import torch

from kvindex.core.protocol import ReservesAhead
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.slab_cache import (
    CachingAllocator,
    SlabCache,
    pinned,
    release_pinned,
    shared_cache,
)
from tests.cuda.host_memory import (
    GEOMETRY,
    SLAB,
    FakeAllocator,
    OnDeviceAllocator,
    append,
    assert_same,
    finish,
    host_store,
    mixed_store,
    settled,
    tokens,
)
from tests.support.helpers import Case


def caching(allocator, limit=None):
    budget = Budget(limit)
    return CachingAllocator(allocator, SlabCache(budget)), budget


def prompt(allocator, budget, count, seed=0):
    """Do what a layer does in a prompt: append rows and read them."""
    store = settled(append(host_store(allocator, budget=budget), tokens(count, seed)))
    assert_same(store, append(TensorStore(GEOMETRY), tokens(count, seed)))
    return store


@pytest.mark.slow
def test_a_hundred_prompts_pin_once_and_leak_nothing():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    first = prompt(allocator, budget, 2000)
    pinned_bytes = first.pinned_bytes
    del first
    for seed in range(100):
        # the rows of other stores are overwritten
        prompt(allocator, budget, 2000 - 17 * seed, seed)
        assert budget.used_bytes == 0
    finish()
    assert fake.calls * SLAB == len(fake.live) * SLAB == allocator.cache.kept_bytes == pinned_bytes
    assert allocator.cache.release() == pinned_bytes
    assert not fake.live
    assert allocator.cache.kept_bytes == 0


def test_a_slab_waits_for_what_is_in_flight_before_others_get_it():
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    slab = allocator.allocate(SLAB)
    slab.view(SLAB).fill_(7)
    assert fake.settled == 0
    slab.free()
    assert fake.settled == 1
    again = allocator.allocate(SLAB)
    assert again.device_address == slab.device_address
    assert allocator.allocate(SLAB).device_address != slab.device_address
    assert again.view(SLAB).eq(7).all()


def test_other_sizes_and_allocators_have_slabs_of_their_own():
    one, other = FakeAllocator(), FakeAllocator()
    cache = SlabCache(Budget())
    allocators = [CachingAllocator(each, cache) for each in (one, other)]
    allocators[0].allocate(SLAB).free()
    allocators[0].allocate(2 * SLAB)
    allocators[1].allocate(SLAB)
    assert (one.calls, other.calls) == (2, 1)
    assert cache.kept_bytes == SLAB


def test_what_is_kept_makes_room_within_the_budget():
    fake = FakeAllocator()
    allocator, budget = caching(fake, limit=4 * SLAB)
    slabs = [allocator.allocate(SLAB) for _ in range(4)]
    for slab in slabs:
        slab.free()
    assert len(fake.live) == 4
    budget.take(3 * SLAB)  # a pool takes slabs from the cache before it allocates one
    large = allocator.allocate(3 * SLAB)
    assert allocator.cache.kept_bytes == SLAB
    assert len(fake.live) == 2
    large.free()
    budget.give(3 * SLAB)


def test_where_the_machine_has_no_more_what_is_kept_is_given_back():
    fake = FakeAllocator(fails=[2, 3])
    allocator, _ = caching(fake)
    for slab in [allocator.allocate(SLAB), allocator.allocate(SLAB)]:
        slab.free()
    with pytest.raises(MemoryError, match="none left"):
        allocator.allocate(2 * SLAB)  # fails with the cached slabs, and after they are released
    assert not fake.live
    allocator.allocate(SLAB).free()
    fake.fails = [fake.calls]
    assert allocator.allocate(2 * SLAB)
    assert len(fake.live) == 1


def test_what_will_be_needed_is_pinned_before_the_first_token():
    """A thread pins memory: appends of the prompt do not, and no more is pinned than needed."""
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    stores = [host_store(allocator, budget=budget) for _ in range(3)]
    for store in stores:
        store.pin_ahead(2000, 2)  # 16 blocks are 6 slabs, and one more is allocated ahead
    finish()
    assert allocator.cache.kept_bytes == 21 * SLAB
    here = threading.current_thread().name
    assert fake.calls == 21
    assert here not in fake.threads
    for seed, store in enumerate(stores):
        append(store, tokens(1000, seed), tokens(1000, seed + 9))
        settled(store)
        store.pin_ahead(2000, 2)  # is available
        wanted = append(TensorStore(GEOMETRY), tokens(1000, seed), tokens(1000, seed + 9))
        assert_same(store, wanted)
    finish()
    assert fake.calls == 21
    assert here not in fake.threads


def test_what_is_expected_of_a_store_goes_with_it():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    for _ in range(20):  # prompts that end before they have begun
        store = host_store(allocator, budget=budget)
        store.pin_ahead(2000, 2)
        finish()
        del store
    assert fake.calls == 7
    store = host_store(allocator, budget=budget)
    append(store, tokens(300))
    store.pin_ahead(600, 2)  # 6 blocks are needed, and it has 4
    settled(store)
    assert fake.calls == 7


def test_what_is_expected_stays_within_the_budget_and_fails_nowhere():
    fake = FakeAllocator()
    allocator, budget = caching(fake, limit=4 * SLAB)
    store = host_store(allocator, budget=budget)
    store.pin_ahead(4000, 2)
    finish()
    assert allocator.cache.kept_bytes == 4 * SLAB
    settled(append(store, tokens(700)))
    assert allocator.cache.kept_bytes + budget.used_bytes == 4 * SLAB
    fake = FakeAllocator(fails=[1])
    allocator, budget = caching(fake)
    store = host_store(allocator, budget=budget)
    store.pin_ahead(4000, 2)
    finish()
    assert (fake.calls, allocator.cache.kept_bytes) == (2, SLAB)
    append(store, tokens(700))


def test_rows_in_several_places_expect_nothing_of_the_host():
    on_device, on_host = OnDeviceAllocator(), FakeAllocator()
    store = mixed_store(on_device, CachingAllocator(on_host, SlabCache(Budget())), 2)
    store.pin_ahead(4000, 2)
    finish()
    assert (on_device.calls, on_host.calls) == (0, 0)


def test_an_index_passes_on_what_it_will_need():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    index = Case(2, 2, 8, 8).index("exact+reuse", store=host_store(allocator, budget=budget))
    index.capability(ReservesAhead).reserve_ahead(600, batch=1)
    finish()
    assert fake.calls == 2
    with pytest.raises(ValueError, match="batch: got 0"):
        index.reserve_ahead(600, batch=0)
    Case(2, 2, 8, 8).index("exact").reserve_ahead(600, batch=1)  # the worker has nothing to do


def test_some_may_stay():
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    for slab in [allocator.allocate(SLAB) for _ in range(4)]:
        slab.free()
    assert allocator.cache.release(2 * SLAB + 1) == 2 * SLAB
    assert allocator.cache.kept_bytes == 2 * SLAB
    with pytest.raises(ValueError, match="keep_bytes: got -1"):
        release_pinned(-1)


def test_threads_share_it():
    fake = FakeAllocator()
    allocator, _ = caching(fake)

    def work(number):
        for _ in range(50):
            slabs = [allocator.allocate(SLAB) for _ in range(3)]
            for slab in slabs:
                slab.view(SLAB).fill_(number)
            assert all(slab.view(SLAB).eq(number).all() for slab in slabs)
            for slab in slabs:
                slab.free()
        done.append(number)

    done = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    assert allocator.cache.kept_bytes == len(fake.live) * SLAB
    assert fake.calls == len(fake.live) <= 12


@pytest.mark.gpu
def test_a_hundred_prompts_on_a_gpu():
    """Rows of many lengths are read correctly, and host memory is pinned once."""
    case = Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128, device="cuda")
    release_pinned()
    keys, values = case.tokens(30_000)
    ids = torch.randint(30_000, (1, 2, 64), device="cuda")
    kept = []
    for prompt in range(100):
        index = case.index("pariskv", backend="cuda", store="host")
        index.append(keys.roll(prompt, 2), values)
        want = keys.roll(prompt, 2).gather(2, ids[..., None].expand(-1, -1, -1, 128))
        assert torch.equal(index._store.gather(ids).keys, want)
        index._store._pool.settle()
        del index
        gc.collect()
        kept.append(shared_cache().kept_bytes)
    assert set(kept) == {kept[0]}
    assert pinned(torch.device("cuda:0")).on_host
    assert release_pinned() == kept[0]
    assert shared_cache().kept_bytes == 0
