"""`store="auto"`: rows are stored on the device while there is room, then on the host.

First come tests of the store, on memory that stands for both places; then tests of decode steps
over its rows, whose kernels are emulated on a CPU.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.core.capability import capability
from kvindex.core.protocol import PlacesRows
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.storage.codecs import CODES
from kvindex.storage.store import PlacedRows, TensorStore
from kvindex_cuda.memory.async_copy import PinnedAllocator
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.device_budget import DeviceBudget, rows_of
from kvindex_cuda.memory.slab_pool import DeviceAllocator, Tier
from tests.cuda.devices import on
from tests.cuda.graphs import recorded
from tests.cuda.host_memory import (
    GEOMETRY,
    SLAB,
    FakeAllocator,
    OnDeviceAllocator,
    append,
    assert_same,
    finish,
    mixed_store,
    settled,
    tokens,
)
from tests.cuda.memory.test_block_store import operations
from tests.support.helpers import Case, assert_same_hits, follow_changes, mostly_slow, part, slow
from tests.support.sequences import Sequence

# The store


def places_of(store, on_device):
    """For each block in the table, return whether the allocator `on_device` has allocated it."""
    spans = [(slab.device_address, slab.device_address + SLAB) for slab in on_device.live]
    return [
        [any(a <= at < b for a, b in spans) for at in row if at] for row in store.table.tolist()
    ]


def assert_placed(store, on_device, batch=2):
    """The marks and counts of the store equal those that follow from the addresses."""
    found = places_of(store, on_device)
    marked = [row[: len(each)] for row, each in zip(store.on_device.tolist(), found, strict=True)]
    assert marked == found
    assert isinstance(store, PlacedRows)
    assert store.on_host == any(not all(row) for row in found)
    slots = [min(256, max(0, len(store) - 256 * i)) for i in range(16)]
    on_device = 2 * sum(n for row in found for n, here in zip(slots, row, strict=False) if here)
    assert store.rows_by_place() == {
        "device": on_device,
        "host": 2 * batch * len(store) - on_device,
    }


@given(operations, st.integers(0, 5), st.lists(st.integers(0, 4), max_size=3))
def test_any_history_agrees_with_the_store_of_the_core(history, slabs, fails):
    """The device has room for few slabs only, and fails to allocate some of them."""
    on_device, on_host, budget = OnDeviceAllocator(fails), FakeAllocator(), Budget()
    # more than any history needs, because `assert_placed` counts the table's 16 blocks
    store = mixed_store(on_device, on_host, slabs, budget=budget)
    reference, batch = TensorStore(GEOMETRY), 2
    for seed, (what, how) in enumerate(history):
        if what == "append" and len(store) + how <= 4096:
            piece = tokens(how, seed, batch)
            append(store, piece), append(reference, piece)
        elif what == "truncate":
            store.truncate(how), reference.truncate(how)
        elif what == "reset":
            store.reset()
            reference, batch = reference.emptied(), 2
        elif what == "reorder" and len(store):
            order = torch.tensor(how) % batch
            store, reference, batch = store.reordered(order), reference.reordered(order), len(how)
        assert_same(store, reference, batch, seed)
        if len(store):
            assert_placed(store, on_device, batch)
        assert len(on_device.live) <= slabs
    del store
    finish()
    assert (on_device.live, on_host.live, budget.used_bytes) == (set(), set(), 0)


def test_the_device_is_filled_first():
    on_device, on_host = OnDeviceAllocator(), FakeAllocator()
    store = settled(append(mixed_store(on_device, on_host, 2), tokens(500)))  # 4 of 6 blocks
    # the slab that is allocated ahead is on the host
    assert (len(on_device.live), len(on_host.live)) == (2, 1)
    assert store.rows_by_place() == {"device": 2000, "host": 0}
    assert not store.on_host
    settled(append(store, tokens(500, 1)))  # 8 of 9
    assert store.on_host
    assert_placed(store, on_device)
    assert store.rows_by_place() == {"device": 2 * (1000 + 512), "host": 2 * 488}
    store.truncate(700)
    assert store.rows_by_place() == {"device": 2 * (700 + 512), "host": 2 * 188}
    assert store.on_device is store._table.on_device


def test_one_that_prefers_nothing_is_in_one_place():
    for allocator, place in ((OnDeviceAllocator(), "device"), (FakeAllocator(), "host")):
        store = append(BlockStore(GEOMETRY, allocator, slab_bytes=SLAB, budget=Budget()), tokens(9))
        assert store.on_device is None
        assert store.on_host == (place == "host")
        assert store.rows_by_place() == {"device": 0, "host": 0} | {place: 36}


def test_a_device_that_fails_leaves_its_rows_to_the_host_and_is_asked_again():
    on_device, on_host = OnDeviceAllocator(fails=range(1, 40)), FakeAllocator()
    store = append(mixed_store(on_device, on_host, 10), tokens(900))
    assert_placed(settled(store), on_device)
    assert (len(on_device.live), len(on_host.live)) == (1, 3)
    on_device.fails = ()
    append(store, tokens(900, 1))
    assert_placed(settled(store), on_device)
    assert len(on_device.live) > 1
    assert_same(store, append(TensorStore(GEOMETRY), tokens(900), tokens(900, 1)))


def test_where_neither_has_room_nothing_is_taken():
    on_device, on_host, budget = OnDeviceAllocator(), FakeAllocator(), Budget(limit_bytes=SLAB)
    store = settled(append(mixed_store(on_device, on_host, 2, budget=budget), tokens(300)))
    before, table = (len(on_device.live), len(on_host.live)), store.table.clone()
    with pytest.raises(MemoryError, match="the limit is"):
        append(store, tokens(3000, 1))
    assert (len(on_device.live), len(on_host.live)) == before
    assert torch.equal(store.table, table)
    assert budget.used_bytes == len(on_host.live) * SLAB
    append(store, tokens(700, 1))  # the memory that there is room for
    assert_placed(store, on_device)


def test_a_view_reads_both_places():
    on_device = OnDeviceAllocator()
    store = append(mixed_store(on_device, FakeAllocator(), 1), tokens(1000, batch=1))
    view = store.expand_batch(3)
    assert view.on_device.shape == view.table.shape == (3, 16)
    assert_same(view, append(TensorStore(GEOMETRY), tokens(1000, batch=1)).expand_batch(3), 3)


# Choosing how much device memory to use


@pytest.fixture
def device():
    """A store whose rows no other store counts."""
    rows_of.cache_clear()
    yield torch.device("cuda:7")
    rows_of.cache_clear()


def test_rows_take_a_share_of_what_they_and_the_free_memory_come_to(device):
    free = 1000
    budgets = [DeviceBudget(device, 0.6, lambda _: free) for _ in range(2)]
    for taken in range(0, 600, 100):
        assert budgets[taken // 100 % 2].try_take(100)  # stores count their memory together
        free -= 100
    assert not budgets[0].try_take(100)
    assert budgets[1].used_bytes == 600
    budgets[0].give(100)
    free += 100
    assert budgets[1].try_take(100)
    free = 300  # the model, or another process, has taken some memory
    budgets[0].give(100)
    assert not budgets[0].try_take(100)
    assert DeviceBudget(device, 1.0, lambda _: free).try_take(100)


@pytest.mark.parametrize("share", [0, -1, 1.5, "half"])
def test_a_share_is_above_0_and_up_to_1(device, share):
    with pytest.raises((TypeError, ValueError), match="device_fraction: got"):
        DeviceBudget(device, share)


def test_options_of_a_line():
    case = Case()
    with pytest.raises(
        ValueError, match=r"device_fraction: got 0.5 with store='host', allowed only"
    ):
        case.index("exact", store="host", device_fraction=0.5)
    with pytest.raises(ValueError, match="device_fraction: got 2"):
        case.index("exact", store="auto", device_fraction=2)
    one, other = (
        case.index(f"exact:store={name}") for name in ("auto:device_fraction=.5", "device")
    )
    for index in (one, other):
        index.append(*case.tokens(90))
    assert one.nbytes() == other.nbytes()  # a CPU has only one place
    assert_same_hits(*(index.search(case.queries(), k=9) for index in (one, other)))


def test_one_tensor_is_in_one_place(device):
    with pytest.raises(
        ValueError, match="store: got 'auto' for a TensorStore on cuda:7, allowed is"
    ):
        TensorStore(replace(GEOMETRY, device=device), "auto")


# The decode step

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=2)
K = 40


class HostMemory(DeviceAllocator):
    """CPU memory that stands for a GPU's host memory."""

    on_host = True


