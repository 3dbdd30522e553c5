"""H2O equals a cache in Python's own numbers that drops one row per step."""

import math

import pytest
import torch

from tests.support import literal
from tests.support.exactly import assert_follows_exact_in_a_layer
from tests.support.helpers import (
    Case,
    assert_same_hits,
    assert_same_snapshot,
    left_padding,
    part,
    snapshot,
)
from tests.support.policies import STILL_HOLD, kept

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
N, STEPS = 30, 12
SMALL = dict(budget=8, recent=0.5)


def sequence(case=CASE, count=N + STEPS, seed=0):
    """Return queries `[B, H, count, D]`, long enough to prefer some rows."""
    return 2 * case.tensor(500 + seed, case.batch, case.q_heads, count, case.head_dim)


def built(case=CASE, pads=None, **options):
    """Make an index whose prompt of `N` tokens is complete."""
    index = case.index("h2o", **{**SMALL, **options})
    valid = None if pads is None else left_padding(pads, N)
    index.append(*part(case.tokens(N + STEPS), 0, N), valid=valid)
    index.observe_queries(sequence(case)[:, :, :N], torch.arange(N))
    index.end_prompt()
    return index


def stepped(index, step, case=CASE):
    """Append one more token, then observe its query."""
    index.append(*part(case.tokens(N + STEPS), N + step, N + step + 1))
    index.observe_queries(sequence(case)[:, :, N + step : N + step + 1], torch.tensor([N + step]))


class Literal:
    """The cache of one KV head: a score for each id that is still there."""

    def __init__(self, keys, queries, scale, *, budget, recent, pad=0, first=0):
        self.keys, self.queries, self.scale = keys, queries, scale
        self.latest = math.ceil(budget * recent)
        self.heavy = budget - self.latest
        self.scores = {i: 0.0 for i in range(pad, N)}
        for i in range(max(pad, first), N):
            self.attend(i)
        self.drop()

    def attend(self, i):
        for head in self.queries:
            seen = [j for j in self.scores if j <= i]
            weights = [math.exp(self.scale * literal.dot(head[i], self.keys[j])) for j in seen]
            for j, weight in zip(seen, weights, strict=True):
                self.scores[j] += weight / sum(weights)

    def drop(self):
        ids = sorted(self.scores)
        older = ids[: -self.latest]
        best = sorted(older, key=lambda j: (-self.scores[j], j))[: self.heavy]
        self.scores = {j: self.scores[j] for j in sorted(best) + ids[-self.latest :]}

    def step(self, i):
        self.scores[i] = 0.0
        self.attend(i)
        self.drop()


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("options", [{}, dict(budget=13, recent=0.25), dict(recent=1.0)], ids=str)
def test_it_keeps_what_a_literal_cache_keeps(options, pads):
    options = {**SMALL, **options}
    index, caches = built(pads=pads, **options), {}
    keys = CASE.tokens(N + STEPS)[0].tolist()
    for b in range(2):
        for h in range(2):
            queries = sequence()[b, 3 * h : 3 * h + 3].tolist()
            pad = 0 if pads is None else pads[b]
            cache = Literal(keys[b][h], queries, index.geometry.scale, pad=pad, **options)
            caches[b, h] = cache
    for step in range(-1, STEPS):
        if step >= 0:
            stepped(index, step)
        for (b, h), cache in caches.items():
            if step >= 0:
                cache.step(N + step)
            assert kept(index, CASE, b, h) == [*cache.scores]


def test_the_literal_cache_can_differ():
    keys, queries = CASE.tokens(N + STEPS)[0][0, 0].tolist(), sequence()[0, :3].tolist()
    for wrong in (dict(recent=0.25), dict(budget=9), dict(first=15)):
        cache = Literal(keys, queries, 0.25, **{**SMALL, **wrong})
        assert [*cache.scores] != kept(built(), CASE, 0, 0)


