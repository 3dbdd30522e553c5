"""Pinned slabs that outlive a store are reused, limited in number, and released."""

import copy
import gc
import os
import signal
import threading
import time

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
from kvindex_cuda.memory.slab_pool import Announcement, Pool, Tier
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


def announce(allocator, nbytes, count):
    """Announce slabs, each call for another caller."""
    allocator.expect(made := Announcement(nbytes, count))
    return made


def announced(allocator):
    """Return the number of announced slabs that were not requested yet."""
    return sum(each.count for each in allocator.cache._expected)


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


def pinning(fake, calls):
    """Wait until the allocator has been called `calls` times."""
    deadline = time.monotonic() + 10
    while fake.calls < calls:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_append_waits_for_the_slab_that_is_being_pinned():
    """It does not pin a second one of the same size."""
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    store = host_store(allocator, budget=budget)
    fake.gate.clear()
    store.pin_ahead(200, 2)  # one slab, and one more
    pinning(fake, 1)
    threading.Timer(0.1, fake.gate.set).start()
    append(store, tokens(200))
    settled(store)
    assert fake.calls == 2
    assert {*fake.threads} == {"kvindex-pin"}


def test_an_append_does_not_wait_for_a_slab_of_another_size():
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    fake.gate.clear()
    announce(allocator, 2 * SLAB, 1)
    pinning(fake, 1)
    thread = threading.Thread(target=allocator.allocate, args=(SLAB,))
    thread.start()
    pinning(fake, 2)  # while the first allocation is not finished
    fake.gate.set()
    thread.join()
    finish()


def test_an_append_gets_memory_itself_where_the_slab_it_waits_for_fails():
    fake = FakeAllocator(fails=[0])
    allocator, budget = caching(fake)
    store = host_store(allocator, budget=budget)
    fake.gate.clear()
    store.pin_ahead(4000, 2)
    pinning(fake, 1)
    threading.Timer(0.1, fake.gate.set).start()
    append(store, tokens(200))
    settled(store)
    assert fake.threads[:2] == ["kvindex-pin", threading.current_thread().name]


HANGS_S = 60
"""Seconds after which a child process that hangs is ended."""


def opened():
    """Return an open gate for a child process. A thread of its parent may have held the lock of the
    other gate when the process was forked, and would never release it in the child."""
    gate = threading.Event()
    gate.set()
    return gate


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_does_not_wait_for_a_thread_of_its_parent():
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    fake.gate.clear()
    announce(allocator, SLAB, 1)
    pinning(fake, 1)
    child = os.fork()
    if not child:
        fake.gate = opened()
        os._exit(0 if allocator.allocate(SLAB) else 1)
    deadline, ended = time.monotonic() + 10, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    fake.gate.set()
    finish()
    assert ended
    assert os.waitstatus_to_exitcode(status) == 0


def test_slabs_are_pinned_in_the_order_in_which_they_were_announced():
    """The layers of a model append in this order. Their slabs may have different sizes."""
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    fake.gate.clear()
    given, sizes = [(SLAB, 2), (2 * SLAB, 1), (SLAB, 1), (3 * SLAB, 1)], []
    allocate = fake.allocate
    fake.allocate = lambda nbytes: sizes.append(nbytes) or allocate(nbytes)
    for nbytes, count in given:
        announce(allocator, nbytes, count)
    fake.gate.set()
    finish()
    assert sizes == [SLAB, SLAB, 2 * SLAB, SLAB, 3 * SLAB]


def test_no_slab_is_pinned_in_place_of_one_that_a_prompt_takes(monkeypatch):
    """The background thread runs immediately after a store has taken an announced slab."""
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    store, take, sizes = host_store(allocator, budget=budget), allocator.cache.take, []
    allocate, here = fake.allocate, threading.current_thread()
    monkeypatch.setattr(fake, "allocate", lambda nbytes: sizes.append(nbytes) or allocate(nbytes))

    def taken(owner, nbytes):
        slab = take(owner, nbytes)
        if threading.current_thread() is here:
            announce(allocator, 2 * SLAB, 1)  # starts the thread
            finish()
        return slab

    monkeypatch.setattr(allocator.cache, "take", taken)
    store.pin_ahead(200, 2)  # one slab, and one more
    finish()
    settled(append(store, tokens(200)))
    assert sizes == [SLAB, SLAB, 2 * SLAB]


def test_a_prompt_that_ends_early_withdraws_what_it_announced():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    one, other = (host_store(allocator, budget=budget) for _ in range(2))
    fake.gate.clear()
    one.pin_ahead(4000, 2)
    other.pin_ahead(600, 2)
    pinning(fake, 1)
    one.pin_ahead(0, 2)
    fake.gate.set()
    finish()
    assert fake.calls == 3  # two slabs of the other store, and one more
    other.pin_ahead(200, 2)  # a smaller total replaces it
    assert announced(allocator) == 2


def test_a_rollback_withdraws_what_was_announced():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    store = settled(append(host_store(allocator, budget=budget), tokens(10)))
    before, calls = store.checkpoint(), fake.calls
    fake.gate.clear()
    store.pin_ahead(4000, 2)
    pinning(fake, calls + 1)
    store.rollback(before)
    fake.gate.set()
    finish()
    assert fake.calls == calls + 1
    assert not announced(allocator)
    assert_same(store, append(TensorStore(GEOMETRY), tokens(10)))


