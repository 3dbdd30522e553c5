"""Quest: its bound, which rows come together, and pages with padding and truncation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.indexes.quest import Quest
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
seeds = st.integers(0, 10_000)


def whole_numbers(seed, *shape):
    """Return small integers as float32, whose products are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def page_bounds(index, queries, count):
    """Return the score of every token's page, float32 `[B, G, count]`; one head per group."""
    hits = index.search(queries, k=count)
    return torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)


def assert_bounded(kind, seed, count, page):
    keys, queries = whole_numbers(seed, 2, 2, count, 16), whole_numbers(seed + 1, 2, 2, 16)
    index = kind(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, page=page)
    cut = count // 3
    index.append(keys[:, :, :cut], keys[:, :, :cut, :8])
    index.append(keys[:, :, cut:], keys[:, :, cut:, :8])
    products = (keys @ queries[..., None])[..., 0]
    assert (page_bounds(index, queries, count) >= products).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds, count=st.integers(1, 70), page=st.integers(1, 20))
def test_a_page_scores_at_least_as_much_as_each_of_its_keys(seed, count, page):
    assert_bounded(Quest, seed, count, page)


class Mean(Quest):
    def _summaries_of(self, keys, there, marks):
        mean = keys.sum(3) / there.sum(3).clamp_min(1)
        return {"low": mean, "high": mean}


class SpoilsTheOpenPage(Quest):
    def _tail(self, held, keys, valid):
        tail = super()._tail(held, keys, valid)
        if len(self):
            tail["high"][:, :, 0] = tail["low"][:, :, 0]
        return tail


@pytest.mark.parametrize("kind", [Mean, SpoilsTheOpenPage])
def test_the_bound_can_fail(kind):
    with pytest.raises(AssertionError):
        assert_bounded(kind, 0, 40, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_bound_holds_to_rounding_for_short_types(dtype):
    case = Case(q_heads=2, kv_heads=2, head_dim=128, dtype=dtype)
    keys, values = case.tokens(100)
    index, queries = case.index("quest"), case.queries()
    index.append(keys, values[..., :16])
    products = keys.double() * queries.double()[:, :, None]
    # rounding of 128 float32 sums
    slack = 128 * torch.finfo(torch.float32).eps * products.abs().sum(-1)
    assert (page_bounds(index, queries, 100) + slack >= products.sum(-1)).all()


def test_the_bound_is_that_of_the_best_corner_of_the_box():
    """No bound that uses only the extremes is lower."""
    keys, queries = whole_numbers(3, 1, 1, 5, 8), whole_numbers(4, 1, 1, 8)
    index = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=8).index("quest")
    index.append(keys, keys)
    low, high = keys[0, 0].amin(0), keys[0, 0].amax(0)
    corners = torch.cartesian_prod(*torch.stack([low, high], 1))  # all 256
    assert index.search(queries, k=1).scores.item() == (corners @ queries[0, 0]).max()


def test_pages_of_one_token_are_exact():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    tokens, queries = case.tokens(40), case.queries()
    for group in ("mean_share", "max_share", "union", "mean_query"):
        index, exact = case.index("quest", page=1, group=group), case.index("exact", group=group)
        for each in (index, exact):
            each.append(*tokens)
        got, want = index.search(queries, k=9), exact.search(queries, k=9)
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5)


def test_rows_are_whole_pages_best_first_and_the_last_is_cut():
    keys = torch.zeros(1, 1, 10, 8)
    keys[0, 0, :, 0] = torch.tensor([1, 1, 1, 1, 0, 0, 0, 3, 2, 0])  # pages of 4: 1, 3, 2
    query = torch.eye(8)[:1, None]  # [B, H, D]
    index = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=8).index("quest", page=4)
    index.append(keys, keys)
    order = [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, -1, -1]  # the second best page has two rows
    for k in (1, 4, 5, 6, 7, 10, 12):
        hits = index.search(query, k=k)
        assert hits.ids[0, 0].tolist() == order[:k]
        scores = [3.0] * 4 + [2.0] * 2 + [1.0] * 4 + [float("-inf")] * 2
        assert hits.scores[0, 0].tolist() == scores[:k]


def test_what_is_left_out_scores_no_more_than_the_last_page_taken():
    tokens, queries = CASE.tokens(200), CASE.queries()
    index = CASE.index("quest")
    index.append(*tokens)
    hits = index.search(queries, k=64)
    products = (tokens[0] @ queries[..., None])[..., 0].scatter(-1, hits.ids, -torch.inf)
    assert (products.amax(-1) <= hits.scores[..., -1] + 1e-4).all()


def test_summaries_are_those_of_one_append_whatever_came_before():
    """Appends in parts, padding of any length, truncation and reordering: equal to the bit."""
    pads, tokens = [0, 5, 37], CASE.tokens(90, batch=3)
    index = CASE.index("quest", page=8)
    valid = left_padding(pads, 90)
    start = 0
    for stop in (3, 20, 21, 60, 75):
        index.append(*part(tokens, start, stop), valid=valid[:, start:stop])
        start = stop
    index.truncate(50)
    index.append(*part(tokens, 50, 85))
    index.reorder(torch.tensor([2, 0, 1]))
    index.append(*(rows[[2, 0, 1]] for rows in part(tokens, 85, 90)))
    for row, b in enumerate([2, 0, 1]):
        keys = tokens[0][b : b + 1, :, pads[b] :]
        want = index.encode(keys.expand(3, -1, -1, -1))
        for name in ("low", "high"):
            pages = want[name].shape[2]
            assert torch.equal(index._codes[name][row, :, :pages], want[name][0])


def test_holes_among_the_tokens_move_no_page():
    keys, values = CASE.tokens(40)
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    index = CASE.index("quest", page=4)
    index.append(keys[:, :, :23], values[:, :, :23], valid=valid[:, :23])
    index.append(keys[:, :, 23:], values[:, :, 23:], valid=valid[:, 23:])
    hits = index.search(CASE.queries(), k=12)
    for b in range(2):
        real = valid[b].nonzero()[:, 0]
        alone = CASE.index("quest", page=4)
        alone.append(keys[b : b + 1, :, real], values[b : b + 1, :, real])
        want = alone.search(CASE.queries()[b : b + 1], k=12)
        assert torch.equal(hits.ids[b], real[want.ids[0]])


def test_bytes_per_key_and_head():
    case = Case(q_heads=4, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("quest")
    index.append(*case.tokens(64))
    assert index.bytes_per_key() == {"stored": 32, "scanned": 32}


@pytest.mark.parametrize("page", [0, -1, 2.5])
def test_a_bad_page_is_refused(page):
    with pytest.raises(ValueError, match=rf"page: got {page}, allowed is an integer of at least 1"):
        CASE.index("quest", page=page)
