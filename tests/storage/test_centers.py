"""Rows are coded relative to a center, so a common offset of keys costs no accuracy."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvindex
from kvindex.core import check
from kvindex.layer import dense
from kvindex.layer.attention_layer import AttentionLayer
from kvindex.storage import centers, store
from kvindex.storage.codecs import NAMES
from kvindex.storage.store import CenteredRows, TensorStore
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from tests.support.helpers import Case, hits_of, left_padding, sampled

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=2)
CODED = NAMES[1:]
LARGER = 50
"""Norm of the offset, relative to the differences of keys."""


def tokens(count, offset, seed=0, case=CASE):
    """Return keys around an offset of each head, of norm `offset √D`, and values."""
    keys, values = case.tokens(count, seed)
    direction = case.tensor(99, case.batch, case.kv_heads, 1, case.head_dim)
    direction = direction / direction.norm(dim=-1, keepdim=True) * case.head_dim**0.5
    return keys + offset * direction, values


def piece(both, start, stop):
    return tuple(part[:, :, start:stop] for part in both)


def held(both, order):
    return tuple(part[order] for part in both)


# Histories that end with an index of 300 tokens


def appended(index, both, tmp_path):
    index.append(*piece(both, 0, 200))
    index.append(*piece(both, 200, 300))
    return index, both


def cut(index, both, tmp_path):
    other = tokens(100, -LARGER, seed=7)
    index.append(*piece(both, 0, 250))
    index.append(*other)
    index.truncate(40)
    index.append(*piece(both, 40, 300))
    return index, both


def emptied(index, both, tmp_path):
    index.append(*tokens(100, -LARGER, seed=7))
    index.truncate(0)
    return appended(index, both, tmp_path)


def forgotten(index, both, tmp_path):
    index.append(*tokens(100, -LARGER, seed=7))
    index.reset()
    return appended(index, both, tmp_path)


def forked(index, both, tmp_path):
    index.append(*piece(both, 0, 280))
    duplicate = deepcopy(index)
    index.truncate(0)
    index.append(*tokens(300, -LARGER, seed=7))
    duplicate.append(*piece(both, 280, 300))
    return duplicate, both


def reordered(index, both, tmp_path):
    index.append(*piece(both, 0, 200))
    order = torch.tensor([1, 0, 1])
    index.reorder(order)
    both = held(both, order)
    index.append(*piece(both, 200, 300))
    return index, both


def failed(index, both, tmp_path):
    """Make appends that raise after the store has the rows: the first one, and a later one."""
    append = type(index._valid).append

    def broken(*given, **how):
        raise MemoryError("no memory left")

    for start, others in ((0, tokens(60, -LARGER, seed=7)), (200, tokens(60, -LARGER, seed=8))):
        type(index._valid).append = broken
        try:
            with pytest.raises(MemoryError):
                index.append(*others)
        finally:
            type(index._valid).append = append
        assert len(index) == start
        index.append(*piece(both, start, start + 200))
    index.truncate(300)
    return index, both


def loaded(index, both, tmp_path):
    index.append(*piece(both, 0, 200))
    index.save(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved")
    other.append(*piece(both, 200, 300))
    return other, both


LIVES = [appended, cut, emptied, forgotten, forked, reordered, failed, loaded]


def store_of(name, place):
    geometry = CASE.index("exact").geometry
    if place == "blocks":
        return BlockStore(geometry, DeviceAllocator(geometry.device), row_codec=name)
    return TensorStore(geometry, place, name)


def off(spec, name, place, life, offset, tmp_path):
    """Return the error of attention over the retrieved rows, compared with uncoded rows."""
    index = CASE.index(spec, backend="torch", store=store_of(name, place), row_codec=name)
    both = tokens(400, offset)
    index, both = life(index, both, tmp_path / f"{offset}")
    both = piece(both, 0, 300)
    queries = CASE.queries(batch=len(both[0])) / 2
    hits = index.search(queries, k=100 if spec != "exact" else 300)
    assert (hits.ids >= 0).all()
    at = hits.ids[..., None].expand(*hits.ids.shape, 64)
    true = [part.gather(2, at) for part in both]
    got = index.fetch(hits)

    def attended(keys, values):
        asked = queries.double().unflatten(1, (2, 2))
        shares = (asked @ keys.double().mT * index.geometry.scale).softmax(-1)
        return shares @ values.double()

    want = attended(*true)
    return float((attended(got.keys, got.values) - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("life", "name", "spec", "place"),
    sampled(LIVES, CODED, ["exact", "pariskv:preset=fast"], ["device", "host", "blocks"]),
)
def test_an_offset_costs_nothing(life, name, spec, place, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / f"{LARGER}").mkdir()
    without, beside = (off(spec, name, place, life, o, tmp_path) for o in (0, LARGER))
    assert beside < 1.3 * without


@pytest.mark.parametrize("name", CODED)
def test_the_comparison_can_fail(name, tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    (tmp_path / f"{LARGER}").mkdir()
    monkeypatch.setattr(store, "center_of", lambda keys, valid: centers.center_of(0 * keys))
    without, beside = (off("exact", name, "device", appended, o, tmp_path) for o in (0, LARGER))
    assert beside > 3 * without


@given(
    st.sampled_from(CODED),
    st.sampled_from(["device", "blocks"]),
    st.lists(st.integers(1, 200), max_size=3),
    st.integers(16, 300),
)
def test_rows_do_not_depend_on_how_they_came(name, place, cuts, first):
    """This holds if the first append has enough tokens for the center."""
    both, whole, parts = tokens(300, LARGER), store_of(name, "device"), store_of(name, place)
    whole.append(whole.join(*both))
    bounds = sorted({0, first, *(first + cut for cut in cuts if first + cut < 300), 300})
    # in the memory layout of a model: tokens before heads
    both = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in both)
    for start, stop in pairwise(bounds):
        parts.append(parts.join(*piece(both, start, stop)))
    assert torch.equal(parts.encoded(), whole.encoded())
    assert torch.equal(parts.center, whole.center)


@pytest.mark.parametrize(("name", "place"), sampled(NAMES, ["device", "host", "blocks"]))
def test_what_is_no_row_is_zeros(name, place):
    one = store_of(name, place)
    assert not one.gather(torch.full((2, 2, 3), -1)).keys.any()
    one.append(one.join(*tokens(20, LARGER)))
    ids = torch.tensor([[[3, -1, 19]] * 2] * 2)
    rows, all_of_them = one.gather(ids), next(one.blocks(20))[1]
    assert not rows.keys[:, :, 1].any()
    assert not rows.values[:, :, 1].any()
    assert torch.equal(rows.keys[:, :, ::2], all_of_them.keys[:, :, [3, 19]])


def test_the_center_of_few_keys_is_their_mean_and_always_finite():
    keys, _ = tokens(40, LARGER)
    torch.testing.assert_close(centers.center_of(keys), keys[:, :, :16].mean(2))
    assert torch.equal(centers.center_of(keys[:, :, :1]), keys[:, :, 0])
    keys[1, :, 0] = torch.tensor([torch.nan, torch.inf, -3e38, 3e38]).repeat(16)
    center = centers.center_of(keys)  # as on a device, where keys are checked later
    assert (center.abs() <= check.LARGEST).all()
    assert not center[1].any()


def test_the_center_is_that_of_valid_keys():
    keys, _ = tokens(40, LARGER)
    valid = left_padding([0, 30], 40)
    valid[0, 3:7] = False
    center = centers.center_of(keys, valid)
    seen = keys[0, :, [0, 1, 2, *range(7, 20)]]
    torch.testing.assert_close(center, torch.stack([seen.mean(1), keys[1, :, 30:].mean(1)]))
    assert torch.equal(centers.center_of(keys, valid | True), centers.center_of(keys))
    one = centers.center_of(keys, left_padding([0, 40], 40))
    assert torch.equal(one, centers.center_of(keys)[[0, 0]])
    assert torch.equal(centers.center_of(keys, valid & False), centers.center_of(keys))


@pytest.mark.parametrize("junk", [0.0, 1e13, torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "place"), sampled(CODED, ["device", "host", "blocks"]))
def test_padding_is_no_part_of_the_center(name, place, junk):
    """Rows are as accurate as without padding, whatever the padding contains (zeros in a layer)."""
    keys, values = tokens(40, LARGER)
    keys[1, :, :20] = junk
    ids = torch.arange(20, 40).expand(2, 2, -1)
    padded, alone = (CASE.index("exact", store=store_of(name, place)) for _ in range(2))
    padded.append(keys, values, valid=left_padding([0, 20], 40))
    alone.append(keys[:, :, 20:], values[:, :, 20:])
    got, want = padded.fetch(hits_of(ids)), alone.fetch(hits_of(ids - 20))
    assert torch.equal(got.keys[1], want.keys[1])
    first = CASE.index("exact", store=store_of(name, place))
    first.append(keys[:, :, :20], values[:, :, :20], valid=left_padding([0, 20], 20))
    first.append(keys[:, :, 20:], values[:, :, 20:])
    assert first.fetch(hits_of(ids)).keys.isfinite().all()


def test_what_a_layer_searches_is_read_from_a_center_of_its_own():
    """The center includes neither the sink, whose keys are unlike others, nor zeros of padding."""

    def output(name, pads):
        made = dict(k=1000, sink=16, local_window=8, update_every=8, dense_below=0)
        layer = AttentionLayer(CASE.index("exact", row_codec=name), **made)
        keys, values = tokens(300, LARGER)
        valid = left_padding(pads, 300)
        sink = valid & (valid.cumsum(1) <= 16)
        keys = torch.where(sink[:, None, :, None], -keys, keys)
        queries = CASE.tensor(3, 2, 4, 300, 64) / 2
        layer.step(queries, keys, values, valid=valid)
        keys, values = tokens(1, LARGER, seed=5)
        return layer.step(queries[:, :, :1], keys, values)

    for pads in ([0, 0], [0, 24], [0, 200]):
        for name, bound in (("int8", 0.02), ("fp8", 0.06), ("int4", 0.15)):
            got, want = output(name, pads), output("plain", pads)
            for b in range(2):
                assert (got[b] - want[b]).norm() < bound * want[b].norm(), (pads, name, b)


def test_a_center_comes_with_the_first_coded_rows_alone():
    both = tokens(20, LARGER)
    for place in ("device", "blocks"):
        mine, plain = store_of("fp8", place), store_of("plain", place)
        assert isinstance(mine, CenteredRows)
        assert plain.center is None
        mine.append(mine.join(*both))
        with pytest.raises(ValueError, match="center: got a center for a store that has 20"):
            mine.append_encoded(mine.encoded(), mine.center)
        plain.append(plain.join(*both))
        with pytest.raises(
            ValueError, match=r"center: got a center .* allowed is None; a center needs an"
        ):
            store_of("plain", place).append_encoded(plain.encoded(), mine.center)
        other = store_of("fp8", place)
        other.append_encoded(mine.encoded(), mine.center)
        other.append_encoded(mine.encoded())
        keys = mine.gather(torch.arange(20).expand(2, 2, -1)).keys
        twice = other.gather(torch.arange(40).expand(2, 2, -1)).keys
        assert torch.equal(twice, torch.cat([keys, keys], 2))


def test_a_state_of_codes_from_zeros_is_loaded_as_that(monkeypatch):
    """States from versions without centers keep their rows."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "center_of", lambda keys, valid: None)
        old = CASE.index("exact:row_codec=int8")
        old.append(*tokens(30, 1))
        state = old.state_dict()
    assert "row_center" not in state
    new = CASE.index("exact:row_codec=int8")
    new.load_state_dict(state)
    assert torch.equal(new.state_dict()["rows"], state["rows"])
    hits = hits_of(torch.arange(30).expand(2, 2, -1))
    assert torch.equal(new.fetch(hits).keys, old.fetch(hits).keys)
    new.append(*tokens(1, 1, seed=3))
    torch.testing.assert_close(
        new.fetch(hits_of(torch.full((2, 2, 1), 30))).keys,
        tokens(1, 1, seed=3)[0],
        atol=0.03,
        rtol=0,
    )


