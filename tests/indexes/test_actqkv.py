"""ActQKV: the probe of a window of queries, and which queries it consists of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.indexes.actqkv import probe
from tests.support.helpers import Case, left_padding

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 9))
def test_the_probe_is_the_mean_weighted_by_bias(seed, count):
    window = torch.randn(2, 3, count, 8, generator=torch.Generator().manual_seed(seed))
    counted = torch.ones(2, count, dtype=torch.bool)
    counted[1, : count // 2] = False
    got = probe(window, counted)
    for b in range(2):
        for h in range(3):
            queries = window[b, h, counted[b]]
            bias = [(query - queries.mean(0)).square().sum() for query in queries]
            if len(queries) == 1:
                bias = [torch.ones(())]
            want = sum(w * query for w, query in zip(bias, queries, strict=True)) / sum(bias)
            torch.testing.assert_close(got[b, h], want, rtol=1e-4, atol=1e-5)


def test_equal_queries_are_the_probe_and_one_that_stands_out_prevails():
    window = torch.ones(1, 1, 9, 8)
    counted = torch.ones(1, 9, dtype=torch.bool)
    assert torch.equal(probe(window, counted)[0, 0], torch.ones(8))
    window[0, 0, 4] = 10.0
    got = probe(window, counted)[0, 0]
    assert (got > 8).all()  # the unweighted mean is 2


def searched(index, queries, start=0):
    """Return hits after the queries `[B, H, T, D]` were observed one by one; the last one
    searches."""
    for t in range(queries.shape[2]):
        index.observe_queries(queries[:, :, t : t + 1], torch.tensor([start + t]))
    return index.search(queries[:, :, -1], k=10)


def test_the_last_queries_of_the_window_make_the_probe():
    keys, values = CASE.tokens(60)
    queries = CASE.tensor(7, 2, 4, 20, 16)
    index = CASE.index("actqkv", page=4, window=5)
    index.append(keys, values)
    got = searched(index, queries, start=40)
    want = CASE.index("actqkv", page=4)
    want.append(keys, values)
    weighted = probe(queries[:, :, -5:], torch.ones(2, 5, dtype=torch.bool))
    hits = want.search(weighted, k=10)
    assert torch.equal(got.ids, hits.ids)
    torch.testing.assert_close(got.scores, hits.scores)


def test_a_window_of_one_is_the_query_itself():
    keys, values = CASE.tokens(60)
    queries = CASE.tensor(7, 2, 4, 20, 16)
    index, blind = CASE.index("actqkv", window=1), CASE.index("actqkv")
    for each in (index, blind):
        each.append(keys, values)
    got = searched(index, queries)
    assert torch.equal(got.ids, blind.search(queries[:, :, -1], k=10).ids)


def test_a_padded_query_makes_no_part_of_the_probe():
    keys, values = CASE.tokens(8)
    queries = CASE.tensor(7, 2, 4, 8, 16)
    wild = queries.clone()
    wild[1, :, :3] = 1e6
    found = []
    for seen in (queries, wild):
        index = CASE.index("actqkv", page=2)
        index.observe_queries(seen, torch.arange(8))
        index.append(keys, values, valid=left_padding([0, 3], 8))
        found.append(index.search(seen[:, :, -1], k=5))
    assert torch.equal(found[0].ids, found[1].ids)
    torch.testing.assert_close(found[0].scores, found[1].scores)


def test_queries_of_tokens_that_were_cut_off_are_forgotten():
    keys, values = CASE.tokens(40)
    queries = CASE.tensor(7, 2, 4, 40, 16)
    index, blind = CASE.index("actqkv", page=4), CASE.index("actqkv", page=4)
    index.append(keys, values)
    blind.append(keys[:, :, :30], values[:, :, :30])
    index.observe_queries(queries, torch.arange(40))  # queries from 32 on form the window
    index.truncate(30)
    got, want = (each.search(queries[:, :, -1], k=9) for each in (index, blind))
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.scores, want.scores)


def test_whole_pages_by_their_mean_key():
    keys, values = CASE.tokens(64)
    index = CASE.index("actqkv", page=8)
    shadow = CASE.index("shadowkv", outliers=0, group="mean_share")
    for each in (index, shadow):
        each.append(keys, values)
    got, want = (each.search(CASE.queries(), k=20) for each in (index, shadow))
    assert torch.equal(got.ids, want.ids)


@pytest.mark.parametrize("options", [dict(page=0), dict(window=0), dict(group="x")])
def test_options_out_of_range_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}: got {value!r}"):
        CASE.index("actqkv", **options)
