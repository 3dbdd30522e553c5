"""Compare each group policy with a slow implementation of its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops import group
from kvindex.ops.select import top_k

NEVER = float("-inf")
seeds = st.integers(0, 2**31)
heads = st.sampled_from([2, 3, 4])
caps = st.sampled_from([None, 1.0, 20.0])


def estimates(seed, heads, count=12, missing=3):
    """Make estimates `[2, 2, heads, count]`; the last `missing` of the first sequence are
    `-inf`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 2, heads, count, generator=generator) * 3
    values[0, ..., count - missing :] = NEVER
    return values


def weights(row, scale, softcap):
    """Compute the softmax of one head's logits over the rows that are candidates."""
    logits = [scale * x for x in row]
    if softcap is not None:
        logits = [softcap * math.tanh(x / softcap) for x in logits]
    top = max(logits)
    total = sum(math.exp(x - top) for x in logits)
    return [math.exp(x - top) / total for x in logits]


def slow_score(table, policy, scale, softcap):
    """Compute the log of the group's weight of each row.

    `table` has a list of estimates per head.
    """
    per_head = [weights(row, scale, softcap) for row in table]
    rows = zip(*per_head, strict=True)
    if policy == "max_share":
        return [math.log(max(row)) for row in rows]
    return [math.log(sum(row) / len(row)) for row in rows]


def slow_union(table):
    """Take rows from the heads' ranked lists in turn, without duplicates."""
    count = len(table[0])
    ranked = [sorted(range(count), key=lambda i, row=row: (-row[i], i)) for row in table]
    walk = []
    for place in range(count):
        for one in ranked:
            if one[place] not in walk:
                walk.append(one[place])
    return walk


def assert_shares(values, policy, scale, softcap):
    got = group.agree(values, policy, scale=scale, softcap=softcap)
    for b in range(2):
        real = values[b, 0, 0] != NEVER
        for h in range(2):
            want = slow_score(values[b, h][:, real].tolist(), policy, scale, softcap)
            assert got[b, h][real].tolist() == pytest.approx(want, abs=1e-4)
            assert (got[b, h][~real] == NEVER).all()


@pytest.mark.parametrize("policy", ["max_share", "mean_share"])
@given(seed=seeds, heads=heads, softcap=caps)
def test_weights_are_those_of_the_candidates_only(policy, seed, heads, softcap):
    assert_shares(estimates(seed, heads), policy, 0.7, softcap)


def test_the_comparison_of_weights_can_fail():
    with pytest.raises(AssertionError):
        assert_shares(estimates(0, 3) * torch.tensor([1.0, 1.1, 1.0])[:, None], "union", 1, None)


@given(seeds, heads)
def test_union_walks_the_ranked_lists_in_turn(seed, heads):
    values = estimates(seed, heads)
    got = top_k(group.agree(values, "union", scale=1.0, softcap=None), 12)[1]
    for b in range(2):
        real = values[b, 0, 0] != NEVER
        for h in range(2):
            want = slow_union(values[b, h][:, real].tolist())
            assert got[b, h].tolist() == want + [-1] * (12 - len(want))


@given(seeds, st.integers(1, 12))
def test_union_holds_the_best_row_of_as_many_heads_as_it_has_slots(seed, k):
    values = estimates(seed, 4)
    got = top_k(group.agree(values, "union", scale=1.0, softcap=None), k)[1]
    best = values.argmax(-1)[..., :k]  # the best row of each of the first k heads
    assert (best[..., None] == got[:, :, None]).any(-1).all()


@pytest.mark.parametrize("policy", group.POLICIES)
@given(seed=seeds, softcap=caps)
def test_a_group_of_one_ranks_by_the_estimates(policy, seed, softcap):
    values = estimates(seed, 1)
    got = group.agree(values, policy, scale=0.3, softcap=softcap)
    assert torch.equal(got, values[:, :, 0])


@given(seeds, heads)
def test_weights_of_different_heads_do_not_depend_on_their_offsets(seed, heads):
    """Raw scores of different heads are never compared."""
    values = estimates(seed, heads)
    moved = values + torch.arange(heads)[:, None] * 10.0
    for policy in ("mean_share", "max_share", "union"):
        want = group.agree(values, policy, scale=0.5, softcap=None)
        got = group.agree(moved, policy, scale=0.5, softcap=None)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_small_weights_keep_their_order():
    values = torch.tensor([[[[0.0, -500.0, -400.0], [0.0, -501.0, -401.0]]]])
    for policy in ("mean_share", "max_share"):
        got = group.agree(values, policy, scale=1.0, softcap=None)
        assert top_k(got, 3)[1].flatten().tolist() == [0, 2, 1]


@given(seeds, heads)
def test_fold_groups_neighboring_heads_and_mean_query_averages_them(seed, heads):
    queries = torch.randn(2, 2 * heads, 8, generator=torch.Generator().manual_seed(seed)).half()
    folded = group.fold(queries, 2, "union")
    assert (folded.shape, folded.dtype) == ((2, 2, heads, 8), torch.float32)
    assert torch.equal(folded[1, 1, 0], queries[1, heads].float())
    mean = group.fold(queries, 2, "mean_query")
    assert mean.shape == (2, 2, 1, 8)
    want = sum(queries[1, heads + i].double() for i in range(heads)) / heads
    torch.testing.assert_close(mean[1, 1, 0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", group.POLICIES)
def test_a_row_without_candidates_gives_no_nan(policy):
    got = group.agree(torch.full((1, 1, 3, 4), NEVER), policy, scale=1.0, softcap=1.0)
    assert (got == NEVER).all()
