import pytest
import torch

from kvindex.geometry import Geometry
from kvindex.store import Store

GEOMETRY = Geometry.of(q_heads=2, kv_heads=2, head_dim=8, value_dim=3)


def tokens(count, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 2, count, 8, generator=generator)
    return keys, torch.randn(batch, 2, count, 3, generator=generator)


def filled(place, *pieces):
    store = Store(GEOMETRY, place)
    for piece in pieces:
        store.append(store.join(*piece))
    return store


@pytest.fixture(params=["device", "host"])
def place(request):
    return request.param


def assert_holds(store, keys, values):
    assert len(store) == keys.shape[2]
    ids = torch.arange(len(store)).expand(keys.shape[0], 2, -1)
    rows = store.gather(ids)
    assert torch.equal(rows.keys, keys)
    assert torch.equal(rows.values, values)


def test_growth_keeps_the_rows(place):
    first, second = tokens(5), tokens(70, 1)
    store = filled(place, first, second)
    assert_holds(store, *(torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)))
    assert store.nbytes() == 2 * 2 * 75 * 11 * 4


def test_a_row_is_one_contiguous_read(place):
    rows = filled(place, tokens(5))._columns["rows"]
    assert rows.shape[-1] == 11
    assert rows.stride()[-2:] == (11, 1)


def test_unused_slots_are_zero_and_an_empty_store_gives_only_those(place):
    ids = torch.tensor([[[1, -1], [-1, 0]]] * 2)
    rows = filled(place, tokens(3)).gather(ids)
    assert not rows.keys[:, 0, 1].any()
    assert not rows.values[:, 1, 0].any()
    empty = Store(GEOMETRY, place).gather(torch.full((2, 2, 4), -1))
    assert (empty.keys.shape, empty.values.shape) == ((2, 2, 4, 8), (2, 2, 4, 3))
    assert not empty.keys.any()


def test_blocks_are_all_rows_in_order(place):
    keys, values = tokens(10)
    blocks = list(filled(place, (keys, values)).blocks(4))
    assert [start for start, _ in blocks] == [0, 4, 8]
    assert torch.equal(torch.cat([rows.keys for _, rows in blocks], dim=2), keys)
    assert torch.equal(torch.cat([rows.values for _, rows in blocks], dim=2), values)


def test_truncate_and_reorder(place):
    keys, values = tokens(10)
    store = filled(place, (keys, values))
    store.truncate(4)
    store = store.reordered(torch.tensor([1, 1, 0]))
    assert_holds(store, keys[[1, 1, 0], :, :4], values[[1, 1, 0], :, :4])
    store.reset()
    assert (len(store), store.nbytes()) == (0, 0)


def test_rows_are_copies_of_what_was_appended(place):
    keys, values = tokens(4)
    store = filled(place, (keys, values))
    want = keys.clone()
    keys.zero_()
    assert_holds(store, want, values)


def test_running_out_of_memory_in_reserve_leaves_the_rows(place, monkeypatch):
    keys, values = tokens(4)
    store = filled(place, (keys, values))

    def failing(*args, **options):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing)
        with pytest.raises(torch.OutOfMemoryError):
            store.reserve(store.join(*tokens(50, 1)))
    assert_holds(store, keys, values)


def test_unknown_place_is_refused():
    with pytest.raises(ValueError, match="store: got 'disk', allowed is one of"):
        Store(GEOMETRY, "disk")
