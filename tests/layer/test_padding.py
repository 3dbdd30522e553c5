"""Padding may be anywhere: no query attends to it, and searches never return it."""

import pytest
import torch

from kvindex.layer import dense
from kvindex.testing.compare import all_rows
from tests.support.helpers import Case, sampled
from tests.support.sequences import Sequence, layer_of, steps_of

COUNT = 60
CASES = {
    "plain": Case(q_heads=4, batch=3),
    "softcap bfloat16": Case(6, 2, 16, 24, torch.bfloat16, softcap=2.0, batch=3),
}
PLANS = {
    "prefill and decode": steps_of(20, 9, *[1] * 20),
    "chunks": steps_of(7, 13, 2, 7, *[1] * 12),
    "two turns": steps_of(20, *[1] * 7, 11, *[1] * 12),
    "token by token": steps_of(*[1] * 50),
}


def holes(*places):
    """Return flags bool `[B, COUNT]`, False in holes, given a list of (first, end) per sequence."""
    padded = torch.zeros(len(places), COUNT, dtype=torch.bool)
    for row, some in zip(padded, places, strict=True):
        for start, stop in some:
            row[start:stop] = True
    return padded


HOLES = {
    "questions": holes([(20, 24)], [], [(20, 28)]),
    "answers": holes([(24, 29)], [(28, 29)], []),
    "both, and single tokens": holes([(0, 3), (20, 23), (33, 34)], [(26, 29), (40, 42)], [(5, 6)]),
    "a whole turn": holes([(20, 38)], [(38, 50)], []),
    "every second token": holes([(i, i + 1) for i in range(1, 50, 2)], [], [(0, 45)]),
}


def assert_dense(sequence, layer, steps):
    """Run the steps, and compare their outputs with dense attention to the real tokens."""
    want = sequence.dense()
    for start, stop in steps:
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
        assert len(layer) == stop


@pytest.fixture(params=["gathered", "blockwise"])
def path(request, monkeypatch):
    if request.param == "blockwise":
        monkeypatch.setattr(dense, "GATHERED_BYTES", -1)
    monkeypatch.setattr(dense, "BLOCK", 6)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("plan", "padding", "case"), sampled(PLANS, HOLES, CASES))
def test_every_step_is_dense_attention_to_the_real_tokens(case, padding, plan):
    case = CASES[case]
    sequence = Sequence.of(case, COUNT, holes=HOLES[padding])
    assert_dense(sequence, layer_of(case), PLANS[plan])


@pytest.mark.usefixtures("path")
def test_a_padded_query_sees_the_real_tokens_before_it():
    """Plain transformers does the same, and its linear layers read the output of padded queries."""
    case = CASES["plain"]
    sequence = Sequence.of(case, COUNT, holes=HOLES["both, and single tokens"])
    layer, want = layer_of(case), sequence.dense()
    for start, stop in PLANS["two turns"]:
        got = sequence.feed(layer, start, stop)
        some = sequence.valid.cumsum(1)[:, None, start:stop, None] > 0
        torch.testing.assert_close(
            got.double() * some, want[:, :, start:stop] * some, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("padding", "sizes"),
    sampled(HOLES, [dict(sink=0), dict(local_window=0), dict(update_every=1)]),
)
def test_regions_of_size_0(sizes, padding):
    case = CASES["plain"]
    sequence = Sequence.of(case, COUNT, holes=HOLES[padding])
    assert_dense(sequence, layer_of(case, **sizes), PLANS["two turns"])


@pytest.mark.parametrize("padding", HOLES)
def test_truncated_and_reordered_it_goes_on(padding):
    case = CASES["plain"]
    first = Sequence.of(case, COUNT, holes=HOLES[padding])
    other = first.then(22, Sequence.of(case, COUNT, seed=1, holes=HOLES[padding]))
    layer = layer_of(case)
    assert_dense(first, layer, steps_of(20, 9, 1, 1))
    layer.truncate(22)
    assert_dense(other, layer, [(22, 29), (29, 30)])
    layer.reorder(torch.tensor([2, 0, 0]))
    assert_dense(other.rows([2, 0, 0]), layer, [(30, 31), (31, 38), (38, 39), (39, 40)])


@pytest.mark.parametrize(
    ("padding", "name"), sampled(HOLES, ["pariskv", "exact", "quest", "h2o", "streaming"])
)
def test_searches_return_none_of_it_and_sinks_hold_none(name, padding):
    case = CASES["plain"]
    sequence, found = Sequence.of(case, COUNT, holes=HOLES[padding]), []
    layer = layer_of(case, name, k=6)
    search = layer.index.search
    layer.index.search = lambda *given, **more: found.append(search(*given, **more)) or found[-1]
    for start, stop in PLANS["two turns"]:
        sequence.feed(layer, start, stop)
        sink = layer._window.sink
        for b in range(3):
            ids = [] if sink is None else [i for i in sink.ids[b].tolist() if i >= 0]
            assert sequence.valid[b, ids].all()
    queries = sequence.queries[:, :, 50]
    hits = search(queries, k=COUNT)
    for some in [*found, hits]:
        for b, ids in enumerate(some.ids.flatten(1).tolist()):
            assert sequence.valid[b][[i for i in ids if i >= 0]].all()
    assert (hits.ids >= 0).any()
    assert not all_rows(layer.index, 3).keys.isnan().any()


@pytest.mark.parametrize("padding", HOLES)
def test_reads_are_counted_without_padding(padding):
    """`exact` finds every real row, so a step reads as many rows as full attention."""
    case = CASES["plain"]
    sequence, layer = Sequence.of(case, COUNT, holes=HOLES[padding]), layer_of(case)
    real = 0.0
    for start, stop in PLANS["two turns"]:
        before = layer.traffic.steps
        sequence.feed(layer, start, stop)
        if layer.traffic.steps > before:
            real += float(sequence.valid[:, :stop].sum(1).float().mean())
    assert layer.traffic.rows_full == pytest.approx(real)
    assert layer.traffic.rows_read == pytest.approx(real)


@pytest.mark.parametrize("plan", PLANS)
def test_queries_of_padding_are_shown_as_zeros(plan):
    """An index that observes queries gets zeros for padding in every kind of step."""
    case = CASES["plain"]
    sequence = Sequence.of(case, COUNT, holes=HOLES["both, and single tokens"])
    layer, shown = layer_of(case, "h2o", k=6), []
    observe = layer.index.observe_queries
    layer.index.observe_queries = lambda queries, positions: (
        shown.append(queries) or observe(queries, positions)
    )
    for start, stop in PLANS[plan]:
        sequence.feed(layer, start, stop)
    got, count = torch.cat(shown, 2), PLANS[plan][-1][1]
    real = sequence.valid[:, None, :count, None]
    assert torch.equal(got, sequence.queries[:, :, :count] * real)
