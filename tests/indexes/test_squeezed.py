"""Squeezed Attention equals weights in Python's numbers; how much its threshold leaves out."""

import math

import pytest
import torch

from tests.support import literal
from tests.support.helpers import Case, assert_same_hits, left_padding, part
from tests.support.sequences import Sequence, layer_of, steps_of

SMALL = dict(per_cluster=4, block=8)


def observed(case, count, start=0, seed=0):
    """Return queries `[B, H, count, D]` and their positions."""
    queries = case.tensor(500 + seed, case.batch, case.q_heads, count, case.head_dim)
    return queries, torch.arange(start, start + count)


def prompt_ended(case, tokens, queries, valid=None, **options):
    index = case.index("squeezed", **{**SMALL, **options})
    index.observe_queries(*queries)
    index.append(*tokens, valid=valid)
    index.end_prompt()
    return index


def share_of_each(index, keys, b, h, query):
    """Return {id: estimated attention weight of each row of its unit}."""
    learned, scale, units, start = index._learned, index.geometry.scale, [], 0
    for size in learned["sizes"][b, h].tolist():
        ids = learned["members"][b, h, start : start + size].tolist()
        start += size
        if size:
            mean = keys[b, h, ids].double().mean(0).tolist()
            units.append((math.exp(scale * literal.dot(mean, query)), ids))
    waiting = [i for i in learned["waiting"][b].tolist() if i >= 0]
    units += [(math.exp(scale * literal.dot(keys[b, h, i].tolist(), query)), [i]) for i in waiting]
    total = sum(weight * len(ids) for weight, ids in units)
    return {i: weight / total for weight, ids in units for i in ids}


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union"])
@pytest.mark.parametrize("threshold", [0.005, 0.02, 0.08])
def test_rows_pass_if_their_share_is_above_the_threshold_for_some_head(threshold, group):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, batch=2)
    (keys, values), queries = case.tokens(60), case.queries()
    index = case.index("squeezed", **SMALL, group=group)
    valid = left_padding([0, 9], 60)
    index.append(keys[:, :, :30], values[:, :, :30], valid=valid[:, :30])
    index.append(keys[:, :, 30:], values[:, :, 30:])
    index._learned = {**index._learned, "threshold": torch.full((2,), math.log(threshold))}
    ids = index.search(queries, k=60).ids
    for b in range(2):
        for h in range(2):
            heads = queries[b, 3 * h : 3 * h + 3].tolist()
            shares = [share_of_each(index, keys, b, h, query) for query in heads]
            for share in shares:
                assert sum(share.values()) == pytest.approx(1)
            want = {i for share in shares for i, s in share.items() if s > threshold}
            assert set(ids[b, h].tolist()) - {-1} == want


def test_where_clusters_are_single_keys_shares_are_those_of_attention():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    (keys, values), queries = case.tokens(60), case.queries()
    index = case.index("squeezed", per_cluster=1, block=8)
    index.append(keys, values)
    index._learned = {**index._learned, "threshold": torch.full((2,), math.log(0.02))}
    attention = torch.softmax(0.25 * (queries[:, :, None] @ keys.mT)[:, :, 0], -1)
    hits = index.search(queries, k=60)
    assert torch.equal((hits.ids >= 0).sum(-1), (attention > 0.02).sum(-1))
    exact = case.index("exact")
    exact.append(keys, values)
    for b in range(2):
        for h in range(2):
            count = int((attention[b, h] > 0.02).sum())
            best = exact.search(queries, k=count).ids
            assert hits.ids[b, h, :count].tolist() == best[b, h].tolist()


def rows_that_pass(index, queries):
    """Return the total number of rows that the queries `[B, H, T, D]` retrieve, int64 `[B]`."""
    counts = [
        (index.search(queries[:, :, t], k=len(index)).ids >= 0).sum((1, 2))
        for t in range(queries.shape[2])
    ]
    return torch.stack(counts).sum(0)


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_the_threshold_leaves_out_the_share_of_keys_that_was_asked_for(sparsity):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    queries = observed(case, 150)
    index = prompt_ended(case, case.tokens(200), queries, sparsity=sparsity)
    last = queries[0][:, :, -100:]  # calibration: 100
    wanted = (1 - sparsity) * 100 * 2 * 200
    assert (rows_that_pass(index, last) <= wanted).all()
    threshold = index._learned["threshold"]
    index._learned = {**index._learned, "threshold": threshold - 1 / 64}  # one bin further
    assert (rows_that_pass(index, last) > wanted).all()


