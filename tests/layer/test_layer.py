"""The layer with `exact` and k ≥ length computes dense attention, after any calls."""

import pytest
import torch

import kvindex
from kvindex.core.protocol import ObservesQueries
from kvindex.indexes.exact import Exact
from kvindex.layer import AttentionLayer, dense
from kvindex.ops.attention import cap
from kvindex.wrappers import Wrapper
from tests.support.helpers import Case, Operations, sampled
from tests.support.sequences import (
    Sequence,
    assert_dense_without_valid_rows,
    layer_of,
    steps_of,
)

CASES = {
    "plain": (Case(), None),
    "groups of 3": (Case(q_heads=6, value_dim=8), None),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "padded": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
    "padded softcap": (Case(softcap=2.0, batch=3), [5, 0, 12]),
    "bfloat16": (Case(q_heads=8, dtype=torch.bfloat16, batch=2), [3, 0]),
    "float16": (Case(dtype=torch.float16), None),
}
PLANS = {
    "prefill and decode": steps_of(20, *[1] * 20),
    "chunked prefill": steps_of(7, 9, 2, 3, *[1] * 10),
    "second turn": steps_of(17, *[1] * 8, 11, *[1] * 8),
    "token by token": steps_of(*[1] * 40),
}


@pytest.fixture(params=["gathered", "blockwise"])
def path(request, monkeypatch):
    if request.param == "blockwise":
        monkeypatch.setattr(dense, "GATHERED_BYTES", -1)
    monkeypatch.setattr(dense, "BLOCK", 6)


def assert_dense(layer, sequence, steps):
    want = sequence.dense()
    for start, stop in steps:
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
        assert len(layer) == stop


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("plan", "case"), sampled(PLANS, CASES))
def test_every_step_is_dense_attention(case, plan):
    case, pads = CASES[case]
    assert_dense(layer_of(case), Sequence.of(case, 44, pads), PLANS[plan])


@pytest.mark.parametrize(
    "sizes", [dict(sink=0), dict(local_window=0), dict(update_every=1)], ids=str
)
@pytest.mark.parametrize("case", ["plain", "padded"])
def test_regions_of_size_0(sizes, case):
    case, pads = CASES[case]
    layer = layer_of(case, **sizes)
    sequence = Sequence.of(case, 44, pads)
    assert_dense(layer, sequence, PLANS["second turn"])
    layer.reorder(torch.arange(case.batch).flip(0))
    layer.truncate(2)
    assert len(layer) == 2


@pytest.mark.parametrize("name", kvindex.names())
def test_steps_are_dense_while_the_index_has_no_valid_row(name):
    assert_dense_without_valid_rows(Case(q_heads=4, batch=2), name)


@pytest.mark.parametrize("broken", ["k", "keys", "scale", "start"])
def test_the_comparison_with_dense_attention_can_fail(broken):
    case = Case()
    sequence = Sequence.of(case, 44)
    layer = layer_of(case, k=3 if broken == "k" else 1000)
    wrong = Sequence.of(case, 44)
    if broken == "keys":
        wrong.keys = wrong.keys.roll(1, 2)
    if broken == "scale":
        wrong.queries = wrong.queries * 1.01
    outputs = [wrong.feed(layer, start, stop) for start, stop in steps_of(20, *[1] * 20)]
    with pytest.raises(AssertionError):
        sequence.assert_equals(torch.cat(outputs, dim=2), sequence.dense(), broken == "start")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("case", "length"), sampled(["plain", "padded"], [39, 37, 33, 30, 25, 14, 2, 1])
)
def test_truncated_inside_local_past_local_and_inside_the_sink(length, case):
    case, pads = CASES[case]
    first, other = Sequence.of(case, 60, pads), Sequence.of(case, 60, pads, seed=1)
    layer = layer_of(case)
    assert_dense(layer, first, steps_of(20, *[1] * 20))
    layer.truncate(length)
    assert len(layer) == length
    steps = [(length, length + 1), (length + 1, length + 4)]
    steps += [(stop, stop + 1) for stop in range(length + 4, length + 20)]
    assert_dense(layer, first.then(length, other), steps)


def test_truncate_past_the_end_and_below_0():
    case = Case()
    sequence, layer = Sequence.of(case, 44), layer_of(case)
    assert_dense(layer, sequence, steps_of(20, 1))
    layer.truncate(100)
    with pytest.raises(ValueError, match="length: got -1, allowed is an integer of at least 0"):
        layer.truncate(-1)
    assert len(layer) == 21
    assert_dense(layer, sequence, [(21, 22), (22, 30)])


