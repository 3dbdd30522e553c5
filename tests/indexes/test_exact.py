"""Exact search equals a sort of the true scores in Python's own numbers."""

import pytest
import torch

from kvindex.indexes import exact
from tests.support import literal
from tests.support.helpers import Case, hits_of, left_padding

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def brute_force(keys, query, k, first=0):
    """Return [(id, score)] of the best keys from `first` on."""
    scores = [literal.dot(key, query) for key in keys]
    return [(i + first, scores[i + first]) for i in literal.best(scores[first:], k)]


def assert_as_brute_force(index, keys, queries, k, pads=(0, 0)):
    hits = index.search(queries, k=k)
    for b in range(len(queries)):
        for h in range(keys.shape[1]):
            want = brute_force(keys[b, h].tolist(), queries[b, h].tolist(), k, pads[b])
            used = [i for i in hits.ids[b, h].tolist() if i >= 0]
            assert used == [i for i, _ in want]
            got = hits.scores[b, h, : len(want)].tolist()
            assert got == pytest.approx([score for _, score in want], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("k", [1, 7, 40, 50])
def test_hits_are_the_best_by_true_scores(dtype, store, k):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, dtype=dtype, batch=2)
    keys, values = case.tokens(40)
    index = case.index("exact", store=store)
    index.append(keys, values, valid=left_padding([0, 11], 40))
    assert_as_brute_force(index, keys, case.queries(), k, pads=(0, 11))


def test_brute_force_can_fail():
    keys, values = CASE.tokens(40)
    index = CASE.index("exact")
    index.append(keys, values)
    for wrong in (-keys, keys.flip(0), keys.roll(1, 2)):
        with pytest.raises(AssertionError):
            assert_as_brute_force(index, wrong, CASE.queries(), 7)


def test_equal_scores_go_to_the_lower_id():
    """Products of small integers are exact, so ties are true ties."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-1, 2, (2, 2, 60, 16), generator=generator).float()
    queries = torch.randint(-1, 2, (2, 2, 16), generator=generator).float()
    index = CASE.index("exact")
    index.append(keys, keys[..., :8])
    assert_as_brute_force(index, keys, queries, 30)


def test_scoring_in_blocks_changes_nothing(monkeypatch):
    index, tokens = CASE.index("exact"), CASE.tokens(40)
    index.append(*tokens)
    monkeypatch.setattr(exact, "BLOCK", 7)
    assert_as_brute_force(index, tokens[0], CASE.queries(), 12)


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_all_ids_come_back_whatever_the_policy(group):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, softcap=3.0)
    index = case.index("exact", group=group)
    index.append(*case.tokens(25))
    ids = index.search(case.queries(), k=25).ids
    assert (ids.sort(dim=-1).values == torch.arange(25)).all()


def test_mean_query_searches_with_the_mean_of_the_raw_queries():
    case = Case(q_heads=6, kv_heads=2, head_dim=16)
    keys, values = case.tokens(25)
    index = case.index("exact", group="mean_query")
    index.append(keys, values)
    queries = case.queries()
    got = index.search(queries, k=5).ids
    for h in range(2):
        mean = queries[0, 3 * h : 3 * h + 3].double().mean(0).tolist()
        want = brute_force(keys[0, h].tolist(), mean, 5)
        assert got[0, h].tolist() == [i for i, _ in want]


def test_it_keeps_no_codes():
    index = CASE.index("exact")
    index.append(*CASE.tokens(25))
    assert index.encode(CASE.tokens(3)[0]) == {}
    assert index.nbytes() == {"codes": 0, "rows": 2 * 2 * 25 * 24 * 4}


def test_a_fetched_row_is_a_copy():
    index, (keys, values) = CASE.index("exact"), CASE.tokens(4)
    index.append(keys, values)
    ids = torch.zeros(2, 2, 1, dtype=torch.int64)
    index.fetch(hits_of(ids)).keys.zero_()
    assert torch.equal(index.fetch(hits_of(ids)).keys, keys[:, :, :1])