def test_padded_queries_and_keys_calibrate_nothing():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, batch=2)
    (keys, values), (queries, positions) = case.tokens(90), observed(case, 90)
    queries[1, :, :33] *= 20
    whole = prompt_ended(case, (keys, values), (queries, positions), left_padding([0, 33], 90))
    for b, pad in enumerate([0, 33]):
        one = slice(b, b + 1)
        tokens = keys[one, :, pad:], values[one, :, pad:]
        alone = prompt_ended(case, tokens, (queries[one, :, pad:], positions[: 90 - pad]))
        torch.testing.assert_close(
            whole._learned["threshold"][one], alone._learned["threshold"], atol=1 / 64, rtol=0
        )


def test_queries_may_come_in_pieces_and_rows_may_move():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, batch=2)
    tokens, (queries, positions) = case.tokens(200), observed(case, 150)
    whole = prompt_ended(case, tokens, (queries, positions))
    order = torch.tensor([1, 0, 1])
    for early in (False, True):
        index = case.index("squeezed", **SMALL)
        for start, stop in ((0, 70), (70, 71), (71, 150)):
            index.observe_queries(queries[:, :, start:stop], positions[start:stop])
        if early:
            index.reorder(order)
            index.append(tokens[0][order], tokens[1][order])
        else:
            index.append(*tokens)
            index.reorder(order)
        index.end_prompt()
        assert torch.equal(index._learned["threshold"], whole._learned["threshold"][order])
        index.observe_queries(queries[order][:, :, :1], positions[:1])  # no effect after the prompt
        assert torch.equal(index._learned["threshold"], whole._learned["threshold"][order])


def test_without_queries_or_sparsity_there_is_no_threshold():
    case = Case()
    index = case.index("squeezed", **SMALL)
    index.append(*case.tokens(60))
    index.end_prompt()
    assert "threshold" not in index._learned
    index = prompt_ended(case, case.tokens(60), observed(case, 60), sparsity=0)
    assert "threshold" not in index._learned
    assert (index.search(case.queries(), k=60).ids >= 0).all()


def test_later_tokens_are_clustered_unless_stale():
    case = Case()
    tokens, queries = case.tokens(60), case.queries()
    fresh, stale = (case.index("squeezed", **SMALL, stale=stale) for stale in (False, True))
    for index in (fresh, stale):
        index.append(*part(tokens, 0, 30))
        index.append(*part(tokens, 30, 60))
        assert (index.search(queries, k=60).ids >= 0).all()
    assert fresh._learned["waiting"].shape[1] == 6
    assert stale._learned["waiting"].tolist() == [list(range(30, 60))]
    assert torch.equal(stale._learned["members"], fresh._learned["members"][:, :, :30])
    for index in (fresh, stale):
        index.truncate(37)
    assert_same_hits(stale.search(queries, k=20), fresh.search(queries, k=20), close=1e-5)


def test_a_layer_calibrates_and_answers():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    sequence = Sequence.of(case, 70, pads=[0, 5])
    layer = layer_of(case, "squeezed", 80, **SMALL)
    for start, stop in steps_of(60, *[1] * 10):
        output = sequence.feed(layer, start, stop)
        assert output.isfinite().all()
    assert layer.index._learned["threshold"].shape == (2,)


def test_a_batch_that_nobody_observed_is_refused():
    case = Case(batch=2)
    index = case.index("squeezed", **SMALL)
    index.observe_queries(*observed(case, 20))
    with pytest.raises(ValueError, match="keys: got shape"):
        index.append(*case.tokens(20, batch=3))
    with pytest.raises(ValueError, match="queries: got shape"):
        index.observe_queries(*observed(Case(batch=1), 20))
    with pytest.raises(ValueError, match="positions: got shape"):
        index.observe_queries(observed(case, 20)[0], torch.arange(5))
    assert len(index) == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(per_cluster=0), "per_cluster: got 0, allowed"),
        (dict(block=0), "block: got 0, allowed"),
        (dict(calibration=0), "calibration: got 0, allowed"),
        (dict(sparsity=1.0), r"sparsity: got 1.0, allowed is a number in \[0, 1\)"),
        (dict(stale=1), "stale: got 1, allowed is True or False"),
        (dict(iterations=-1), "iterations: got -1, allowed"),
        (dict(seed=2**63), "seed: got 9223372036854775808, allowed"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        Case().index("squeezed", **options)