def test_truncate_to_0_keeps_the_batch_and_reorder_changes_it():
    two, one = Sequence.of(Case(batch=2), 40), Sequence.of(Case(batch=1), 40, seed=1)
    layer = layer_of(Case())
    assert_dense(layer, two, steps_of(20, 1))
    layer.truncate(0)
    with pytest.raises(ValueError, match="keys: got shape"):
        one.feed(layer, 0, 3)
    assert len(layer) == 0
    assert_dense(layer, two, steps_of(20, 1))
    layer.truncate(0)
    layer.reorder(torch.tensor([1]))
    assert_dense(layer, one, steps_of(20, *[1] * 10))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", [[2, 1, 0], [1], [0, 0, 2, 2]])
def test_reordered_rows_go_on_as_those_they_were(order):
    case, pads = CASES["padded"]
    sequence, layer = Sequence.of(case, 60, pads), layer_of(case)
    assert_dense(layer, sequence, steps_of(20, 1, 1))
    layer.reorder(torch.tensor(order))
    assert_dense(layer, sequence.rows(order), [(i, i + 1) for i in range(22, 40)])
    layer.reorder(torch.tensor([0]))
    assert_dense(layer, sequence.rows(order[:1]), [(40, 47), (47, 48)])


def test_reorder_before_anything_moved_to_the_index():
    case = Case(batch=2)
    sequence, layer = Sequence.of(case, 30), layer_of(case)
    layer.reorder(torch.tensor([0]))
    assert_dense(layer, sequence, steps_of(3))
    layer.reorder(torch.tensor([1, 0]))
    assert_dense(layer, sequence.rows([1, 0]), [(3, 20), (20, 21)])


def test_reset_starts_anew_with_another_batch():
    case, pads = CASES["padded"]
    layer = layer_of(case)
    assert_dense(layer, Sequence.of(case, 44, pads), PLANS["second turn"])
    layer.reset()
    assert len(layer) == 0
    assert layer.traffic.steps == 0
    again = Sequence.of(Case(q_heads=6, value_dim=24, batch=2), 44, seed=1)
    assert_dense(layer, again, PLANS["prefill and decode"])


@pytest.mark.parametrize(("name", "case"), sampled(["exact", "pariskv"], ["padded", "plain"]))
def test_a_batch_equals_its_rows_one_by_one(case, name):
    case, pads = CASES[case]
    sequence = Sequence.of(case, 60, pads)
    together = layer_of(case, name, k=6)
    alone = [layer_of(case, name, k=6) for _ in range(case.batch)]
    for start, stop in steps_of(20, *[1] * 40):
        got = sequence.feed(together, start, stop)
        for b, layer in enumerate(alone):
            want = sequence.rows([b]).feed(layer, start, stop)
            real = sequence.valid[b, start:stop]
            torch.testing.assert_close(
                got[b][:, real], want[0][:, real], rtol=ROUNDING, atol=ROUNDING
            )


ROUNDING = 1e-4
"""Tolerance: sequences alone and in a batch differ in the last bits of float32 products."""


def test_a_layer_must_start_empty():
    index = Case().index("exact")
    index.append(*Case().tokens(3))
    with pytest.raises(ValueError, match="index: got an index with 3 tokens, allowed is"):
        AttentionLayer(index)
    with pytest.raises(TypeError, match=r"index: got 'exact', .*kvindex.create\('exact', q_heads="):
        AttentionLayer("exact")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("k", 0),
        ("sink", -1),
        ("local_window", -1),
        ("update_every", 0),
        ("dense_below", -1),
        ("k", 1.5),
        ("coverage", 0),
        ("coverage", 1.1),
    ],
)
def test_sizes_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}: got {value}, allowed is"):
        AttentionLayer(Case().index("exact"), **{option: value})


def test_only_an_index_that_observes_is_told_positions(monkeypatch):
    """Positions cost a new tensor in each step."""
    index = Case().index("exact")
    layer, tokens = AttentionLayer(index), Case().tokens(3)
    queries = Case().tensor(1, 1, 2, 3, 16)
    assert index.capability(ObservesQueries) is None
    assert Wrapper(index).capability(ObservesQueries) is None
    with Operations() as operations:
        layer.step(queries, *tokens)
    assert "aten.arange.start" not in operations.names
    told = []
    monkeypatch.setattr(
        Exact, "observe_queries", lambda self, queries, positions: told.append(positions)
    )
    assert index.capability(ObservesQueries) is index
    assert isinstance(Wrapper(index).capability(ObservesQueries), Wrapper)
    layer.step(queries, *tokens)
    assert [positions.tolist() for positions in told] == [[3, 4, 5]]
    assert Case().index("h2o").capability(ObservesQueries) is not None