def store_of(index, near_blocks, row_codec="plain"):
    """Return an empty store that puts the first n blocks on the device and the others on
    the host.
    """
    geometry = index.geometry
    alone = BlockStore(geometry, DeviceAllocator(geometry.device), row_codec=row_codec)
    size = alone.block_bytes
    preferred = Tier(DeviceAllocator(geometry.device), Budget(near_blocks * size))
    if geometry.device.type == "cuda":
        on_host = PinnedAllocator(geometry.device)
    else:
        on_host = HostMemory(geometry.device)
    options = dict(row_codec=row_codec, slab_bytes=size, preferred=preferred, budget=Budget())
    return BlockStore(geometry, on_host, **options)


def made(device, near_blocks, case=CASE, row_codec="plain", **options):
    """An index on kernels over such a store, or over rows on the device if the number is None."""
    given = dict(backend="cuda", device=device) | options
    if near_blocks is None:
        return case.index("pariskv", **given, row_codec=row_codec)
    store = store_of(case.index("exact", device=device), near_blocks, row_codec)
    return case.index("pariskv", **given, store=store)


def moved(tokens, device):
    return tuple(piece.to(device) for piece in tokens)


@pytest.fixture
def place(request):
    with on(request.param) if request.param == "cpu" else nullcontext():
        yield request.param


