"""Stores that share blocks behave as separate stores do in any interleaving, and no block
is lost.
"""

import copy
import gc
import random
import threading

import pytest
import torch

from kvindex.storage.columns import Columns
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.block_table import BlockTable
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.code_blocks import CodeBlocks
from kvindex_cuda.memory.counted_pool import CountedPool
from kvindex_cuda.memory.slab_pool import Tier
from tests.cuda.host_memory import (
    BLOCK,
    GEOMETRY,
    SLAB,
    FakeAllocator,
    OnDeviceAllocator,
    append,
    assert_same,
    finish,
    host_store,
    mixed_store,
    tokens,
)
from tests.cuda.memory.test_code_blocks import LAYOUT, codes
from tests.cuda.memory.test_code_blocks import assert_same as assert_same_codes
from tests.support.helpers import slow


def assert_counted(stores):
    """Each block is free, waits to be free, or is counted once for each ledger that contains it."""
    for pool in {store._pool for store in stores}:
        pool.shared([])
        ledgers = list(pool._ledgers.values())
        held = [block for ledger in ledgers for block in ledger]
        assert all(len(set(ledger)) == len(ledger) for ledger in ledgers)
        apart = [*set(held), *pool._free, *pool._unread]
        assert sorted(apart) == [*range(len(pool._views) * pool.slab_blocks)]
        assert pool._more == {b: held.count(b) - 1 for b in set(held) if held.count(b) > 1}
        assert {id(store._table.ledger) for store in stores if store._pool is pool} == {
            *pool._ledgers
        }


def assert_placed(store):
    """The marks of a table equal those of its pool, and none is left for blocks that it shares no
    more.
    """
    held = store._table._numbers.shape[1]
    want = [[not store._pool.is_on_host(n) for n in row] for row in store._table._numbers.tolist()]
    assert store.on_device[:, :held].bool().tolist() == want
    assert not store.on_device[:, held:].any()


def history(seed, deeds):
    draw = random.Random(seed)
    for number in range(deeds):
        deed = draw.choice(["append"] * 4 + ["fork"] * 3 + ["truncate", "back", "drop", "reorder"])
        yield number, deed, draw


MORE = pytest.mark.slow, pytest.mark.longest


@pytest.mark.parametrize(
    ("seed", "slabs"),
    [
        *(slow(0, 0), slow(1, 0), *(pytest.param(seed, 0, marks=MORE) for seed in (2, 3, 4))),
        *((5, 3), slow(6, 6)),
    ],
)
def test_any_interleaving_is_that_of_separate_stores(seed, slabs):
    """Run appends, forks, truncations, rollbacks, drops and resets.

    slabs: those of the device, which are used first.
    """
    allocator, on_device, budget = FakeAllocator(), OnDeviceAllocator(), Budget()
    if slabs:
        store = mixed_store(on_device, allocator, slabs, budget=budget, max_tokens=2**20)
    else:
        store = host_store(allocator, budget=budget, max_tokens=2**20)
    pairs = [[append(store, tokens(700)), append(TensorStore(GEOMETRY), tokens(700))]]
    del store
    for number, deed, draw in history(seed, 50):
        at = draw.randrange(len(pairs))
        mine, truth = pairs[at]
        batch = mine._table.batch or 2
        if deed == "append":
            piece = tokens(draw.choice([1, 100, 256, 300]), number, batch)
            append(mine, piece), append(truth, piece)
        elif deed == "fork" and len(pairs) < 5:
            before = mine.pinned_bytes
            pairs.append([copy.deepcopy(mine), copy.deepcopy(truth)])
            more = pairs[-1][0].pinned_bytes - before
            assert more <= (batch * BLOCK + SLAB if len(mine) % 256 else 0)
        elif deed == "truncate" and len(mine):
            length = draw.randrange(len(mine) + 1)
            mine.truncate(length), truth.truncate(length)
        elif deed == "back":
            before = mine.checkpoint()
            if draw.random() < 0.5 and len(pairs) < 5:
                pairs.append([copy.deepcopy(mine), copy.deepcopy(truth)])
            append(mine, tokens(draw.choice([1, 400]), 999, batch))
            mine.rollback(before)
        elif deed == "reorder" and len(mine):
            order = torch.tensor(draw.choice([[1, 0], [0, 0]])) % batch
            pairs[at] = [mine.reordered(order), truth.reordered(order)]
        elif deed == "drop" and len(pairs) > 1:
            del pairs[at]
        elif deed == "drop":
            mine.reset()
            pairs[at][1] = truth.emptied()
        del mine, truth
        finish()
        for mine, truth in pairs:
            if len(mine):
                assert_same(mine, truth, mine._table.batch, number)
            if slabs:
                assert_placed(mine)
            assert len(mine) == len(truth)
        assert_counted([mine for mine, _ in pairs])
    del pairs, mine, truth
    gc.collect()
    finish()
    assert (len(allocator.live), len(on_device.live), budget.used_bytes) == (0, 0, 0)


def test_a_fork_shares_full_blocks_and_copies_the_open_one():
    store = append(host_store(), tokens(600))
    fork = copy.deepcopy(store)
    mine, other = store.table, fork.table
    assert torch.equal(mine[:, :2], other[:, :2])
    assert not (mine[:, 2:3] == other[:, 2:3]).any()
    assert (other[:, 3:] == 0).all()
    append(fork, tokens(300, 1))
    append(store, tokens(300, 2))
    assert torch.equal(store.table[:, :2], fork.table[:, :2])


