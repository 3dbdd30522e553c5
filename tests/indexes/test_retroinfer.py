"""RetroInfer: weighted rows are exact if the keys of a cluster agree, and no cluster is cut."""

import math

import pytest
import torch

from tests.contract import CHECKS
from tests.support import literal
from tests.support.helpers import Case, join, left_padding, mostly_slow, part
from tests.support.sequences import Sequence, layer_of, steps_of

SMALL = dict(per_cluster=4, segment=16, block=8)

CASES = [
    Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2),
    Case(q_heads=3, kv_heads=1, head_dim=64, value_dim=24, dtype=torch.bfloat16, batch=3),
]
ASK_FOR_TOKENS = {"check_slots_are_exactly_k", "check_ties_go_to_the_lower_id"}
"""Checks that expect tokens in the best slots. Here a cluster that does not fit is one row."""

OTHERS = [check for check in CHECKS if check.__name__ not in ASK_FOR_TOKENS]


@pytest.mark.parametrize("case", mostly_slow(CASES, CASES[0]), ids=str)
@pytest.mark.parametrize(
    "check", mostly_slow(OTHERS, *OTHERS[::2]), ids=lambda check: check.__name__
)
def test_small_clusters_keep_the_contract(check, case):
    """With default options, so few tokens would all wait, and there would be no cluster."""
    check(lambda **options: case.index("retroinfer", **SMALL, **options), case)


def sums(index, queries, hits):
    """Return numerator `[B, H, Dv]` and denominator `[B, H]` of attention over the hits,
    float64."""
    rows, g = index.fetch(hits), index.geometry
    keys, values = (x.double().repeat_interleave(g.group_size, 1) for x in (rows.keys, rows.values))
    logits = g.scale * (queries.double()[:, :, None] @ keys.mT)[:, :, 0]
    weights = (logits + hits.log_weight.double()).exp()  # -inf where a slot is unused
    return (weights[:, :, None] @ values)[:, :, 0], weights.sum(-1)


def sums_over(index, queries, tokens, kept):
    """Return the same over tokens, bool `kept` `[B, G, N]`."""
    g = index.geometry
    keys, values = (x.double().repeat_interleave(g.group_size, 1) for x in tokens)
    logits = g.scale * (queries.double()[:, :, None] @ keys.mT)[:, :, 0]
    weights = logits.exp() * kept.repeat_interleave(g.group_size, 1)
    return (weights[:, :, None] @ values)[:, :, 0], weights.sum(-1)


def covered(index, hits):
    """Return the tokens that the hits represent, bool `[B, G, N]`. No token may occur twice."""
    learned, (B, G, _) = index._learned, hits.ids.shape
    kept = torch.zeros(B, G, len(index), dtype=torch.bool)
    for b in range(B):
        for h in range(G):
            ends = learned["sizes"][b, h].cumsum(0).tolist()
            for i in hits.ids[b, h].tolist():
                start = ends[-3 - i] if i < -2 else 0
                ids = [i] if i >= 0 else learned["members"][b, h, start : ends[-2 - i]].tolist()
                for token in ids if i != -1 else []:
                    assert not kept[b, h, token], "a token is counted twice"
                    kept[b, h, token] = True
    return kept


def assert_exact_partial_sum(index, queries, tokens, k):
    hits = index.search(queries, k=k)
    assert (hits.ids < -1).any(), "some rows are weighted"
    got, want = sums(index, queries, hits), sums_over(index, queries, tokens, covered(index, hits))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 9, 30])
def test_where_clusters_are_single_keys_weighted_rows_give_the_exact_partial_sum(k):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    tokens = case.tokens(40)
    index = case.index("retroinfer", per_cluster=1, segment=16, block=8, estimated=0.999)
    index.append(*part(tokens, 0, 24))
    index.append(*part(tokens, 24, 40))
    assert (index._learned["sizes"] == 1).all()
    queries = case.queries()
    if k > 1:
        assert_exact_partial_sum(index, queries, tokens, k)
    exact = case.index("exact")
    exact.append(*tokens)
    best = index.search(queries, k=k)
    torch.testing.assert_close(best.scores, exact.search(queries, k=k).scores)


@pytest.mark.parametrize("k", [9, 20])
def test_where_the_keys_of_a_cluster_are_alike_weighted_rows_give_the_exact_partial_sum(k):
    """The row has the logarithm of the size and the mean of the values."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    keys, values = case.tokens(48)
    keys = keys[:, :, :12].repeat_interleave(4, dim=2)
    index = case.index("retroinfer", **SMALL)
    index.append(keys, values)
    assert index._learned["sizes"].amax() >= 4
    assert_exact_partial_sum(index, case.queries(), (keys, values), k)


def test_the_partial_sum_can_be_wrong():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    tokens = case.tokens(48)
    index = case.index("retroinfer", **SMALL)
    index.append(*tokens)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_exact_partial_sum(index, case.queries(), tokens, 12)


@pytest.mark.parametrize("k", [5, 12, 30])
def test_a_weighted_row_never_promises_more_than_its_keys_hold(k):
    """Jensen: `n exp(q·c) ≤ Σ exp(q·k)`, as `c` is the mean of the keys."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    for seed in range(5):
        tokens, queries = case.tokens(60, seed), case.queries(seed)
        index = case.index("retroinfer", **SMALL)
        index.append(*tokens)
        hits = index.search(queries, k=k)
        got, most = (
            sums(index, queries, hits),
            sums_over(index, queries, tokens, covered(index, hits)),
        )
        assert (got[1] <= most[1] * (1 + 1e-5)).all()


