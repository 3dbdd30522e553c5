"""StreamingLLM: which rows it keeps by a direct rule; all of them if the budget allows."""

import pytest
import torch

from tests.contract import CHECKS
from tests.support.exactly import assert_follows_exact_in_a_layer
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
N = 40
NOT_BLIND = {
    "check_a_needle_is_found",
    "check_ties_go_to_the_lower_id",
}  # these checks search for evicted rows


def literal(count, sink, latest, pad=0):
    """Return the ids that are kept of `count` real tokens after `pad` padded ones."""
    return [pad + i for i in range(count) if i < sink or i >= count - latest]


def found(index, k=N):
    ids = index.search(CASE.queries(), k=k).ids.sort(dim=-1).values
    return [[[i for i in row if i >= 0] for row in head] for head in ids.tolist()]


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
@pytest.mark.parametrize("k", [7, N])
def test_a_budget_above_n_is_exact(pads, group, k):
    valid = None if pads is None else left_padding(pads, N)
    hits = []
    for name, options in (("streaming", dict(budget=N + 1)), ("exact", {})):
        index = CASE.index(name, group=group, **options)
        index.append(*CASE.tokens(N), valid=valid)
        hits.append(index.search(CASE.queries(), k=k))
    assert_same_hits(*hits, close=1e-5)


def test_a_budget_below_n_is_not():
    hits = []
    for name, options in (("streaming", dict(budget=12)), ("exact", {})):
        index = CASE.index(name, **options)
        index.append(*CASE.tokens(N))
        hits.append(index.search(CASE.queries(), k=N))
    with pytest.raises(AssertionError):
        assert_same_hits(*hits, close=1e-5)


@pytest.mark.parametrize("pads", [[0, 0], [0, 11], [39, 3]])
def test_it_keeps_the_first_and_the_latest_whatever_is_appended_or_cut(pads):
    tokens = CASE.tokens(N)
    index, valid = CASE.index("streaming", budget=12, sink=4), left_padding(pads, N)
    for start, stop in ((0, 5), (5, 6), (6, 30), (30, N)):
        index.append(*part(tokens, start, stop), valid=valid[:, start:stop] if any(pads) else None)
        want = [literal(stop - min(pad, stop), 4, 8, min(pad, stop)) for pad in pads]
        assert found(index) == [[each, each] for each in want]
    index.truncate(25)
    want = [literal(25 - min(pad, 25), 4, 8, min(pad, 25)) for pad in pads]
    assert found(index) == [[each, each] for each in want]


@pytest.mark.parametrize("budget", [61, 8])
def test_in_a_layer_only_a_large_budget_follows_exact(budget):
    if budget > 60:
        assert_follows_exact_in_a_layer(CASE, "streaming", budget=budget)
        return
    with pytest.raises(AssertionError):
        assert_follows_exact_in_a_layer(CASE, "streaming", budget=budget)


def test_no_sink_is_a_window():
    index = CASE.index("streaming", budget=5, sink=0)
    index.append(*CASE.tokens(N))
    assert found(index)[1][0] == [*range(N - 5, N)]


@pytest.mark.parametrize("k", [3, 12])
def test_kept_rows_come_in_the_order_of_exact(k):
    index = CASE.index("streaming", budget=12, group="mean_query")
    exact = CASE.index("exact", group="mean_query")
    for each in (index, exact):
        each.append(*CASE.tokens(N))
    got, all_ids = index.search(CASE.queries(), k=k), exact.search(CASE.queries(), k=N)
    kept = {*literal(N, 4, 8)}
    for b in range(2):
        for h in range(2):
            want = [i for i in all_ids.ids[b, h].tolist() if i in kept][:k]
            assert got.ids[b, h].tolist() == want


@pytest.mark.parametrize("check", [c for c in CHECKS if c.__name__ not in NOT_BLIND])
def test_with_a_small_budget_it_keeps_the_rest_of_the_contract(check):
    case = Case(q_heads=3, kv_heads=1, head_dim=8, value_dim=8, batch=2)
    check(lambda **options: case.index("streaming", **{"budget": 12, **options}), case)


def test_a_blind_policy_cannot_find_a_needle():
    (needle,) = [c for c in CHECKS if c.__name__ == "check_a_needle_is_found"]
    with pytest.raises(AssertionError):
        needle(lambda **options: CASE.index("streaming", budget=12, **options), CASE)


def test_a_batch_of_other_lengths_equals_its_rows():
    keys, values = CASE.tokens(N)
    index = CASE.index("streaming", budget=9)
    index.append(keys, values, valid=left_padding([0, 13], N))
    alone = CASE.index("streaming", budget=9)
    alone.append(keys[1:, :, 13:], values[1:, :, 13:])
    hits = index.search(CASE.queries(), k=9)
    want = alone.search(CASE.queries()[1:], k=9)
    got = type(hits)(hits.ids[1:], hits.scores[1:])
    assert_same_hits(got, want, close=ROUNDED, shift=13)


def test_bytes_scanned_are_those_of_the_budget():
    case = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, dtype=torch.float16)
    index = case.index("streaming", budget=20)
    index.append(*case.tokens(100))
    assert index.bytes_per_key() == {"stored": 0, "scanned": 20 * 64 * 2 / 100}
    assert index.nbytes()["codes"] == 0


def test_published_defaults():
    assert (CASE.index("streaming").config.budget, CASE.index("streaming").config.sink) == (2004, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [(dict(budget=4), "budget: got 4, allowed is .* 5"), (dict(sink=-1), "sink: got -1")],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("streaming", **options)