@pytest.mark.slow
def test_a_block_is_free_when_nobody_holds_it():
    allocator = FakeAllocator()
    store = append(host_store(allocator), tokens(512))
    forks = [append(copy.deepcopy(store), tokens(256, seed)) for seed in range(3)]
    finish()
    slabs = len(allocator.live)
    for seed in range(9):  # forks come and go in the same blocks
        forks[seed % 3] = None
        gc.collect()
        forks[seed % 3] = append(copy.deepcopy(store), tokens(256, seed))
        finish()
    assert len(allocator.live) == slabs
    del store  # what forks read does not change
    gc.collect()
    for seed, fork in zip((6, 7, 8), forks, strict=True):
        reference = append(TensorStore(GEOMETRY), tokens(512), tokens(256, seed))
        assert_same(fork, reference)


def test_no_memory_for_a_fork_changes_nothing():
    store = append(host_store(budget=Budget(SLAB * 2)), tokens(600))
    finish()
    while store.pinned_bytes < 2 * SLAB or store._table.spare(len(store)) >= 2:
        append(store, tokens(256, 1))
        finish()
    store.truncate(600)
    reference = append(TensorStore(GEOMETRY), tokens(600))
    with pytest.raises(MemoryError):
        copy.deepcopy(store)
    gc.collect()
    assert_same(store, reference)
    assert_counted([store])


class FailsAt:
    """Make a table fail when it names its next block."""

    def __init__(self, monkeypatch, kind):
        monkeypatch.setattr(kind, "_name", self.fail)

    def fail(self, *given):
        raise MemoryError


def test_a_cut_that_cannot_have_its_own_blocks_changes_nothing(monkeypatch):
    store = append(host_store(), tokens(600))
    fork = copy.deepcopy(store)
    store.truncate(300)
    with monkeypatch.context() as patch:
        FailsAt(patch, BlockTable)
        with pytest.raises(MemoryError):
            append(store, tokens(10, 5))
    for one, length in ((store, 300), (fork, 600)):
        reference = append(TensorStore(GEOMETRY), tokens(600))
        reference.truncate(length)
        assert_same(one, reference)
    append(store, tokens(10, 5))
    assert_same(fork, append(TensorStore(GEOMETRY), tokens(600)))
    assert_counted([store, fork])


def test_members_of_two_threads_take_different_blocks():
    tier = Tier(FakeAllocator(), Budget())
    pool = CountedPool(64, 4, tier, device=torch.device("cpu"))
    taken = [[], []]

    def work(mine):
        for _ in range(300):
            mine += pool.take(1)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*taken[0], *taken[1]}) == 600


# Codes


@pytest.mark.parametrize("unit", [1, 256])
@pytest.mark.parametrize(
    "seed", [0, slow(1), *(pytest.param(seed, marks=MORE) for seed in range(2, 8))]
)
def test_any_interleaving_of_codes_is_that_of_separate_ones(seed, unit):
    sizes = [1, 100, 256, 300] if unit == 1 else [256, 512]
    blocks, columns = CodeBlocks(LAYOUT, 3, torch.device("cpu"), 2**16, unit=unit), Columns()
    pairs = [[blocks, columns]]
    for one in pairs[0]:
        one.append(codes(512))
    for number, deed, draw in history(seed, 60):
        at = draw.randrange(len(pairs))
        mine, truth = pairs[at]
        if deed == "append" and len(mine) < 3000:
            count = draw.choice(sizes)
            for one in (mine, truth):
                one.append(codes(count, seed=number))
        elif deed == "fork" and len(pairs) < 5:
            pairs.append([copy.deepcopy(mine), copy.deepcopy(truth)])
            full = len(mine) // 256
            assert torch.equal(pairs[-1][0].table[:, :full], mine.table[:, :full])
        elif deed == "truncate" and len(mine):
            length = draw.randrange(len(mine) + 1) // unit * unit
            mine.truncate(length), truth.truncate(length)
        elif deed == "back":
            before = mine.checkpoint()
            if draw.random() < 0.5 and len(pairs) < 5:
                pairs.append([copy.deepcopy(mine), copy.deepcopy(truth)])
            mine.append(codes(draw.choice(sizes), seed=999))
            if unit == 256:
                mine.reserve_open(2)
                mine.put_open(codes(7, seed=5))
            mine.rollback(before)
        elif deed == "reorder" and len(mine):
            order = torch.tensor([1, 0])
            pairs[at] = [mine.reordered(order), truth.reordered(order)]
        elif deed == "drop" and len(pairs) > 1:
            del pairs[at]
        del mine, truth
        for mine, truth in pairs:
            if len(mine):
                assert_same_codes(mine, truth)


def test_an_open_block_is_not_written_where_a_fork_reads():
    blocks = CodeBlocks(LAYOUT, 3, torch.device("cpu"), 2**16, unit=256)
    blocks.append(codes(768))
    fork, table = copy.deepcopy(blocks), blocks.table
    blocks.truncate(256)
    blocks.reserve_open(2)
    blocks.put_open(codes(9, seed=5))
    assert blocks.table is not table
    columns = Columns()
    columns.append(codes(768))
    assert_same_codes(fork, columns)


def test_a_copy_outlives_a_way_back_past_it():
    blocks, columns = CodeBlocks(LAYOUT, 3, torch.device("cpu"), 2**16, unit=256), Columns()
    for one in (blocks, columns):
        one.append(codes(768))
    before = blocks.checkpoint()
    fork = copy.deepcopy(blocks)
    blocks.append(codes(256, seed=1))
    blocks.rollback(before)
    blocks.truncate(256)
    blocks.append(codes(512, seed=2))
    assert_same_codes(fork, columns)


def test_a_store_that_is_alone_is_written_in_place_again():
    store = append(host_store(), tokens(600))
    fork = copy.deepcopy(store)
    del fork
    gc.collect()
    table = store.table
    store.truncate(300)
    append(store, tokens(100, 1))
    assert store.table is table
    assert isinstance(store, BlockStore)