@pytest.mark.parametrize("count", [600, 900])
def test_after_a_failure_the_next_announcement_pins(count):
    """Also if it announces the same number of tokens again."""
    fake = FakeAllocator(fails=[0])
    allocator, budget = caching(fake)
    store = host_store(allocator, budget=budget)
    store.pin_ahead(600, 2)
    finish()
    assert (fake.calls, allocator.cache.kept_bytes) == (1, 0)
    store.pin_ahead(count, 2)
    finish()
    assert allocator.cache.kept_bytes == (1 + count // 300) * SLAB


def test_a_pool_that_closes_leaves_the_announcements_of_others():
    """The background thread has failed after the announcement of this pool."""
    fake = FakeAllocator(fails=[0])
    allocator, budget = caching(fake)
    one, other = (Pool(SLAB, 1, Tier(allocator, budget)) for _ in range(2))
    one.expect(8)
    finish()
    fake.gate.clear()
    other.expect(8)
    pinning(fake, 2)
    one.close()
    fake.gate.set()
    finish()
    assert allocator.cache.kept_bytes == 9 * SLAB


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_pins_what_it_announces():
    """It does not have the thread of its parent."""
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    fake.gate.clear()
    announce(allocator, SLAB, 2)
    pinning(fake, 1)
    child = os.fork()
    if not child:
        signal.alarm(HANGS_S)
        fake.gate = opened()
        announce(allocator, SLAB, 1)
        finish()
        os._exit(0 if allocator.cache.kept_bytes == 3 * SLAB else 1)
    fake.gate.set()
    finish()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_withdraws_what_it_announced_itself():
    """The fork and the original use the same pool."""
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    store = settled(append(host_store(allocator, budget=budget), tokens(300)))
    fork = copy.deepcopy(store)
    before = fork.checkpoint()
    store.pin_ahead(4000, 2)
    finish()
    wanted = announced(allocator)
    assert wanted > 1
    fork.pin_ahead(0, 2)
    fork.rollback(before)
    del fork, before
    assert announced(allocator) == wanted
    fork = copy.deepcopy(store)
    before = fork.checkpoint()
    fork.pin_ahead(4000, 2)
    fork.rollback(before)
    assert not announced(allocator)
    fork.pin_ahead(4000, 2)
    assert announced(allocator)
    del fork, before
    assert not announced(allocator)


@pytest.mark.parametrize("at", range(4))
def test_a_collection_while_a_slab_is_cached_counts_all_slabs(at, monkeypatch):
    """Python may run the finalizer of a store at any time, also within a call of the cache."""
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    hashes, hashed = iter(range(99)), CachingAllocator.__hash__
    pools = [Pool(SLAB, 1, Tier(allocator, budget)) for _ in range(2)]
    for pool in pools:
        pool.take(1)

    def collected(owner):
        if next(hashes) == at:
            pools[1].close()
        return hashed(owner)

    monkeypatch.setattr(CachingAllocator, "__hash__", collected)
    pools[0].close()
    pools[1].close()
    announce(allocator, SLAB, 2)
    finish()
    assert (fake.calls, allocator.cache.kept_bytes) == (2, 2 * SLAB)


def test_a_finalizer_in_the_new_thread_may_use_the_cache(monkeypatch):
    """Python may run it before `Thread.start` returns in the calling thread."""
    fake = FakeAllocator()
    allocator, _ = caching(fake)
    slab, start = allocator.allocate(SLAB), threading.Thread.start

    def started(thread):
        freed = threading.Thread(target=slab.free)
        start(freed)
        freed.join(10)
        assert not freed.is_alive()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    announce(allocator, SLAB, 1)
    finish()
    assert fake.calls == 1


def test_without_a_thread_memory_is_pinned_when_needed(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    fake = FakeAllocator()
    allocator, _ = caching(fake)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        made = announce(allocator, SLAB, 2)
    allocator.allocate(SLAB)
    assert fake.threads == [threading.current_thread().name]
    allocator.expect(made)
    finish()
    assert fake.calls == 3


def test_an_interrupt_while_a_thread_starts_is_no_lack_of_threads(monkeypatch):
    """It can make `Thread.start` raise RuntimeError after the thread has started."""
    fake, begin = FakeAllocator(), threading.Thread.start
    allocator, budget = caching(fake)
    store = host_store(allocator, budget=budget)

    def start(thread):
        begin(thread)
        raise RuntimeError("release unlocked lock")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="release unlocked lock"):
            store.pin_ahead(600, 2)
        with pytest.raises(RuntimeError, match="release unlocked lock"):
            append(store, tokens(10))  # pins one slab more in the background
    settled(store)
    assert budget.used_bytes == store.pinned_bytes > 0
    store.pin_ahead(1200, 2)
    finish()
    assert announced(allocator) * SLAB == allocator.cache.kept_bytes


def test_an_index_passes_on_what_it_will_need():
    fake = FakeAllocator()
    allocator, budget = caching(fake)
    index = Case(2, 2, 8, 8).index("exact+reuse", store=host_store(allocator, budget=budget))
    index.capability(ReservesAhead).reserve_ahead(600, batch=1)
    finish()
    assert fake.calls == 2
    index.capability(ReservesAhead).reserve_ahead(0, batch=1)
    assert not announced(allocator)
    with pytest.raises(ValueError, match="batch: got 0"):
        index.reserve_ahead(600, batch=0)
    with pytest.raises(ValueError, match="tokens: got -1"):
        index.reserve_ahead(-1, batch=1)
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
