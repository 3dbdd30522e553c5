from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.ops import coarse
from tests import literal

seeds = st.integers(0, 2**31)


def setting(seed, batch=2, kv_heads=2, heads=2, count=30, subspaces=3, kinds=256):
    """Rotated queries `[B, G, g, D]` and centroid ids `[B, G, N, M]` of at most `kinds` kinds."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, kv_heads, heads, 8 * subspaces, generator=generator)
    shape = (batch, kv_heads, count, subspaces)
    signs = torch.randint(0, kinds, shape, generator=generator)
    return queries, signs.to(torch.uint8)


def limits_of(count, rho):
    return [coarse.ceil_share(count, rho, tier) for tier in coarse.TIERS]


def voted(queries, signs, limits):
    rows = torch.tensor(limits).expand(len(queries), -1)
    table = coarse.tier_table(queries, coarse.histogram(signs), rows)
    return table, coarse.votes(signs, table)


def assert_as_the_spec_says(queries, signs, limits):
    table, got = voted(queries, signs, limits)
    assert (table.dtype, got.dtype) == (torch.uint8, torch.int32)
    B, G, g, _ = queries.shape
    for b in range(B):
        for h in range(G):
            for i in range(g):
                query, ids = queries[b, h, i].tolist(), signs[b, h].tolist()
                assert got[b, h, i].tolist() == literal.votes(query, ids, limits)
                for m, part in enumerate(literal.parts(query)):
                    points = literal.tier_points(part, [key[m] for key in ids], limits)
                    assert table[b, h, i, m].tolist() == [points[c] for c in range(256)]


@given(seeds, st.integers(1, 40), st.sampled_from([1, 4, 256]), st.sampled_from([0.1, 0.5, 1]))
def test_votes_are_those_of_the_literal_reading(seed, count, kinds, rho):
    queries, signs = setting(seed, 1, 2, 2, count, 2, kinds)
    assert_as_the_spec_says(queries, signs, limits_of(count, rho))


@given(seeds, st.sampled_from([0.0, 1.0, -1.0]))
def test_equal_centroids_are_ordered_by_the_lower_id(seed, value):
    queries, signs = setting(seed, 1, 1, 1, 30, 1)
    queries[..., ::2] = value  # at 0, 16 centroids share each similarity
    queries[..., 1::2] = queries[..., 1::2].sign()
    assert_as_the_spec_says(queries, signs, limits_of(30, 0.5))


def test_zero_query_orders_centroids_by_id():
    queries, signs = setting(0)
    table, _ = voted(torch.zeros_like(queries), signs, limits_of(30, 0.5))
    assert (table[..., :-1] >= table[..., 1:]).all()


@pytest.mark.parametrize("broken", ["sign", "order", "limit"])
def test_the_comparison_with_the_literal_reading_can_fail(broken, monkeypatch):
    right = coarse.tier_table

    def wrong(queries, histogram, limits):
        if broken == "sign":
            queries = -queries
        if broken == "order":  # strictly better or equal
            limits = limits - 1
        if broken == "limit":
            limits = limits[:, :-1]
        return right(queries, histogram, limits)

    monkeypatch.setattr(coarse, "tier_table", wrong)
    with pytest.raises(AssertionError):
        assert_as_the_spec_says(*setting(1), limits_of(30, 0.3))


@pytest.mark.parametrize(
    ("count", "shares", "want"),
    [
        (100, (0.2, 0.15), 3),  # in binary 3.0000000000000004
        (100, (0.25, 0.3), 8),
        (10, (0.1,), 1),
        (30, (0.1,), 3),
        (1, (0.1, 0.05), 1),
        (0, (0.5,), 0),
        (7, (1,), 7),
        (7, (1.0, 1.0), 7),
        (10**9, (1e-05,), 10_000),
        (29_999, (0.2, 0.05), 300),
    ],
)
def test_ceil_reads_shares_as_the_decimals_they_are_written_as(count, shares, want):
    assert coarse.ceil_share(count, *shares) == want


@given(st.integers(0, 10**9), st.integers(1, 1000), st.integers(1, 1000))
def test_ceil_of_thousandths(count, first, second):
    want = -(-count * first * second // 10**6)
    assert coarse.ceil_share(count, first / 1000, second / 1000) == want


@given(seeds, st.booleans())
def test_histogram_counts_valid_keys(seed, padded):
    _, signs = setting(seed, kinds=9)
    valid = None
    if padded:
        valid = torch.rand(2, 30, generator=torch.Generator().manual_seed(seed)) > 0.4
    got = coarse.histogram(signs, valid)
    assert (got.shape, got.dtype) == ((2, 2, 3, 256), torch.int64)
    for b in range(2):
        kept = signs[b] if valid is None else signs[b][:, valid[b]]
        for h in range(2):
            for m in range(3):
                want = torch.bincount(kept[h, :, m].long(), minlength=256)
                assert torch.equal(got[b, h, m], want)


@given(seeds, st.integers(0, 30))
def test_histogram_of_parts_adds_up(seed, cut):
    _, signs = setting(seed)
    parts = coarse.histogram(signs[:, :, :cut]) + coarse.histogram(signs[:, :, cut:])
    assert torch.equal(parts, coarse.histogram(signs))


@settings(max_examples=12)
@given(seeds)
def test_votes_follow_a_permutation_of_tokens(seed):
    queries, signs = setting(seed)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    limits = limits_of(30, 0.3)
    assert torch.equal(
        voted(queries, signs[:, :, order], limits)[1], voted(queries, signs, limits)[1][..., order]
    )


@settings(max_examples=12)
@given(seeds, st.integers(-30, 30))
def test_votes_do_not_change_when_queries_are_scaled_by_a_power_of_two(seed, power):
    queries, signs = setting(seed)
    limits = limits_of(30, 0.3)
    want = voted(queries, signs, limits)[1]
    assert torch.equal(voted(queries * 2.0**power, signs, limits)[1], want)


@settings(max_examples=12)
@given(seeds)
def test_votes_never_fall_as_rho_grows(seed):
    queries, signs = setting(seed)
    counts = [voted(queries, signs, limits_of(30, rho))[1] for rho in (0.1, 0.3, 0.6, 1)]
    for fewer, more in pairwise(counts):
        assert (fewer <= more).all()


@given(seeds)
def test_the_best_centroid_with_keys_earns_six_points_and_all_lie_within_0_and_6(seed):
    queries, signs = setting(seed)
    table, got = voted(queries, signs, limits_of(30, 0.2))
    assert (table.amax(-1) == 6).all()
    assert int(table.max()) <= 6
    assert (got <= 6 * 3).all()
    assert (got >= 0).all()


def test_a_row_without_keys_earns_nothing():
    queries, signs = setting(0, batch=2)
    valid = torch.tensor([[True] * 30, [False] * 30])
    limits = torch.tensor([limits_of(30, 0.5), limits_of(0, 0.5)])
    table = coarse.tier_table(queries, coarse.histogram(signs, valid), limits)
    assert table[0].any()
    assert not table[1].any()