def test_only_the_last_queries_of_the_prompt_count_if_so_asked():
    keys, queries = CASE.tokens(N + STEPS)[0][0, 0].tolist(), sequence()[0, :3].tolist()
    cache = Literal(keys, queries, 0.25, **SMALL, first=15)
    assert kept(built(most=15), CASE, 0, 0) == [*cache.scores]


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
@pytest.mark.parametrize("k", [7, N + STEPS])
def test_a_budget_above_n_is_exact(pads, group, k):
    index = built(pads=pads, group=group, budget=N + STEPS)
    exact = CASE.index("exact", group=group)
    valid = None if pads is None else left_padding(pads, N)
    exact.append(*part(CASE.tokens(N + STEPS), 0, N), valid=valid)
    for step in range(STEPS):
        hits = [each.search(CASE.queries(), k=k) for each in (index, exact)]
        assert_same_hits(*hits, close=1e-5)
        stepped(index, step)
        exact.append(*part(CASE.tokens(N + STEPS), N + step, N + step + 1))


def test_a_budget_below_n_is_not():
    exact = CASE.index("exact")
    exact.append(*part(CASE.tokens(N + STEPS), 0, N))
    hits = [index.search(CASE.queries(), k=N) for index in (built(), exact)]
    with pytest.raises(AssertionError):
        assert_same_hits(*hits, close=1e-5)


def test_with_nothing_but_the_latest_it_is_a_window():
    index, window = built(recent=1.0), CASE.index("streaming", sink=0, budget=8)
    window.append(*part(CASE.tokens(N + STEPS), 0, N))
    for step in range(3):
        stepped(index, step)
        window.append(*part(CASE.tokens(N + STEPS), N + step, N + step + 1))
        assert_same_hits(
            index.search(CASE.queries(), k=9), window.search(CASE.queries(), k=9), close=1e-5
        )


def test_a_search_never_reads_more_than_the_budget_and_changes_nothing():
    """Tokens after the last query compete for places in the budget, with scores of zero."""
    index = built()
    heavy = kept(index, CASE, 0, 0)[:4]
    index.append(*CASE.tokens(9, seed=1))
    for _ in range(2):
        assert kept(index, CASE, 0, 0) == [*heavy, *range(N + 5, N + 9)]
    index.truncate(N)
    assert kept(index, CASE, 0, 0) == [*heavy, *range(N - 4, N)]


def test_what_is_dropped_does_not_come_back():
    index, before = built(), kept(built(), CASE, 1, 1)
    stepped(index, 0)
    gone = {*before} - {*kept(index, CASE, 1, 1)}
    assert len(gone) == 1
    index.truncate(N)
    assert kept(index, CASE, 1, 1) == sorted({*before} - gone)
    index.truncate(0)
    assert kept(index, CASE, 1, 1) == []


def test_a_further_prompt_counts_causally():
    index, one_by_one = built(), built(budget=N + STEPS)
    index.append(*part(CASE.tokens(N + STEPS), N, N + 3))
    index.observe_queries(sequence()[:, :, N : N + 3], torch.arange(N, N + 3))
    for step in range(3):
        stepped(one_by_one, step)  # no row is dropped yet
    known = index._learned["ids"]
    assert (known[..., -1] == N + 2).all()
    last = index._learned["scores"][..., -1], one_by_one._learned["scores"][..., -1]
    assert (last[0] > last[1]).all(), "shares among fewer rows are larger"
    assert (last[0] < 3).all(), "one query for each head of the group"


def test_without_queries_every_row_is_kept():
    index = CASE.index("h2o", **SMALL)
    index.append(*CASE.tokens(N))
    index.end_prompt()
    assert kept(index, CASE, 0, 0) == [*range(N)]
    index.append(*CASE.tokens(3))
    index.observe_queries(sequence()[:, :, :1], torch.tensor([N + 2]))
    assert len(kept(index, CASE, 0, 0)) == 8


