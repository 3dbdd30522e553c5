"""Sink and window in a buffer that does not move, and a layer whose index reads it there."""

import pytest
import torch

from kvindex.core.protocol import Attended
from kvindex.core.resident import ResidentRows, Shown
from kvindex.indexes.exact import Exact
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend
from tests.support.helpers import Case, left_padding
from tests.support.sequences import SIZES, Sequence, steps_of


class Attending(Exact):
    """Attends like an index with kernels, and reads no more of `resident` than it contains."""

    def attend(self, queries, resident, *, k):
        return self.attend_hits(queries, self.search(queries, k=k), resident)

    def attend_hits(self, queries, hits, resident):
        g, held = self.geometry, int(resident.count)
        found = self.fetch(hits)
        rows = resident.rows[:, :, :held].tensor_split([g.head_dim], dim=-1)
        mask = resident.mask[:, None, :held].expand(-1, g.kv_heads, -1)
        seen = torch.cat([hits.ids >= 0, mask > 0], dim=2).repeat_interleave(g.group_size, dim=1)
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        keys, values = (
            torch.cat(pair, dim=2) for pair in zip((found.keys, found.values), rows, strict=True)
        )
        options = dict(scale=g.scale, softcap=g.softcap, bias=bias, return_lse=True)
        parts = attend(queries, keys, values, **options)
        return Attended(*parts, (hits.ids >= 0).sum(-1).int())


def layer_of(case, **sizes):
    index = Attending(**{name: getattr(case, name) for name in GEOMETRY})
    return AttentionLayer(index, k=1000, **{**SIZES, **sizes})


GEOMETRY = ("q_heads", "kv_heads", "head_dim", "value_dim", "dtype", "softcap", "device")
CASES = {
    "plain": (Case(q_heads=4, value_dim=8), None),
    "padded": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
    "bfloat16": (Case(dtype=torch.bfloat16, batch=2), [3, 0]),
}


def addresses(resident):
    return [part.data_ptr() for part in (resident.rows, resident.mask, resident.count)]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_fills_the_buffer_with_what_attention_needs(name):
    case, pads = CASES[name]
    sequence, layer = Sequence.of(case, 60, pads), layer_of(case)
    want, where = sequence.dense(), None
    for start, stop in steps_of(20, *[1] * 12, 5, *[1] * 12):
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
        if layer._window._resident is not None:
            where = where or addresses(layer._window._resident)
            assert addresses(layer._window._resident) == where
    assert where
    layer.truncate(41)
    for start in range(41, 50):
        sequence.assert_equals(sequence.feed(layer, start, start + 1), want, start)
    assert addresses(layer._window._resident) == where
    order = torch.arange(case.batch).flip(0)
    layer.reorder(order)
    turned = sequence.rows(order.tolist())
    for start in range(50, 60):
        turned.assert_equals(turned.feed(layer, start, start + 1), turned.dense(), start)
    assert addresses(layer._window._resident) == where


@pytest.mark.parametrize("pads", [None, [0, 7, 16]])
def test_its_traffic_is_that_of_search_and_fetch(pads):
    case = Case(q_heads=6, batch=3)
    sequence = Sequence.of(case, 50, pads)
    layers = [layer_of(case), AttentionLayer(case.index("exact"), k=1000, **SIZES)]
    for layer in layers:
        for start, stop in steps_of(25, *[1] * 20):
            sequence.feed(layer, start, stop)
    mine, theirs = (layer.traffic for layer in layers)
    assert mine.steps == theirs.steps == 20
    for name in ("rows_read", "rows_full", "bytes_fetched"):
        assert float(getattr(mine, name)) == pytest.approx(float(getattr(theirs, name)))
    assert (
        layers[0].nbytes()["window"]
        == layers[1].nbytes()["window"] + layers[0]._window._resident.nbytes()
    )


def test_a_batch_of_another_size_gets_another_buffer():
    case, pads = CASES["padded"]
    sequence, layer = Sequence.of(case, 50, pads), layer_of(case)
    for start, stop in steps_of(25, *[1] * 5):
        sequence.feed(layer, start, stop)
    layer.reorder(torch.tensor([2]))
    alone = sequence.rows([2])
    alone.assert_equals(alone.feed(layer, 30, 31), alone.dense(), 30)
    assert layer._window._resident.batch == 1
    layer.reset()
    assert layer._window._resident is None


def test_a_step_that_fails_leaves_the_buffer_right(monkeypatch):
    case, _ = CASES["plain"]
    sequence, layer = Sequence.of(case, 50), layer_of(case)
    for start, stop in steps_of(25, *[1] * 5):
        sequence.feed(layer, start, stop)
    with monkeypatch.context() as context:
        context.setattr(layer._updates, "update_if_due", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sequence.feed(layer, 30, 31)
    sequence.assert_equals(sequence.feed(layer, 30, 32), sequence.dense(), 30)
    sequence.assert_equals(sequence.feed(layer, 32, 33), sequence.dense(), 32)


def test_the_buffer_counts_what_is_shown():
    case = Case(batch=2)
    resident = ResidentRows(case.index("exact").geometry, 2, 12)
    resident.add(*case.tokens(4), left_padding([0, 3], 4))
    resident.add(*case.tokens(2, seed=1), None)
    assert (len(resident), int(resident.count), float(resident.masked)) == (6, 6, 1.5)
    assert resident.mask[:, :6].sum().item() == 9
    assert torch.equal(resident.rows[:, :, 4:6, 16:], case.tokens(2, seed=1)[1])
    shown = torch.tensor([[True, True, False], [False, True, False]])
    resident.hide(resident.claim(3), Shown(shown, 1.5))
    assert (len(resident), float(resident.masked)) == (9, 3)
    assert resident.mask[:, :9].sum().item() == 12
    resident.clear()
    assert (len(resident), int(resident.count), resident.masked) == (0, 0, 0)
    assert resident.mask.all()


def test_nbytes_counts_rows_mask_and_count():
    resident = ResidentRows(CASES["padded"][0].index("exact").geometry, 3, 7)
    parts = (resident.rows, resident.mask, resident.count)
    assert resident.nbytes() == sum(part.nbytes for part in parts)