def in_words(index, keys, b, h, query, k):
    """Return [id], best first: clusters and waiting tokens, whole ones until their fraction is
    reached."""
    learned, units, start = index._learned, [], 0
    for s, size in enumerate(learned["sizes"][b, h].tolist()):
        ids = learned["members"][b, h, start : start + size].tolist()
        start += size
        if size:
            mean = keys[b, h, ids].double().mean(0).tolist()
            units.append((literal.dot(mean, query), -2 - s, ids))
    waiting = [i for i in learned["waiting"][b].tolist() if i >= 0]
    units += [(literal.dot(keys[b, h, i].tolist(), query), i, [i]) for i in waiting]
    units.sort(key=lambda unit: -unit[0])
    rows, budget, whole = [], k - int(index.config.estimated * k), True
    for place, (_, one, ids) in enumerate(units):
        others = len(units) - place - 1
        begun = len(rows) < budget and len(rows + ids) <= k
        whole = whole and (begun or len(rows + ids) + others <= k)
        rows += ids if whole else [one]
    return rows[:k]


@pytest.mark.parametrize("k", [1, 2, 9, 20, 45, 59, 70])
@pytest.mark.parametrize("estimated", [0.0, 0.446, 0.9])
def test_whole_clusters_are_exact_and_the_next_ones_are_one_row_each(k, estimated):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    (keys, values), queries = case.tokens(60), case.queries()
    index = case.index("retroinfer", **SMALL, estimated=estimated)
    valid = left_padding([0, 9], 60)
    index.append(keys[:, :, :30], values[:, :, :30], valid=valid[:, :30])
    index.append(keys[:, :, 30:], values[:, :, 30:])
    hits = index.search(queries, k=k)
    kept = covered(index, hits)
    for b in range(2):
        for h in range(2):
            want = in_words(index, keys, b, h, queries[b, h].tolist(), k)
            assert hits.ids[b, h].tolist() == want + [-1] * (k - len(want))
            sizes = index._learned["sizes"][b, h].tolist()
            for i, weight in zip(hits.ids[b, h].tolist(), hits.log_weight[b, h], strict=True):
                size = sizes[-2 - i] if i < -1 else int(i >= 0)
                assert float(weight) == pytest.approx(math.log(size) if size else -math.inf)
            if k >= 60:
                assert torch.equal(kept[b, h], valid[b])
                assert (hits.ids[b, h] >= -1).all()


@pytest.mark.parametrize(("k", "named"), [(12, False), (9, True)])
def test_a_large_best_cluster_is_read_whole_where_it_fits_into_all_slots(k, named):
    """Ten equal keys with the attention: one cluster, with more rows than its part of 12."""
    case = Case(q_heads=1, kv_heads=1, head_dim=16, value_dim=8)
    keys, values = case.tokens(60)
    keys[:, :, 20:30] = keys[:, :, 20:21] * 4
    index = case.index("retroinfer", per_cluster=4, segment=64, block=8)
    index.append(keys, values)
    found = index.search(keys[:, :, 20], k=k).ids[0, 0].tolist()
    assert (found[0] < -1) is named
    assert set(range(20, 30)) <= {*found} or named


def test_a_layer_gives_full_attention_from_all_rows_and_from_fewer_where_keys_are_alike():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    sequence = Sequence.of(case, 70, pads=[0, 5])
    alike = Sequence.of(case, 70)
    alike.keys = alike.keys[:, :, :18].repeat_interleave(4, dim=2)[:, :, :70]
    for given, k, sink in ((sequence, 80, 3), (alike, 40, 0)):
        layer = layer_of(case, "retroinfer", k, sink=sink, **SMALL)
        for start, stop in steps_of(60, *[1] * 10):
            output = given.feed(layer, start, stop)
        given.assert_equals(output, given.dense(), 69)
        assert len(layer.index) > 50


def test_fetch_gives_a_clusters_mean_key_and_mean_value():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8)
    tokens = join(case.tokens(30), case.tokens(8, seed=1))
    for store in ("device", "host"):
        index = case.index("retroinfer", **SMALL, store=store)
        index.append(*part(tokens, 0, 30))
        index.append(*part(tokens, 30, 38))
        hits = index.search(case.queries(), k=12)
        rows = index.fetch(hits)
        for h in range(2):
            ends = index._learned["sizes"][0, h].cumsum(0).tolist()
            named = [(slot, i) for slot, i in enumerate(hits.ids[0, h].tolist()) if i < -1]
            assert named
            for slot, i in named:
                ids = index._learned["members"][0, h, : ends[-2 - i]]
                ids = ids[ends[-3 - i] if i < -2 else 0 :].long()
                for got, table in zip((rows.keys, rows.values), tokens, strict=True):
                    torch.testing.assert_close(got[0, h, slot], table[0, h, ids].mean(0))


def test_bytes_per_key_and_head():
    case = Case(head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("retroinfer", iterations=1)
    index.append(*case.tokens(1600))
    assert index._learned["sizes"].shape == (1, 2, 100)
    scanned = 100 * (2 * 128 + 4)
    assert index.nbytes()["codes"] == 2 * (1600 * 4 + scanned + 100 * 2 * 128) + 2 * 8
    assert index.bytes_per_key()["scanned"] == scanned / 1600


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(per_cluster=0), "per_cluster: got 0, allowed"),
        (dict(segment=0), "segment: got 0, allowed"),
        (dict(block=2.0), "block: got 2.0, allowed"),
        (dict(estimated=1), r"estimated: got 1, allowed is a number in \[0, 1\)"),
        (dict(estimated=-0.1), "estimated: got -0.1, allowed"),
        (dict(estimated=True), "estimated: got True, allowed"),
        (dict(centered=1), "centered: got 1, allowed is True or False"),
        (dict(iterations=-1), "iterations: got -1, allowed"),
        (dict(seed=2**63), "seed: got 9223372036854775808, allowed"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        Case().index("retroinfer", **options)
