"""Rows that the caller chooses: a step attends to exactly these, in any region of the layer."""

import pytest
import torch

from kvindex.layer import AttentionLayer, chosen
from tests.core import test_resident
from tests.support.helpers import Case
from tests.support.sequences import SIZES, Sequence, layer_of, steps_of

N, K = 44, 6
CASES = {
    "plain": (Case(batch=2), None),
    "padded groups": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "bfloat16": (Case(q_heads=8, dtype=torch.bfloat16, batch=2), [3, 0]),
}
STEPS = steps_of(17, *[1] * 9, 3, *[1] * 9, 6)


def choose(case, count=N, most=K):
    """Choose up to `most` rows per token and KV head: ids `[B, G, N, K]`, and flags of the rows."""
    scores = case.tensor(9, case.batch, case.kv_heads, count, count).float()
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    best = scores.masked_fill(future, float("-inf")).topk(most)
    ids = best.indices.masked_fill(best.values == float("-inf"), -1)
    shown = torch.zeros(*ids.shape[:3], count + 1, dtype=torch.bool)
    shown.scatter_(-1, ids.masked_fill(ids < 0, count), True)
    return ids, shown[..., :count]


def feed(layer, sequence, ids, steps=STEPS, **options):
    outputs = []
    for start, stop in steps:
        valid = sequence.valid[:, start:stop] if any(sequence.pads) else None
        parts = dict(valid=valid, ids=ids[:, :, start:stop], **options)
        outputs.append(layer.step(*sequence.parts(start, stop), **parts))
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [1, 2**28])
def test_each_token_attends_to_its_rows(case, piece, monkeypatch):
    monkeypatch.setattr(chosen, "FETCHED_BYTES", piece)
    case, pads = CASES[case]
    sequence, (ids, shown) = Sequence.of(case, N, pads), choose(case)
    layer = layer_of(case)
    sequence.assert_equals(feed(layer, sequence, ids), sequence.dense(shown), 0)
    with pytest.raises(AssertionError):  # other rows give other outputs
        sequence.assert_equals(
            feed(layer_of(case), sequence, ids.flip(0, 1)), sequence.dense(shown), 0
        )


@pytest.mark.parametrize("case", CASES)
def test_an_index_that_attends_reads_its_rows_where_they_are(case, monkeypatch):
    case, pads = CASES[case]
    sequence, (ids, shown) = Sequence.of(case, N, pads), choose(case)
    layer = test_resident.layer_of(case)
    monkeypatch.setattr(layer.index, "search", None)
    sequence.assert_equals(feed(layer, sequence, ids), sequence.dense(shown), 0)


def test_rows_in_every_region_and_an_index_that_attends_by_itself():
    case, all_of = Case(batch=2), torch.arange(N)
    sequence, want = Sequence.of(case, N), Sequence.of(case, N).dense()
    ids = torch.where(all_of <= all_of[:, None], all_of, -1).expand(2, case.kv_heads, N, N)
    for name in ("exact", "pariskv"):
        layer = layer_of(case, name, k=2)
        sequence.assert_equals(feed(layer, sequence, ids), want, 0)


def test_learned_sinks_and_what_traffic_counts():
    case = Case(q_heads=4)
    sequence, (ids, shown), sinks = (
        Sequence.of(case, N),
        choose(case),
        torch.tensor([0.0, 3, -2, 1]),
    )
    layer = AttentionLayer(case.index("exact"), k=3, search_up_to=3, **SIZES)
    got = feed(layer, sequence, ids, sink_logits=sinks)
    sequence.assert_equals(got, sequence.dense(shown, sinks=sinks[:, None]), 0)
    steps = [t for start, stop in STEPS[1:-1] for t in range(start, stop)]
    assert layer.traffic.steps == len(steps)
    rows = (ids[:, :, steps] >= 0).sum(-1).float().mean((0, 1)).sum()
    assert float(layer.traffic.rows_read) == pytest.approx(float(rows))
    assert float(layer.traffic.rows_full) == sum(t + 1 for t in steps)
    assert (
        0
        < int(layer.traffic.bytes_fetched)
        < float(rows) * layer._retrieval.row_bytes * case.kv_heads
    )


def test_searches_and_chosen_rows_take_turns():
    case = Case(batch=2)
    sequence, (ids, shown) = Sequence.of(case, N), choose(case)
    layer, full = layer_of(case), sequence.dense()
    for start, stop in STEPS:
        if start % 2:
            got, want = sequence.feed(layer, start, stop), full
        else:
            got, want = feed(layer, sequence, ids, [(start, stop)]), sequence.dense(shown)
        sequence.assert_equals(got, want, start)


def test_no_rows_at_all_give_0():
    case = Case()
    sequence, layer = Sequence.of(case, N), layer_of(case)
    ids = torch.full((1, case.kv_heads, N, 2), -1)
    assert not feed(layer, sequence, ids, steps_of(20, 1)).any()


BAD = {
    "of query heads": (lambda ids: ids.repeat(1, 2, 1, 1), r"ids: got shape \[2, 4, 1, 6\]"),
    "without tokens": (lambda ids: ids[:, :, 0], r"ids: got shape \[2, 2, 6\], allowed is"),
    "int32": (lambda ids: ids.int(), "ids: got dtype torch.int32"),
    "of the future": (lambda ids: ids.clamp_min(22), "ids: got 22, allowed is 0 to the position"),
    "of no rows": (lambda ids: ids[..., :0], r"ids.shape\[3\] \(rows\): got 0"),
    "below -1": (lambda ids: ids * 0 - 2, "ids: got -2, allowed is 0 to the position"),
    "elsewhere": (lambda ids: ids.to("meta"), "ids: got device meta"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_are_no_ids_is_refused_and_changes_nothing(bad):
    case, (change, match) = Case(q_heads=4, batch=2), BAD[bad]
    sequence, (ids, shown) = Sequence.of(case, N), choose(case)
    layer = layer_of(case)
    feed(layer, sequence, ids, steps_of(20, 1))
    with pytest.raises(ValueError, match=match):
        layer.step(*sequence.parts(21, 22), ids=change(ids[:, :, 21:22]))
    with pytest.raises(
        ValueError, match="bias: got a tensor, allowed is None, because ids is given"
    ):
        layer.step(*sequence.parts(21, 22), ids=ids[:, :, 21:22], bias=torch.zeros(2, 4, 1, 22))
    assert len(layer) == 21
    sequence.assert_equals(feed(layer, sequence, ids, [(21, 22)]), sequence.dense(shown), 21)
