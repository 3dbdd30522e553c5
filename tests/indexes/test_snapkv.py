"""SnapKV equals an election in Python's own numbers; it is exact if the budget allows all rows."""

import math

import pytest
import torch

from kvindex.testing.contract.housekeeping import check_truncated_ids_never_return
from tests.support import literal
from tests.support.exactly import assert_follows_exact_in_a_layer, assert_stays_exact, unchanged
from tests.support.helpers import (
    Case,
    assert_same_hits,
    assert_same_snapshot,
    left_padding,
    part,
    snapshot,
)
from tests.support.policies import STILL_HOLD, assert_bad_signals_are_refused, kept

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
N = 40
SMALL = dict(budget=12, window=4, kernel=3)


def prompt(case=CASE, count=N, seed=0):
    """Return queries `[B, H, count, D]`, long enough to prefer some rows."""
    return 2 * case.tensor(500 + seed, case.batch, case.q_heads, count, case.head_dim)


def built(case=CASE, pads=None, **options):
    index = case.index("snapkv", **{**SMALL, **options})
    index.append(*case.tokens(N), valid=None if pads is None else left_padding(pads, N))
    index.observe_queries(prompt(case), torch.arange(N))
    index.end_prompt()
    return index


def elected(keys, queries, scale, *, budget, window, kernel, pool="mean", pad=0):
    """Return the ids that the published rule keeps of keys `[n][D]` for queries `[g][n][D]`."""
    n = len(keys)
    votes = [0.0] * n
    for head in queries:
        for i in range(n - window, n):
            logits = [scale * literal.dot(head[i], keys[j]) for j in range(pad, i + 1)]
            total = sum(math.exp(x) for x in logits)
            for j, x in enumerate(logits, pad):
                votes[j] += math.exp(x) / total
    prefix, half = range(pad, n - window), kernel // 2
    pooled = []
    for j in prefix:
        near = [votes[i] if i in prefix else 0.0 for i in range(j - half, j + half + 1)]
        pooled.append(sum(near) / kernel if pool == "mean" else max(near))
    best = [pad + i for i in literal.best(pooled, budget - window)]
    return [*sorted(best), *range(n - window, n)]


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("options", [{}, dict(pool="max"), dict(kernel=1), dict(window=7)], ids=str)
def test_it_keeps_what_the_window_votes_for(options, pads):
    index, options = built(pads=pads, **options), {**SMALL, **options}
    for b in range(2):
        for h in range(2):
            keys = CASE.tokens(N)[0][b, h].tolist()
            queries = prompt()[b, 3 * h : 3 * h + 3].tolist()
            pad = 0 if pads is None else pads[b]
            want = elected(keys, queries, index.geometry.scale, pad=pad, **options)
            assert kept(index, CASE, b, h) == want


def test_the_literal_election_can_differ():
    keys, queries = CASE.tokens(N)[0][0, 0].tolist(), prompt()[0, :3].tolist()
    for wrong in (dict(kernel=1), dict(window=5), dict(pool="max")):
        assert elected(keys, queries, 0.25, **{**SMALL, **wrong}) != kept(built(), CASE, 0, 0)


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_a_budget_above_n_is_exact(pads, group):
    index, exact = built(pads=pads, group=group, budget=N + 1), CASE.index("exact", group=group)
    exact.append(*CASE.tokens(N), valid=None if pads is None else left_padding(pads, N))
    changes = [unchanged, lambda i: i.append(*CASE.tokens(5, seed=3))]
    assert_stays_exact(CASE, index, exact, changes, ks=(7, N + 5))


def test_a_budget_below_n_is_not():
    exact = CASE.index("exact")
    exact.append(*CASE.tokens(N))
    hits = [index.search(CASE.queries(), k=N) for index in (built(), exact)]
    with pytest.raises(AssertionError):
        assert_same_hits(*hits, close=1e-5)


def test_what_is_generated_is_kept_beside_the_prompt():
    index = built()
    before = kept(index, CASE, 1, 1)
    index.append(*CASE.tokens(6, seed=1))
    index.observe_queries(CASE.queries()[:, :, None], torch.tensor([N + 5]))
    assert len(before) == SMALL["budget"]
    assert kept(index, CASE, 1, 1) == [*before, *range(N, N + 6)]
    index.truncate(N + 2)
    assert kept(index, CASE, 1, 1) == [*before, N, N + 1]


@pytest.mark.parametrize("first", [0, 10, 30, 38])
def test_queries_may_come_before_the_keys(first):
    """This happens in a layer, whose newest tokens are appended to the index later."""
    late, tokens, order = CASE.index("snapkv", **SMALL), CASE.tokens(N), torch.tensor([1, 0])
    late.observe_queries(prompt()[order, :, :25], torch.arange(25))
    late.reorder(order)
    late.observe_queries(prompt()[:, :, 25:], torch.arange(25, N))
    late.append(*part(tokens, 0, first))
    late.end_prompt()
    late.append(*part(tokens, first, 39))
    late.append(*part(tokens, 39, N))
    assert_same_hits(
        late.search(CASE.queries(), k=N), built().search(CASE.queries(), k=N), close=1e-5
    )


