"""Reuse: when it searches, what it returns otherwise, and which signals the inner index gets."""

import math

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Reuse
from tests import contract
from tests.support.helpers import Case, assert_same_hits, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
COUNT, K = 60, 7


def wrapped(tau, name="exact", case=CASE, count=COUNT, **options):
    index = Reuse(case.index(name, **options), tau=tau)
    index.append(*case.tokens(count))
    return index


def stepped(index, queries, k=K):
    """Call the index as a layer does for one new query."""
    index.observe_queries(queries[:, :, None], torch.tensor([len(index)]))
    return index.search(queries, k=k)


def turned(queries, cosine):
    """Return queries `[B, H, D]` whose cosines with `queries` are the given ones, `[B, H]`."""
    other = CASE.tensor(99, *queries.shape)
    other -= (
        (other * queries).sum(-1, keepdim=True) / queries.square().sum(-1, keepdim=True) * queries
    )
    other *= queries.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True)
    cosine = torch.as_tensor(cosine)[..., None]
    return cosine * queries + (1 - cosine.square()).sqrt() * other


@pytest.mark.parametrize("name", kvindex.names())
def test_tau_above_one_searches_every_step(name):
    """Queries repeat, so the cosine is 1 up to rounding, and the index grows between searches."""
    if name.startswith("faiss"):
        pytest.importorskip("faiss")
    index, alone, more = wrapped(1.0001, name), CASE.index(name), CASE.tokens(6, seed=1)
    alone.append(*CASE.tokens(COUNT))
    for each in (index, alone):
        each.end_prompt()
    for step in range(6):
        for each in (index, alone):
            each.append(*part(more, step, step + 1))
            each.observe_queries(CASE.queries()[:, :, None], torch.tensor([COUNT + step]))
            if each is alone and step:
                each.mark_boundary()
        assert_same_hits(index.search(CASE.queries(), k=K), alone.search(CASE.queries(), k=K))
    assert (index.steps, index.searches, index.rate()) == (6, 6, 1.0)


def test_tau_below_minus_one_never_searches_again():
    index = wrapped(-1.0001)
    hits, opposite = stepped(index, CASE.queries()), -CASE.queries()
    for step in range(5):
        index.append(*CASE.tokens(1, seed=step))
        assert_same_hits(stepped(index, opposite if step % 2 else CASE.queries(step)), hits)
    assert (index.steps, index.searches) == (6, 1)


@pytest.mark.parametrize("observed", [True, False])
def test_it_searches_where_the_mean_cosine_of_neighboring_queries_is_below_tau(observed):
    """The cosines of the heads alternate between .9 and .5, so their mean is .7."""
    for tau, searches in ((0.699, 1), (0.701, 2)):
        index = wrapped(tau)
        first = CASE.queries()
        second = turned(first, torch.tensor([[0.9, 0.5] * 3] * 2))
        step = stepped if observed else lambda i, q: i.search(q, k=K)
        step(index, first)
        hits = step(index, second)
        assert index.searches == searches
        want = index.inner.search(first if searches == 1 else second, k=K)
        assert_same_hits(hits, want)


def test_neighbors_are_compared_not_the_query_that_searched():
    """Small changes of the query add up to a large one, but no step searches."""
    index, queries = wrapped(0.8), CASE.queries()
    start = queries
    for _ in range(12):
        stepped(index, queries)
        queries = turned(queries, torch.full((2, 6), math.cos(math.pi / 6)))
    assert torch.cosine_similarity(start, queries, dim=-1).mean() < 0.8
    assert index.searches == 1


def test_each_row_of_a_batch_is_judged_on_its_own():
    index, first = wrapped(0.7), CASE.queries()
    old = stepped(index, first)
    second = turned(first, torch.tensor([[0.9] * 6, [0.1] * 6]))
    new = index.inner.search(second, k=K)
    hits = stepped(index, second)
    assert torch.equal(hits.ids[0], old.ids[0])
    assert torch.equal(hits.ids[1], new.ids[1])
    assert not torch.equal(old.ids[1], new.ids[1])


class Told(kvindex.get("exact")):
    """Records the signals that it gets."""

    def __init__(self, **options):
        super().__init__(**options)
        self.told = []

    def observe_queries(self, queries, positions):
        self.told.append(positions.tolist())

    def mark_boundary(self):
        self.told.append("boundary")


def test_a_boundary_is_marked_before_the_query_that_differs():
    index = Reuse(Told(q_heads=6, kv_heads=2, head_dim=16, value_dim=8), tau=0.7)
    index.append(*CASE.tokens(COUNT))
    queries = CASE.queries()[:, :, None]
    # a prompt has no boundary
    index.observe_queries(queries.expand(-1, -1, 3, -1), torch.arange(3))
    index.observe_queries(queries, torch.tensor([3]))  # equal to the prompt's last query
    index.search(CASE.queries(), k=K)
    index.observe_queries(-queries, torch.tensor([4]))
    index.search(-CASE.queries(), k=K)
    assert index.inner.told == [[0, 1, 2], [3], "boundary", [4]]