@pytest.mark.parametrize("pads", [None, [3, 0]])
@pytest.mark.parametrize("group", ["mean_share", "union"])
def test_a_bias_of_the_logits_is_added_for_the_rows_that_are_read(pads, group):
    case = Case(q_heads=4, kv_heads=2, batch=2)
    sequence, layer = Sequence.of(case, 40, pads), layer_of(case, group=group)
    bias = 3 * case.tensor(5, 2, 4, 40, 40)
    g, valid = layer.index.geometry, sequence.valid[:, None, None]
    keys, values = (
        part.double().repeat_interleave(2, dim=1) for part in (sequence.keys, sequence.values)
    )
    logits = g.scale * sequence.queries.double() @ keys.mT + bias
    seen = torch.ones(40, 40, dtype=torch.bool).tril() & valid
    want = logits.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0) @ values
    for start, stop in [(0, 15), *((i, i + 1) for i in range(15, 30)), (30, 37), (37, 38)]:
        part = sequence.parts(start, stop)
        padding = sequence.valid[:, start:stop] if start == 0 and pads else None
        some = bias[:, :, start:stop, :stop]
        sequence.assert_equals(layer.step(*part, valid=padding, bias=some), want, start)
    with pytest.raises(ValueError, match=r"bias: got shape \[2, 4, 1, 40\], allowed is"):
        layer.step(*sequence.parts(38, 39), bias=bias[:, :, 38:39])
    assert len(layer) == 38


def test_dense_attention_tells_its_log_sum_exp():
    case = CASES["padded softcap"][0]
    sequence, layer = Sequence.of(case, 40, [5, 0, 12]), layer_of(case)
    sequence.feed(layer, 0, 33)
    assert 0 < len(layer.index) < 33
    g, queries = layer.index.geometry, sequence.queries[:, :, 28:33]
    given = layer.index, layer._window.rows, queries, layer.valid
    output, lse = dense.attend_by_block(*given)
    assert torch.equal(output, dense.attend_densely(*given))
    keys = sequence.keys[:, :, :33].double().repeat_interleave(g.group_size, dim=1)
    logits = cap(queries.double() @ keys.mT, g.scale, g.softcap)
    seen = torch.ones(33, 33, dtype=torch.bool).tril()[28:] & sequence.valid[:, None, None, :33]
    want = logits.masked_fill(~seen, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("index", "case"), sampled(["exact", "pariskv"], ["padded", "plain"]))
def test_tokens_without_queries_go_on_as_those_of_a_step(case, index):
    case, pads = CASES[case]
    sequence = Sequence.of(case, 44, pads)
    given, read = (layer_of(case, index, k=6) for _ in range(2))
    valid = sequence.valid[:, :30] if pads else None
    given.append(*sequence.parts(0, 21)[1:], valid=None if valid is None else valid[:, :21])
    given.append(*sequence.parts(21, 30)[1:], valid=None if valid is None else valid[:, 21:])
    sequence.feed(read, 0, 21)
    sequence.feed(read, 21, 30)
    for start, stop in steps_of(*[1] * 14):
        start, stop = start + 30, stop + 30
        one, other = sequence.feed(given, start, stop), sequence.feed(read, start, stop)
        assert torch.equal(one, other)
    assert given.traffic == read.traffic


def test_tokens_without_queries_are_checked_and_change_nothing():
    case, sequence = Case(), Sequence.of(Case(), 20)
    layer, (_, keys, values) = layer_of(case), sequence.parts(0, 20)
    for wrong, words in [
        ((keys[:, :, :, 1:], values), "keys: got shape"),
        ((keys, values[:, :, 1:]), "values: got shape"),
        ((keys.double(), values), "keys: got dtype"),
        ((keys / 0, values), "keys: got"),
    ]:
        with pytest.raises(ValueError, match=words):
            layer.append(*wrong)
    with pytest.raises(ValueError, match="valid: got shape"):
        layer.append(keys, values, valid=torch.ones(keys.shape[0], 19, dtype=torch.bool))
    layer.append(keys[:, :, :0], values[:, :, :0])
    assert len(layer) == 0
    words = "queries: got None for the index SnapKV, which learns from the queries"
    with pytest.raises(ValueError, match=words):
        layer_of(case, "snapkv").append(keys, values)
    for name in ("queries", "outputs"):
        with pytest.raises(ValueError, match=f"{name}: got shape"):
            layer.append(keys, values, **{name: keys[:, :, :, 1:]})