@pytest.mark.parametrize("place", ["device", "host", "blocks"])
def test_a_view_of_one_sequence_as_several_reads_from_its_center(place):
    one = store_of("int8", place)
    one.append(one.join(*(part[:1] for part in tokens(30, LARGER))))
    view, ids = one.expand_batch(3), torch.tensor([[[29, 4]] * 2])
    got, want = view.gather(ids.expand(3, -1, -1)).keys, one.gather(ids).keys
    assert torch.equal(got, want.expand(3, -1, -1, -1))


@pytest.mark.parametrize("at_once", [2**30, 0])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_layer_that_attends_densely_reads_its_sink_as_it_came(padding, at_once, monkeypatch):
    monkeypatch.setattr(dense, "GATHERED_BYTES", at_once)
    monkeypatch.setattr(dense, "BLOCK", 8)
    (keys, values), queries = CASE.tokens(60), CASE.tensor(7, 2, 4, 60, 64)
    valid = torch.arange(60) >= torch.tensor([[0], [padding]])
    sizes = dict(sink=4, local_window=8, update_every=8, dense_below=2**20)
    layer = AttentionLayer(CASE.index("exact:row_codec=int2"), k=4, **sizes)
    for some in (slice(40), slice(40, 60)):
        layer.settle()
        held, real = len(layer.index), valid[:, some] if padding else None
        got = layer.step(*(part[:, :, some] for part in (queries, keys, values)), valid=real)
    assert held > 8
    rows = layer.index.fetch(hits_of(torch.arange(held).expand(2, 2, -1)))
    whole = [part.clone() for part in (keys, values)]
    for part, own in zip(whole, (rows.keys, rows.values), strict=True):
        for b, first in enumerate((0, padding)):
            assert not torch.allclose(own[b, :, first : first + 4], part[b, :, first : first + 4])
            own[b, :, first : first + 4] = part[b, :, first : first + 4]
        part[:, :, :held] = own
    seen = (torch.arange(60) <= torch.arange(40, 60)[:, None]) & valid[:, None, None]
    wide = (part.repeat_interleave(2, dim=1) for part in whole)
    given = queries[:, :, 40:], *wide
    want = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=seen)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
