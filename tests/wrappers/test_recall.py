"""Recall compared with exact search, measured while an index is in use."""

import pytest
import torch

from kvindex import Hits
from kvindex.indexes.exact import Exact
from kvindex.ops import group
from kvindex.wrappers import MeasureRecall, Wrapper
from tests.support.helpers import Case, assert_same_hits, left_padding

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
K = 5


class ReturnsNothing(Exact):
    def _search(self, queries, k):
        hits = super()._search(queries, k)
        return Hits(torch.full_like(hits.ids, -1), torch.full_like(hits.scores, -torch.inf))


def measured(index, count=40, searches=3):
    wrapper = MeasureRecall(index)
    wrapper.append(*CASE.tokens(count), valid=left_padding([0, 9], count))
    for seed in range(searches):
        wrapper.search(CASE.queries(seed), k=K)
    return wrapper


def test_exact_reaches_the_limit_and_a_group_cannot_reach_1():
    wrapper = measured(CASE.index("exact"))
    assert wrapper.recall() == wrapper.limit()
    assert 0.3 < wrapper.limit() < 1


def test_exact_with_one_head_per_group_has_recall_1():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    wrapper = MeasureRecall(case.index("exact"))
    wrapper.append(*case.tokens(40))
    wrapper.search(case.queries(), k=K)
    assert wrapper.recall() == wrapper.limit() == 1


def test_an_index_that_returns_nothing_has_recall_0():
    wrapper = measured(ReturnsNothing(q_heads=6, kv_heads=2, head_dim=16, value_dim=8))
    assert wrapper.recall() == 0
    assert wrapper.limit() > 0


def test_recall_counts_each_heads_own_true_top_k():
    wrapper = measured(CASE.index("pariskv:preset=fast", group="union"), searches=0)
    keys = CASE.tokens(40)[0]
    found = wanted = 0
    for seed in range(4):
        queries = CASE.queries(seed)
        hits = wrapper.search(queries, k=K)
        scores = group.fold(queries, 2, "union") @ keys.mT
        scores[1, ..., :9] = -torch.inf
        for b in range(2):
            for h in range(6):
                true = sorted(range(40), key=lambda i, row=scores[b, h // 3, h % 3]: -row[i])[:K]
                found += len({*true} & {*hits.ids[b, h // 3].tolist()})
                wanted += K
    assert wrapper.recall() == pytest.approx(found / wanted)


def test_around_an_index_that_holds_tokens_it_counts_the_same():
    inner, whole = CASE.index("pariskv"), MeasureRecall(CASE.index("pariskv"))
    for index in (inner, whole):
        index.append(*CASE.tokens(40), valid=left_padding([0, 9], 40))
    late = MeasureRecall(Wrapper(inner))
    for index in (late, whole):
        index.append(*CASE.tokens(10, seed=1))
        index.search(CASE.queries(), k=K)
    assert (late.recall(), late.limit()) == (whole.recall(), whole.limit())


def test_fewer_tokens_than_k_are_all_that_is_wanted():
    assert measured(CASE.index("exact"), count=12).limit() <= 1
    small = MeasureRecall(CASE.index("exact"))
    small.append(*CASE.tokens(3))
    small.search(CASE.queries(), k=K)
    assert small.recall() == small.limit() == 1


def test_nothing_searched_gives_none_and_reset_forgets():
    assert MeasureRecall(CASE.index("exact")).recall() is None
    wrapper = measured(CASE.index("exact"))
    wrapper.reset()
    assert (wrapper.recall(), wrapper.limit(), len(wrapper)) == (None, None, 0)
    wrapper.search(CASE.queries(), k=K)
    assert wrapper.recall() is None


def test_truncate_and_reorder_reach_the_copy():
    wrapper = measured(CASE.index("exact"), searches=0)
    wrapper.truncate(20)
    wrapper.reorder(torch.tensor([1, 0, 1]))
    wrapper.search(CASE.queries(batch=3), k=K)
    assert wrapper.recall() == wrapper.limit() > 0


@pytest.mark.parametrize("kind", [Wrapper, MeasureRecall])
def test_a_wrapper_gives_what_the_inner_index_gives(kind):
    inner, alone = CASE.index("pariskv"), CASE.index("pariskv")
    wrapper = kind(inner)
    tokens = CASE.tokens(30)
    for index in (wrapper, alone):
        index.append(*tokens, valid=left_padding([0, 4], 30))
        index.end_prompt()
        index.mark_boundary()
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([29]))
        index.truncate(25)
        index.reorder(torch.tensor([1, 0]))
    assert (wrapper.geometry, wrapper.config) == (alone.geometry, alone.config)
    assert (len(wrapper), wrapper.nbytes()) == (25, alone.nbytes())
    hits = alone.search(CASE.queries(), k=K)
    assert_same_hits(wrapper.search(CASE.queries(), k=K), hits)
    assert torch.equal(wrapper.fetch(hits).keys, alone.fetch(hits).keys)
    assert wrapper.encode(tokens[0]).keys() == alone.encode(tokens[0]).keys()
