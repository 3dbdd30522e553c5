"""The store of plain torch: rows by id, appended, truncated and reordered, and their bytes."""

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.layer import AttentionLayer
from kvindex.storage import centers
from kvindex.storage.codecs import NAMES, codec
from kvindex.storage.store import TensorStore
from tests.support.helpers import Case, all_rows, hits_of, left_padding

GEOMETRY = Geometry.of(q_heads=2, kv_heads=2, head_dim=8, value_dim=3)


def tokens(count, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 2, count, 8, generator=generator)
    return keys, torch.randn(batch, 2, count, 3, generator=generator)


def filled(place, *pieces):
    store = TensorStore(GEOMETRY, place)
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
    assert store.nbytes() == 2 * 2 * 75 * store.row_bytes
    assert store.row_bytes == 48  # 11 numbers of 4 bytes, in whole words of 16


def test_a_row_is_one_contiguous_read(place):
    rows = filled(place, tokens(5))._columns["rows"].view(torch.uint8)
    assert rows.shape[-1] == 48
    assert rows.stride()[-2:] == (48, 1)


def test_unused_slots_are_zero_and_an_empty_store_gives_only_those(place):
    ids = torch.tensor([[[1, -1], [-1, 0]]] * 2)
    rows = filled(place, tokens(3)).gather(ids)
    assert not rows.keys[:, 0, 1].any()
    assert not rows.values[:, 1, 0].any()
    empty = TensorStore(GEOMETRY, place).gather(torch.full((2, 2, 4), -1))
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
    store = store.emptied()
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
        patch.setattr(torch, "empty", failing)
        with pytest.raises(torch.OutOfMemoryError):
            store.reserve(store.join(*tokens(50, 1)))
    assert_holds(store, keys, values)


def test_unknown_places_and_codecs_are_refused():
    with pytest.raises(ValueError, match="store: got 'disk', allowed is one of"):
        TensorStore(GEOMETRY, "disk")
    with pytest.raises(ValueError, match="row_codec: got 'int3', allowed is one of"):
        TensorStore(GEOMETRY, row_codec="int3")


# Rows of an index


CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=24, batch=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["exact", "pariskv:preset=paper", "clusterkv", "quest"])
@pytest.mark.parametrize("rows", NAMES)
def test_an_index_fetches_what_its_codec_makes_of_the_rows(name, rows, place):
    index, (keys, values) = CASE.index(f"{name}:row_codec={rows}", store=place), CASE.tokens(70)
    valid = left_padding([0, 3], 40)
    index.append(keys[:, :, :40], values[:, :, :40], valid=valid)
    index.append(keys[:, :, 40:], values[:, :, 40:])
    of_rows = codec(rows, index.geometry)
    center = centers.of_rows(centers.center_of(keys[:, :, :40], valid)) if rows != "plain" else None
    want = of_rows.decode(of_rows.encode(keys, values, center), center)
    got = all_rows(index, 2)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)
    assert (got.keys.dtype, got.values.dtype) == (torch.bfloat16, torch.bfloat16)
    sizes = {"plain": 80, "int8": 48, "fp8": 48, "int4": 32, "int2": 32}
    assert index.row_bytes == of_rows.row_bytes == sizes[rows]
    assert index.nbytes()["rows"] == 2 * 2 * 70 * index.row_bytes
    hits = index.search(CASE.queries(), k=9)
    assert (hits.ids >= 0).all()
    index.truncate(41)
    index.reorder(torch.tensor([1]))
    got = index.fetch(hits_of(torch.tensor([[[40, -1]] * 2])))
    assert torch.equal(got.keys[:, :, 0], want.keys[1:, :, 40])
    assert not got.keys[:, :, 1].any()


def test_an_unknown_codec_makes_no_index():
    with pytest.raises(ValueError, match=r"row_codec: got 'int3', allowed is one of .*fp8"):
        CASE.index("exact:row_codec=int3")


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_what_a_layer_fetches_is_counted_as_it_is_stored(rows):
    case = Case(head_dim=64, value_dim=64, dtype=torch.bfloat16)
    read = []
    for name in (rows, "plain"):
        layer = AttentionLayer(
            case.index(f"exact:row_codec={name}+reuse:tau=2"),
            k=5,
            sink=2,
            local_window=4,
            update_every=4,
            dense_below=8,
        )
        queries = case.tensor(9, 1, 2, 30, 64)
        layer.step(queries, *case.tokens(30))
        layer.step(queries[:, :, :1], *case.tokens(1, seed=1))
        read.append(float(layer.traffic.bytes_fetched))
    assert read == [2 * 5 * 144, 2 * 5 * 256]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_sequence_seen_as_several_are_decoded_once(name):
    store = TensorStore(GEOMETRY, "device", name)
    store.append(store.join(*tokens(9, batch=1)))
    seen = list(store.expand_batch(3).blocks(4))
    assert [start for start, _ in seen] == [0, 4, 8]
    for (_, several), (_, one) in zip(seen, store.blocks(4), strict=True):
        for part, own in ((several.keys, one.keys), (several.values, one.values)):
            assert torch.equal(part, own.expand(3, -1, -1, -1))
            assert part.stride(0) == 0