def test_other_rows_or_fewer_tokens_are_reasons_to_search():
    index, queries = wrapped(-2), CASE.queries()
    stepped(index, queries)
    assert stepped(index, queries, k=K + 1).ids.shape == (2, 2, K + 1)
    assert index.searches == 2
    index.truncate(COUNT + 1)
    stepped(index, queries, k=K + 1)
    assert index.searches == 2
    index.truncate(10)
    assert (stepped(index, queries, k=K + 1).ids < 10).all()
    assert index.searches == 3


def test_slots_without_a_token_are_filled_once_the_index_has_grown():
    index = wrapped(-2, count=3)
    assert (stepped(index, CASE.queries()).ids >= 0).sum() == 4 * 3
    stepped(index, CASE.queries())
    assert index.searches == 1
    index.append(*CASE.tokens(20, seed=1))
    assert (stepped(index, CASE.queries()).ids >= 0).all()
    index.append(*CASE.tokens(20, seed=2))
    stepped(index, CASE.queries())
    assert index.searches == 2


def test_reordering_moves_hits_and_queries():
    index, first = wrapped(0.7), CASE.queries()
    old = stepped(index, first)
    rows = torch.tensor([1, 0, 1])
    index.reorder(rows)
    hits = stepped(index, turned(first, torch.full((2, 6), 0.9))[rows])
    assert torch.equal(hits.ids, old.ids[rows])
    assert index.searches == 1


@pytest.mark.parametrize("ask", [lambda index, queries: index.search(queries, k=K), stepped])
@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0]])
def test_queries_of_another_batch_before_the_first_token_are_forgotten(ask, order):
    index, alone = Reuse(CASE.index("exact")), CASE.index("exact")
    ask(index, CASE.queries())
    index.reorder(torch.tensor([5]))  # an empty index accepts any batch
    ask(index, CASE.queries())
    for each in (index, alone):
        each.append(*CASE.tokens(COUNT, batch=3))
        each.reorder(torch.tensor(order))
    queries = CASE.queries(batch=len(order))
    assert_same_hits(ask(index, queries), alone.search(queries, k=K))
    index.reorder(torch.tensor(order[:2]))
    assert len(ask(index, queries[:2]).ids) == 2


def test_weights_are_reused_with_their_rows():
    """The wrapped `Sample` returns log weights."""
    index = Reuse(kvindex.create("exact+sample", q_heads=6, kv_heads=2, head_dim=16), tau=0.7)
    index.append(*(CASE.tokens(COUNT)[0],) * 2)
    first = CASE.queries()
    old = stepped(index, first)
    second = turned(first, torch.tensor([[0.9] * 6, [0.1] * 6]))
    hits = stepped(index, second)
    assert torch.equal(hits.log_weight[0], old.log_weight[0])
    assert torch.equal(hits.log_weight[1], index.inner.search(second, k=K).log_weight[1])


def test_reset_forgets_hits_and_counts():
    index = wrapped(-2)
    assert Reuse(CASE.index("exact")).rate() is None
    stepped(index, CASE.queries())
    index.reset()
    assert (index.steps, index.searches, index.rate()) == (0, 0, None)
    assert (index.search(CASE.queries(), k=3).ids == -1).all()


def test_a_search_that_fails_is_made_by_the_next():
    index = wrapped(-2)
    stepped(index, CASE.queries())
    bad = CASE.queries()
    bad[0, 1, 2] = float("nan")
    with pytest.raises(ValueError, match="queries: got nan"):
        index.search(bad, k=K)
    assert_same_hits(index.search(CASE.queries(), k=K), index.inner.search(CASE.queries(), k=K))
    with pytest.raises(ValueError, match="queries: got shape"):
        index.search(bad[:1], k=K)
    with pytest.raises(ValueError, match="k: got 0"):
        index.search(CASE.queries(), k=0)


class Passing(Reuse):
    """Passes on the attributes that the contract's checks read in addition to the protocol."""

    _batch = property(lambda self: self.inner._batch)
    _codes = property(lambda self: self.inner._codes)
    unit = property(lambda self: self.inner.unit)
    scattered = property(lambda self: self.inner.scattered)


@pytest.mark.parametrize("name", ["exact", "louiskv"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_with_tau_above_one_it_keeps_the_contract(check, name):
    check(lambda **options: Passing(CASE.index(name, **options), tau=2), CASE)


def test_louiskv_as_a_whole_in_a_layer():
    """Every fifth query differs from the one before, which marks a boundary and ends a segment."""
    index = kvindex.create(
        "louiskv:per_cluster=4+reuse:tau=.7", q_heads=6, kv_heads=2, head_dim=16, value_dim=8
    )
    layer = AttentionLayer(index, k=9, sink=3, local_window=4, update_every=5, dense_below=0)
    keys, values = CASE.tokens(60)
    layer.step(CASE.tensor(1, 2, 6, 30, 16), keys[:, :, :30], values[:, :, :30])
    for i in range(30, 60):
        queries = CASE.queries(i // 5)[:, :, None]
        layer.step(queries, keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert (index.steps, index.searches) == (30, 6)
    assert index.inner._sequence.cuts == (30, 35, 40, 45, 50, 55)


@pytest.mark.parametrize("tau", ["high", True, float("nan")])
def test_a_tau_that_is_no_number_is_refused(tau):
    with pytest.raises(ValueError, match="tau: got"):
        Reuse(CASE.index("exact"), tau=tau)