GPU = pytest.param("cuda", marks=pytest.mark.gpu)
in_both = pytest.mark.parametrize("place", ["cpu", GPU], indirect=True)
in_both_slowly = pytest.mark.parametrize("place", [slow("cpu"), GPU], indirect=True)


@in_both
@pytest.mark.parametrize("row_codec", mostly_slow(["plain", *CODES], "int8"))
def test_the_cache_keeps_rows_of_the_host_alone(place, row_codec):
    """Of each sequence, 3 blocks are on the device and 3 on the host."""
    index, other = (made(place, on_device, row_codec=row_codec) for on_device in (6, None))
    for each in (index, other):
        each.append(*moved(CASE.tokens(768), place))
        each.append(*moved(CASE.tokens(700, seed=1), place))
    resident, queries = ResidentRows(index.geometry, 2, 1), CASE.queries().to(place)
    ids, on_device = index.search(queries, k=K).ids, index._store.on_device
    on_host = on_device.gather(1, (ids // 256).flatten(1)).view_as(ids) == 0
    assert 0 < on_host.sum() < on_host.numel()
    want = other.attend(queries, resident, k=K).output
    got = index.attend(queries, resident, k=K).output
    close = dict(rtol=1e-5, atol=1e-5)  # rows come in any order
    torch.testing.assert_close(got, want, **close)
    cache = index._executor.cache
    assert cache.counts[:, 0].tolist() == on_host.sum(-1).flatten().tolist()
    held = [sorted(tag for tag in tags if tag >= 0) for tags in cache.tags.tolist()]
    ids, on_host = ids.flatten(0, 1), on_host.flatten(0, 1)
    assert held == [sorted(i[f].tolist()) for i, f in zip(ids, on_host, strict=True)]
    torch.testing.assert_close(index.attend(queries, resident, k=K).output, want, **close)
    use = index.placement()
    assert (use.looked_up, use.found) == (2 * int(on_host.sum()), int(on_host.sum()))
    assert (use.device, use.host) == (4 * 768, 4 * 700)
    assert use.hit_rate == cache.hit_rate() == 0.5
    assert other._executor.cache is None
    hits = index.search(queries, k=K)
    hits.ids[:, :, ::3] = -1
    got, want = (each.attend_hits(queries, hits, resident).output for each in (index, other))
    torch.testing.assert_close(got, want, **close)
    more = (hits.ids >= 0) & (
        on_device.gather(1, (hits.ids // 256).clamp_min(0).flatten(1)) == 0
    ).view_as(hits.ids)
    assert index.placement().looked_up == use.looked_up + int(more.sum())
    assert index.placement().found == use.found + int(more.sum())


@in_both
def test_a_row_of_the_host_is_read_where_it_was_kept(place):
    index = made(place, 2)
    index.append(*moved(CASE.tokens(600), place))
    resident, queries = ResidentRows(index.geometry, 2, 1), CASE.queries().to(place)
    before = index.attend(queries, resident, k=K).output
    store = index._store
    if place == "cuda":
        torch.cuda.synchronize()
    for number in range(6):
        if store._pool.is_on_host(number):
            store._table._block(number).fill_(0xFF)
    torch.testing.assert_close(
        index.attend(queries, resident, k=K).output, before, rtol=1e-5, atol=1e-5
    )
    for number in range(6):
        if not store._pool.is_on_host(number):
            store._table._block(number).fill_(0xFF)
    assert index.attend(queries, resident, k=K).output.isnan().any()


@in_both
def test_without_rows_on_the_host_there_is_no_cache(place):
    index, other = made(place, 6), made(place, None)
    resident, queries = ResidentRows(index.geometry, 2, 1), CASE.queries().to(place)
    for count, cached in ((700, False), (500, True)):
        for each in (index, other):
            each.append(*moved(CASE.tokens(count, seed=count), place))
        got, want = (each.attend(queries, resident, k=K).output for each in (index, other))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert (index._executor.cache is not None) == cached
    assert index.nbytes()["rows_device"] == 4 * 768 * index.row_bytes
    assert index.nbytes()["rows_host"] == 4 * (1200 - 768) * index.row_bytes
    said = index.explain()
    assert "rows: 3,072 on the device, 1,728 on the host (512 bytes each" in said
    assert "a cache of 4,096 per KV head had" in said
    assert "cache of" not in other.explain()


@in_both_slowly
def test_it_follows_changes(place):
    """Appends, truncations, reorders and resets give the rows of an index whose rows are all on the
    device.
    """
    index, other = made(place, 5), made(place, None)

    def same(mine, theirs, queries):
        hits, wanted = (each.search(queries, k=20) for each in (mine, theirs))
        assert_same_hits(hits, wanted)
        assert torch.equal(mine.fetch(hits).values, theirs.fetch(wanted).values)
        if len(mine):
            resident = ResidentRows(mine.geometry, len(queries), 1)
            got, want = (e.attend(queries, resident, k=20).output for e in (mine, theirs))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    follow_changes(index, other, CASE, place, same)


@in_both_slowly
def test_copies_branches_and_states(place):
    tokens, queries = moved(CASE.tokens(1200), place), CASE.queries().to(place)
    index = made(place, 3)
    index.append(*part(tokens, 0, 500))
    before = index.checkpoint()

    def rows(index):
        everything = torch.arange(len(index), device=place).expand(2, 2, -1)
        return index._store.gather(everything).keys

    index.append(*part(tokens, 500, 1200))
    twin, other = copy.deepcopy(index), made(place, 4)
    other.load_state_dict(index.state_dict())
    for each in (index, twin, other):
        assert torch.equal(rows(each), tokens[0])
        assert_same_hits(each.search(queries, k=9), index.search(queries, k=9))
    index.rollback(before)
    assert torch.equal(rows(index), tokens[0][:, :, :500])
    index.append(*part(tokens, 600, 900))
    assert torch.equal(rows(index)[:, :, 500:], tokens[0][:, :, 600:900])
    assert torch.equal(rows(twin), tokens[0])


@pytest.mark.slow
@in_both
def test_a_layers_graphs_follow_it_to_the_host(place):
    """Outputs equal those of a layer without graphs bit by bit, also at the step at which the cache
    starts.
    """
    case = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
    sizes = dict(k=20, sink=4, local_window=8, update_every=4, dense_below=40)
    sequence = Sequence.of(case, 560)
    with recorded() if place == "cpu" else nullcontext() as graphs:
        layers = [AttentionLayer(made(place, 2, case), graphs=on, **sizes) for on in (True, False)]
        length, cached = 0, []
        for count in (500, *[1] * 50):
            parts = [one.to(place) for one in sequence.parts(length, length + count)]
            length += count
            got, want = (layer.step(*parts) for layer in layers)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            cached.append(layers[0].index._executor.cache is not None)
    assert cached[1] is False
    assert cached[-1] is True
    if graphs is not None:
        assert graphs.made == 2
        assert graphs.replays > 40


@in_both
def test_wrappers_tell_where_rows_are(place):
    index = CASE.index("pariskv:preset=fast+sample", backend="cuda", device=place)
    assert capability(index, PlacesRows) is index
    index.append(*moved(CASE.tokens(300), place))
    assert (index.placement().device, index.placement().host) == (1200, 0)
    plain = CASE.index("exact", backend="torch", device=place)
    assert capability(plain, PlacesRows) is None
    with pytest.raises(TypeError, match="store: got a TensorStore, which cannot report where"):
        plain.placement()


# On a GPU


GPU = Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
def test_where_there_is_room_all_rows_are_on_the_device():
    index = GPU.index("pariskv", backend="cuda", store="auto")
    index.append(*GPU.tokens(9000))
    use = index.placement()
    assert (use.device, use.host, use.cache_rows) == (2 * 9000, 0, 0)
    rows_before = rows_of(index.geometry.device).used_bytes
    assert rows_before > 0
    index.reset()
    assert rows_of(index.geometry.device).used_bytes < rows_before


@pytest.fixture
def freed_memory():
    """Return device memory that PyTorch has cached, before and after a test that fills it.

    A CUDA graph of a later test could not allocate what is cached outside of its memory pool.
    """
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("freed_memory")
@pytest.mark.parametrize("share", [0.001, pytest.param(0.5, marks=pytest.mark.slow)])
def test_where_there_is_none_they_go_to_the_host(share):
    """Rows go to the host because of the configured fraction, or because little device memory is
    left. Run this test alone.
    """
    left, full = torch.cuda.mem_get_info()[0], None
    if share == 0.5:
        full = torch.empty(left - 2**29, dtype=torch.uint8, device="cuda")
        left = 2**29
    index = GPU.index("pariskv", backend="cuda", store="auto", device_fraction=share)
    other = GPU.index("pariskv", backend="cuda", store="host")
    queries = GPU.queries()
    resident = ResidentRows(index.geometry, len(queries), 1)
    for seed in range(12):  # 32 MiB of rows each
        tokens = GPU.tokens(2**15, seed)
        for each in (index, other):
            each.append(*tokens)
    use = index.placement()
    assert use.host > 0
    assert 0 < use.device * use.row_bytes <= share * left
    hits = [each.search(queries, k=50) for each in (index, other)]
    assert_same_hits(*hits)
    rows = [each.fetch(hit) for each, hit in zip((index, other), hits, strict=True)]
    assert torch.equal(rows[0].values, rows[1].values)
    got, want = (each.attend(queries, resident, k=50).output for each in (index, other))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    del full