def test_a_cut_prompt_votes_again():
    index = built()
    before = kept(index, CASE, 0, 1)
    index.truncate(20)
    assert len(kept(index, CASE, 0, 1)) == SMALL["budget"] - SMALL["window"]
    index.append(*part(CASE.tokens(N), 20, N))
    assert kept(index, CASE, 0, 1) == before
    index.truncate(0)
    assert kept(index, CASE, 0, 1) == []


def test_queries_of_a_sequence_that_was_cut_go():
    index = CASE.index("snapkv", **SMALL)
    index.append(*CASE.tokens(N))
    index.observe_queries(prompt(seed=1), torch.arange(N))
    index.observe_queries(prompt()[:, :, 10:], torch.arange(10, N))  # observed again from 10 on
    index.end_prompt()
    assert kept(index, CASE, 1, 0) == kept(built(), CASE, 1, 0)


def test_without_seal_or_queries_every_row_is_kept():
    index = CASE.index("snapkv", **SMALL)
    index.append(*CASE.tokens(N))
    index.end_prompt()
    assert kept(index, CASE, 0, 0) == [*range(N)]
    index = CASE.index("snapkv", **SMALL)
    index.append(*CASE.tokens(N))
    index.observe_queries(prompt(), torch.arange(N))
    assert kept(index, CASE, 0, 0) == [*range(N)]


def test_padding_changes_nothing_but_ids():
    keys, values = CASE.tokens(N)
    queries = prompt().clone()
    queries[1, :, :38] = float("nan")  # half of the window is padding
    padded = CASE.index("snapkv", **SMALL)
    padded.append(keys, values, valid=left_padding([0, 38], N))
    padded.observe_queries(queries, torch.arange(N))
    padded.end_prompt()
    assert kept(padded, CASE, 1, 0) == [38, 39]
    assert kept(padded, CASE, 0, 0) == kept(built(), CASE, 0, 0)


def voting(case):
    """Make indexes whose first append is part of a prompt of 13 tokens that has voted."""
    queries = case.tensor(7, 1, case.q_heads, 9, case.head_dim)

    def make(**options):
        index = case.index("snapkv", **{**SMALL, **options})
        plain = index.append

        def append(keys, values, **flags):
            if index._observed is None and keys.numel():
                index.observe_queries(queries.expand(len(keys), -1, -1, -1), torch.arange(4, 13))
                index.end_prompt()
            plain(keys, values, **flags)

        index.append = append
        return index

    return make


@pytest.mark.parametrize(
    "check", [*STILL_HOLD, check_truncated_ids_never_return], ids=lambda c: c.__name__
)
def test_after_an_election_it_keeps_the_contract(check):
    case = Case(q_heads=3, kv_heads=1, head_dim=8, value_dim=8, batch=2)
    check(voting(case), case)


def test_a_refused_append_leaves_the_election_as_it_was():
    index = CASE.index("snapkv", **SMALL)
    index.observe_queries(prompt(), torch.arange(N))
    index.append(*part(CASE.tokens(N), 0, 30))
    index.end_prompt()
    before = snapshot(index, CASE.queries())
    keys, values = CASE.tokens(4, seed=3)
    keys[1, 1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match="keys"):
        index.append(keys, values)
    assert_same_snapshot(snapshot(index, CASE.queries()), before)


def test_repeated_rows_find_the_same():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    index = built(case)
    hits = index.expand_batch(3).search(case.queries(batch=3), k=9)
    for b in range(3):
        some = slice(b, b + 1)
        want = index.search(case.queries(batch=3)[some], k=9)
        assert_same_hits(type(hits)(hits.ids[some], hits.scores[some]), want, close=1e-5)


def test_bytes_are_the_ids_and_the_queries():
    index = built()
    assert index.nbytes()["codes"] == 2 * 2 * 8 * 8 + (2 * 6 * 4 * 16 * 4 + 4 * 8)
    assert index.bytes_per_key()["scanned"] == 12 * 16 * 4 / N


def test_published_defaults():
    config = CASE.index("snapkv").config
    assert (config.budget, config.window, config.kernel, config.pool) == (2048, 32, 5, "mean")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(budget=32), "budget: got 32, allowed is .* 33"),
        (dict(window=0), "window: got 0"),
        (dict(kernel=4), "kernel: got 4, allowed is an odd"),
        (dict(pool="sum"), "pool: got 'sum'"),
    ],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("snapkv", **options)


def test_bad_signals_are_refused():
    assert_bad_signals_are_refused(built(), prompt())


def test_in_a_layer_with_a_large_budget_it_follows_exact():
    assert_follows_exact_in_a_layer(CASE, "snapkv", budget=61)
