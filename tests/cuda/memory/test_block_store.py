import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvindex
from kvindex.storage.centers import of_rows
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory import block_store
from kvindex_cuda.memory.block_table import runs, spans
from kvindex_cuda.memory.budget import Budget
from tests.cuda.host_memory import (
    BLOCK,
    GEOMETRY,
    ROW,
    SLAB,
    FakeAllocator,
    append,
    assert_same,
    finish,
    host_store,
    settled,
    tokens,
)


@pytest.mark.parametrize("first", [0, 1, 255, 256, 257, 1100])
@pytest.mark.parametrize("second", [0, 1, 255, 256, 257, 1100])
def test_appends_across_the_borders_of_blocks_and_slabs(first, second):
    pieces = [tokens(first), tokens(second, 1), tokens(3, 2)]
    store, reference = append(host_store(), *pieces), append(TensorStore(GEOMETRY), *pieces)
    assert_same(store, reference)
    assert store.nbytes() == 2 * 2 * (first + second + 3) * ROW


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([0, 1, 7, 255, 256, 257, 600])),
        st.tuples(st.just("truncate"), st.integers(0, 700)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=1, max_size=4)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=8,
)


@given(operations, st.sampled_from([1, SLAB, 100 * SLAB]))
def test_any_history_agrees_with_the_store_of_the_core(history, slab_bytes):
    allocator, budget = FakeAllocator(), Budget()
    store = host_store(allocator, slab_bytes=slab_bytes, budget=budget, max_tokens=2**20)
    reference, batch = TensorStore(GEOMETRY), 2
    for seed, (what, how) in enumerate(history):
        if what == "append":
            piece = tokens(how, seed, batch)
            append(store, piece), append(reference, piece)
        elif what == "truncate":
            store.truncate(how), reference.truncate(how)
        elif what == "reset":
            store.reset()
            reference = reference.emptied()
            batch = 2
        elif len(store):
            order = torch.tensor(how) % batch
            store, reference, batch = store.reordered(order), reference.reordered(order), len(how)
        assert_same(store, reference, batch, seed)
        used = batch * (-(-len(store) // 256)) * BLOCK
        assert used <= store.pinned_bytes <= budget.used_bytes
    del store
    finish()
    assert (len(allocator.live), budget.used_bytes) == (0, 0)


def test_truncated_blocks_are_filled_again():
    allocator = FakeAllocator()
    store = append(host_store(allocator), tokens(700))
    reference = append(TensorStore(GEOMETRY), tokens(700))
    table, pinned = store.table.clone(), settled(store).pinned_bytes
    for part in (store, reference):
        part.truncate(300)
        append(part, tokens(400, 1))
    assert_same(store, reference)
    assert torch.equal(store.table, table)
    assert settled(store).pinned_bytes == pinned


def test_the_table_leads_to_the_bytes_of_every_row():
    allocator = FakeAllocator()
    store = host_store(allocator, max_tokens=2000)
    assert store.table.shape == (0, 8)
    keys, values = tokens(900)
    rows = store._codec.encode(keys, values)
    store.append(store.join(keys, values))
    assert (store.row_bytes, store.block_bytes) == (ROW, BLOCK)
    assert (store.table.dtype, store.table.shape) == (torch.int64, (2, 8))
    assert not store.table[:, 4:].any()
    for b, g, n in [(0, 0, 0), (1, 1, 255), (0, 1, 256), (1, 0, 899), (0, 0, 700)]:
        address = int(store.table[b, n // 256]) + (g * 256 + n % 256) * ROW
        assert address % 16 == 0
        place = address - allocator.shift
        assert any(0 <= place - slab.host_address < SLAB for slab in allocator.live)
        assert ctypes.string_at(place, ROW) == bytes(rows[b, g, n].tolist())


def test_growth_moves_nothing():
    store = append(host_store(), tokens(300))
    table, before = store.table, store.table.clone()
    append(store, *(tokens(250, seed) for seed in range(12)))
    assert store.table is table
    assert torch.equal(table[:, :2], before[:, :2])
    assert (table[:, :13] > 0).all()
    assert len(table[:, :13].unique()) == 26


@pytest.mark.parametrize("rows", ["int8", "fp8", "int4"])
def test_rows_may_be_coded(rows):
    store, plain = (
        append(host_store(row_codec=rows), tokens(600)),
        append(host_store(), tokens(600)),
    )
    assert (store.row_bytes, plain.row_bytes) == (16 if rows == "int4" else 32, ROW)
    ids = torch.tensor([[[599, -1, 3]] * 2] * 2)
    got, want = store.gather(ids), plain.gather(ids)
    center = of_rows(store.center)
    wanted = store._codec.decode(store._codec.encode(want.keys, want.values, center), center)
    assert torch.equal(got.values, wanted.values)
    assert torch.equal(got.keys[:, :, [0, 2]], wanted.keys[:, :, [0, 2]])
    assert not got.keys[:, :, 1].any()
    with pytest.raises(ValueError, match="row_codec: got 'int3', allowed is one of"):
        host_store(row_codec="int3")


def test_blocks_go_where_they_were_joined_for():
    store, reference = append(host_store(), tokens(100)), append(TensorStore(GEOMETRY), tokens(100))
    joined = store.join(*tokens(700, 1))
    assert list(joined) == ["begin", "blocks", "end"]
    append(store, tokens(10, 2)), append(reference, tokens(10, 2))
    with pytest.raises(
        ValueError,
        match=r"rows: got the result of a join .*; call join again at the present length of 110",
    ):
        store.append(joined)
    assert_same(store, reference)
    append(store, tokens(700, 1)), append(reference, tokens(700, 1))
    assert_same(store, reference)


def test_an_empty_store_gives_zeros():
    rows = host_store().gather(torch.full((2, 2, 4), -1))
    assert (rows.keys.shape, rows.values.shape) == ((2, 2, 4, 8), (2, 2, 4, 3))
    assert not rows.keys.any()
    assert list(host_store().blocks(4)) == []


def test_rows_are_copies():
    keys, values = tokens(4)
    store, reference = (
        append(host_store(), (keys, values)),
        append(TensorStore(GEOMETRY), (keys, values)),
    )
    fetched = store.gather(torch.zeros((2, 2, 1), dtype=torch.int64))
    keys.zero_(), fetched.keys.zero_()
    ((_, rows),) = store.blocks(10)
    rows.keys.zero_()
    assert_same(store, reference)


def test_a_repeated_view_reads_and_keeps_the_rows_but_takes_none():
    allocator = FakeAllocator()
    one = tokens(300, batch=1)
    view = append(host_store(allocator), one).expand_batch(3)
    gc.collect()
    assert_same(view, append(TensorStore(GEOMETRY), one).expand_batch(3), 3)
    assert view.table.shape == (3, 16)
    with pytest.raises(
        RuntimeError, match="got a view that expand_batch returned, which is read-only"
    ):
        append(view, tokens(1, batch=3))
    del view
    finish()
    assert not allocator.live


@pytest.mark.parametrize("codec", ["plain", "int4"])
def test_a_view_of_a_store_that_has_no_memory_yet(codec):
    """For example, a store that was emptied and then reordered."""
    store = append(host_store(row_codec=codec), tokens(300, batch=1))
    store.truncate(0)
    view = store.reordered(torch.tensor([0])).expand_batch(3)
    rows = view.gather(torch.full((3, 2, 4), -1))
    assert rows.keys.shape == (3, 2, 4, 8)
    assert not rows.keys.any()
    assert (len(view), view.nbytes(), view.table.shape) == (0, 0, (3, 16))


def test_a_copy_of_a_call_that_failed_is_waited_for():
    """A kernel writes the next rows, which are few, to the same places. A late copy would overwrite
    them.
    """
    store, waited = append(host_store(), tokens(300)), []
    copies = store._offload
    store._offload = SimpleNamespace(
        copy=lambda pieces, rows: copies.copy(pieces, rows) or "of the call that failed",
        wait=waited.append,
    )
    before, rows = store.checkpoint(), store.join(*tokens(300, 1))
    store.reserve(rows)
    store.write(rows)
    store.rollback(before)
    store._launched = True
    few = store.join(*tokens(3, 2))
    store.reserve(few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store, "write_rows", lambda *given: None)
        store.write(few)
    assert waited == ["of the call that failed"]


def test_a_view_of_freed_memory_raises():
    store = append(host_store(), tokens(5, batch=1))
    view = store.expand_batch(2)
    store.reset()
    with pytest.raises(RuntimeError, match="its memory has been freed"):
        view.gather(torch.zeros((2, 2, 1), dtype=torch.int64))


def test_an_index_cannot_tell_it_from_the_store_of_the_core():
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 3}
    mine, other = (kvindex.create("exact", **sizes) for _ in range(2))
    mine._store = host_store(budget=(budget := Budget()))
    queries = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    for index in (mine, other):
        index.append(*tokens(500)), index.append(*tokens(300, 1))
        index.truncate(600), index.reorder(torch.tensor([1, 0])), index.append(*tokens(9, 2))
    hits, wanted = (index.search(queries, k=20) for index in (mine, other))
    assert torch.equal(hits.ids, wanted.ids)
    assert torch.equal(mine.fetch(hits).values, other.fetch(wanted).values)
    assert mine.nbytes()["rows"] == 2 * 2 * 609 * ROW
    budget.limit_bytes = settled(mine._store).pinned_bytes
    before = mine.nbytes()
    with pytest.raises(MemoryError, match="the limit is"):
        mine.append(*tokens(2000, 3))
    assert mine.nbytes() == before
    assert torch.equal(mine.search(queries, k=20).ids, wanted.ids)
    mine.reset()
    assert (len(mine), budget.used_bytes) == (0, 0)


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_spans_are_parts_of_a_block_or_whole_blocks(start, count):
    parts = list(spans(start, start + count))
    covered = [token for first, last in parts for token in range(first, last)]
    assert covered == list(range(start, start + count))
    for first, last in parts:
        whole = first % 256 == 0 and last % 256 == 0
        assert whole or first // 256 == (last - 1) // 256


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4))
def test_runs_are_as_long_as_they_can_be_within_a_slab(numbers, slab_blocks):
    found = list(runs(numbers, slab_blocks))
    assert [at for at, _ in found] == [sum(n for _, n in found[:i]) for i in range(len(found))]
    assert sum(length for _, length in found) == len(numbers)
    for at, length in found:
        run = numbers[at : at + length]
        assert run == list(range(run[0], run[0] + length))
        assert run[0] // slab_blocks == run[-1] // slab_blocks
        if at:
            follows = numbers[at] == numbers[at - 1] + 1
            assert not follows or numbers[at] % slab_blocks == 0


def test_rows_that_are_only_written_are_not_waited_for(monkeypatch):
    """A pending append does not delay a search."""
    store, waited = host_store(), []
    copies = iter(["first", "second", "third"])
    monkeypatch.setattr(store._offload, "copy", lambda pieces, source: next(copies))
    monkeypatch.setattr(store._offload, "wait", waited.append)
    store.wait()
    append(store, tokens(100))
    store.wait()
    rows = store.join(*tokens(100))
    store.reserve(rows)
    store.write(rows)
    store.wait()
    store.append(rows)
    store.wait()
    assert waited == [None, "first", "first", "second"]


def test_room_that_was_made_is_pinned_once_and_no_append_until_then_pins_any():
    allocator = FakeAllocator()
    store, reference = host_store(allocator), TensorStore(GEOMETRY)
    store.reserve_tokens(2000)
    assert allocator.calls == 0  # the batch size is not known
    first = tokens(300)
    append(store, first), append(reference, first)
    store.reserve_tokens(2000)
    pinned, table = settled(store).pinned_bytes, store.table.clone()
    for seed in range(1, 7):
        piece = tokens(283, seed)
        append(store, piece), append(reference, piece)
        assert settled(store).pinned_bytes == pinned or len(store) > 2000 - 3 * 256
    assert len(store) == 1998
    assert torch.equal(store.table, table)
    assert_same(store, reference)
    store.reserve_tokens(1000)  # no more than there are
    assert torch.equal(store.table, table)


def test_nothing_is_pinned_ahead_as_long_as_tokens_were_promised():
    """The driver blocks kernel launches while it pins memory, so none is pinned between tokens."""
    allocator = FakeAllocator()
    store = append(host_store(allocator), tokens(300))
    store.reserve_tokens(1500)
    settled(store)
    calls = allocator.calls
    for seed in range(1, 4):
        append(store, tokens(256, seed))
        settled(store)
        assert allocator.calls == calls
    for seed in range(4, 7):
        append(store, tokens(256, seed))
    settled(store)
    assert allocator.calls > calls


def test_room_beyond_the_limit_is_refused_and_changes_nothing():
    budget = Budget()
    store = append(host_store(budget=budget), tokens(300))
    pinned, table = settled(store).pinned_bytes, store.table.clone()
    budget.limit_bytes = pinned
    with pytest.raises(MemoryError, match="the limit is"):
        store.reserve_tokens(4000)
    with pytest.raises(ValueError, match="max_tokens: got 5000 tokens, allowed are up to 4096"):
        store.reserve_tokens(5000)
    assert settled(store).pinned_bytes == pinned
    assert torch.equal(store.table, table)
    one = append(host_store(), tokens(5, batch=1))
    with pytest.raises(
        RuntimeError, match="got a view that expand_batch returned, which is read-only"
    ):
        one.expand_batch(2).reserve_tokens(10)


def test_a_state_goes_through_the_device_in_pieces(monkeypatch):
    monkeypatch.setattr("kvindex_cuda.memory.block_store.AT_ONCE", 256)
    store, other = append(host_store(), tokens(900)), append(host_store(), tokens(100, 1))
    asked = []
    gathered = store._gathered
    monkeypatch.setattr(store, "_gathered", lambda ids: asked.append(ids.shape[2]) or gathered(ids))
    other.append_encoded(store.encoded())
    assert asked == [256, 256, 256, 132]
    assert_same(other, append(TensorStore(GEOMETRY), tokens(100, 1), tokens(900)))