def test_padding_changes_nothing_but_ids():
    queries = sequence().clone()
    queries[1, :, :13] = float("nan")
    padded = CASE.index("h2o", **SMALL)
    tokens = part(CASE.tokens(N + STEPS), 0, N)
    padded.append(*tokens, valid=left_padding([0, 13], N))
    padded.observe_queries(queries[:, :, :N], torch.arange(N))
    padded.end_prompt()
    alone = CASE.index("h2o", **SMALL)
    alone.append(tokens[0][1:, :, 13:], tokens[1][1:, :, 13:])
    alone.observe_queries(queries[1:, :, 13:N], torch.arange(N - 13))
    alone.end_prompt()
    assert kept(padded, CASE, 1, 1) == [13 + i for i in kept(alone, CASE, 0, 1)]
    assert kept(padded, CASE, 0, 1) == kept(built(), CASE, 0, 1)


def test_queries_may_come_before_the_keys():
    late, order = CASE.index("h2o", **SMALL), torch.tensor([1, 0])
    late.observe_queries(sequence()[order, :, :N], torch.arange(N))
    late.reorder(order)
    with pytest.raises(ValueError, match=r"keys.*B=2"):
        late.append(*CASE.tokens(N, batch=1))
    late.append(*part(CASE.tokens(N + STEPS), 0, N))
    late.end_prompt()
    assert kept(late, CASE, 1, 0) == kept(built(), CASE, 1, 0)


def test_in_pieces_or_at_once(monkeypatch):
    index = built()
    for start, stop in ((0, 1), (1, 4), (4, 9)):
        index.append(*part(CASE.tokens(9, seed=1), start, stop))
    whole = built()
    whole.append(*CASE.tokens(9, seed=1))
    assert_same_hits(index.search(CASE.queries(), k=9), whole.search(CASE.queries(), k=9))
    once = built()
    monkeypatch.setattr("kvindex.bases.eviction.LOGITS", 1)
    for name in ("ids", "scores"):
        torch.testing.assert_close(built()._learned[name], once._learned[name])


def dropping(case):
    """Make indexes that drop rows after their first append, by the same queries for each
    sequence."""
    queries = case.tensor(7, 1, case.q_heads, 9, case.head_dim)

    def make(**options):
        index = case.index("h2o", **{**SMALL, **options})
        plain = index.append

        def append(keys, values, **flags):
            plain(keys, values, **flags)
            if not index._prompt_ended and len(index):
                index.observe_queries(queries.expand(len(keys), -1, -1, -1), torch.arange(4, 13))
                index.end_prompt()

        index.append = append
        return index

    return make


@pytest.mark.parametrize("check", STILL_HOLD, ids=lambda c: c.__name__)
def test_once_it_drops_rows_it_keeps_the_contract(check):
    case = Case(q_heads=3, kv_heads=1, head_dim=8, value_dim=8, batch=2)
    check(dropping(case), case)


def test_bad_calls_leave_it_as_it_was():
    index = built()
    before = snapshot(index, CASE.queries())
    keys, values = CASE.tokens(4, seed=3)
    keys[1, 1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match="keys"):
        index.append(keys, values)
    with pytest.raises(ValueError, match="queries: got shape"):
        index.observe_queries(sequence()[:1], torch.arange(N + STEPS))
    with pytest.raises(ValueError, match="positions: got shape"):
        index.observe_queries(sequence(), torch.arange(N))
    assert_same_snapshot(snapshot(index, CASE.queries()), before)


def test_bytes_are_an_id_and_a_score_for_each_kept_row():
    index = built()
    assert index.nbytes()["codes"] == 2 * 2 * 8 * (8 + 4)
    assert index.bytes_per_key() == {"stored": 8 * 12 / N, "scanned": 8 * (16 * 4 + 12) / N}


def test_published_defaults():
    config = CASE.index("h2o").config
    assert (config.budget, config.recent, config.most) == (2048, 0.5, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(budget=0), "budget: got 0"),
        (dict(recent=1.5), "recent: got 1.5"),
        (dict(most=0), "most: got 0"),
    ],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("h2o", **options)


def test_in_a_layer_with_a_large_budget_it_follows_exact():
    assert_follows_exact_in_a_layer(CASE, "h2o", budget=61)
