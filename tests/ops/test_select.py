import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops.select import candidates, compact, top_k

INF = float("inf")
scores = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from([-INF, -1.5, -1.0, -0.0, 0.0, 1e-45, -1e-45, 1.0, 3e38, -3e38])
rows = st.lists(scores | few, min_size=1, max_size=40)


def python_top_k(row, k):
    ids = sorted((i for i, s in enumerate(row) if s != -INF), key=lambda i: (-row[i], i))[:k]
    return ids + [-1] * (k - len(ids)), [row[i] for i in ids] + [-INF] * (k - len(ids))


def assert_top_k(row, k):
    got_scores, got_ids = top_k(torch.tensor([row]), k)
    want_ids, want_scores = python_top_k(row, k)
    assert (got_ids.dtype, got_scores.dtype) == (torch.int64, torch.float32)
    assert got_ids[0].tolist() == want_ids
    assert got_scores[0].tolist() == want_scores


@given(rows, st.integers(1, 50))
def test_top_k_is_a_sort_by_score_then_id(row, k):
    assert_top_k(torch.tensor(row).tolist(), k)


@given(st.lists(few, min_size=1, max_size=30), st.integers(1, 40))
def test_top_k_with_many_ties(row, k):
    assert_top_k(torch.tensor(row).tolist(), k)


def test_negative_zero_ties_with_zero():
    assert top_k(torch.tensor([-0.0, 0.0, -0.0]), 2)[1].tolist() == [0, 1]


def test_minus_infinity_is_never_selected():
    best, ids = top_k(torch.tensor([-INF, 2.0, -INF]), 3)
    assert ids.tolist() == [1, -1, -1]
    assert best.tolist() == [2.0, -INF, -INF]


def test_the_comparison_with_a_sort_can_fail():
    with pytest.raises(AssertionError):
        assert python_top_k([1.0, 1.0], 1) == ([1], [1.0])


@given(st.integers(0, 2**31), st.integers(1, 12))
def test_top_k_follows_a_permutation_where_scores_are_distinct(seed, k):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randperm(30, generator=generator).float()
    order = torch.randperm(30, generator=generator)
    assert torch.equal(order[top_k(row[order], k)[1]], top_k(row, k)[1])


def assert_candidates(got, votes, limits, valid):
    for b, limit in enumerate(limits):
        real = valid[b].nonzero()[:, 0].tolist()
        for h in range(2):
            chosen = set()
            for row in votes[b, h].tolist():
                chosen |= set(sorted(real, key=lambda i, row=row: (-row[i], i))[:limit])
            want = sorted(chosen)
            assert got[b, h].tolist() == want + [-1] * (got.shape[-1] - len(want))


def padded_votes(seed, heads, least, most, divisor=2):
    """Make votes `[2, 2, heads, 20]` from `least` to below `most`, limits, and flags of valid
    keys."""
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(least, most, (2, 2, heads, 20), generator=generator).int()
    valid = torch.rand(2, 20, generator=generator) > 0.3
    return votes, [int(row.sum()) // divisor for row in valid], valid


LEAST = -256 * 127 * 32767 - 2**30  # lowest sign vote at D = 256 (tests/ops/test_coarse.py)


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(0, 1), (0, 4), (-3, 4), (-9, -6), (LEAST, -LEAST), (LEAST, LEAST + 3)]),
    st.sampled_from([1, 2]),
)
def test_candidates_are_each_heads_best_by_votes_then_id(seed, heads, between, divisor):
    votes, limits, valid = padded_votes(seed, heads, *between, divisor)
    got = candidates(votes, torch.tensor(limits), valid)
    assert_candidates(got, votes, limits, valid)


@pytest.mark.parametrize("padding", [-1, 0])
def test_padding_that_beats_negative_votes_is_noticed(padding):
    """Sign votes can be negative, so padding must have a vote below all of them."""
    votes, limits, valid = padded_votes(0, 2, -9, -6, 1)
    right = candidates(votes, torch.tensor(limits), valid)
    assert_candidates(right, votes, limits, valid)
    wrong = candidates(votes.masked_fill(~valid[:, None, None], padding), torch.tensor(limits))
    with pytest.raises(AssertionError):
        assert_candidates(wrong, votes, limits, valid)
    with pytest.raises(AssertionError):
        assert_candidates(
            candidates(-votes, torch.tensor(limits) // 2, valid), votes, limits, valid
        )


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_candidates_are_nested_as_the_limit_grows(seed, heads):
    votes = torch.randint(
        0, 4, (1, 2, heads, 20), generator=torch.Generator().manual_seed(seed)
    ).int()
    smaller = [set(), set()]
    for limit in range(1, 21):
        got = candidates(votes, torch.tensor([limit]))[0].tolist()
        larger = [set(row) - {-1} for row in got]
        assert all(len(row) >= limit for row in larger)
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))
        smaller = larger


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=5))
def test_compact_lists_positions_in_ascending_order(flags):
    got = compact(torch.tensor(flags)).tolist()
    wants = [[i for i, flag in enumerate(row) if flag] for row in flags]
    width = max(map(len, wants))
    assert got == [want + [-1] * (width - len(want)) for want in wants]
