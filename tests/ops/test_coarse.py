"""Coarse stage: compare with literal implementations, and check its properties on random inputs."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.ops import coarse, codes, transform
from tests.support import literal

seeds = st.integers(0, 2**31)


def setting(seed, batch=2, kv_heads=2, heads=2, count=30, subspaces=3, kinds=256):
    """Make rotated queries `[B, G, g, D]` and centroid ids `[B, G, N, M]` with at most `kinds`
    values."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, kv_heads, heads, 8 * subspaces, generator=generator)
    shape = (batch, kv_heads, count, subspaces)
    signs = torch.randint(0, kinds, shape, generator=generator)
    return queries, signs.to(torch.uint8)


def limits_of(count, rho):
    return [coarse.ceil_fraction(count, rho, tier) for tier in coarse.TIERS]


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
    ("count", "fractions", "want"),
    [
        (100, (0.2, 0.15), 3),  # as floats, the product is 3.0000000000000004
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
def test_ceil_reads_fractions_as_the_decimals_they_are_written_as(count, fractions, want):
    assert coarse.ceil_fraction(count, *fractions) == want


@given(st.integers(0, 10**9), st.integers(1, 1000), st.integers(1, 1000))
def test_ceil_of_thousandths(count, first, second):
    want = -(-count * first * second // 10**6)
    assert coarse.ceil_fraction(count, first / 1000, second / 1000) == want


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


# signed dots

largests = st.sampled_from([1, 2, 3, 7, 15, 127])


def assert_dots(queries, largest):
    got = coarse.dot_table(queries, largest)
    B, G, g, D = queries.shape
    assert (got.dtype, got.shape) == (torch.int16, (B, G, g, D // 8, 256))
    for query, table in zip(queries.reshape(-1, D).tolist(), got.flatten(0, 2), strict=True):
        assert table.tolist() == literal.dot_tables(query, largest)


@settings(max_examples=20)
@given(seeds, largests, st.sampled_from([1, 3, 10]))
def test_dots_are_those_of_the_literal_reading(seed, largest, subspaces):
    assert_dots(setting(seed, 2, 1, 2, 1, subspaces)[0], largest)


def test_halves_are_rounded_to_even():
    """With `query_max` 2, coordinates 4, 3, 2, 1 are scaled to 2, 1.5, 1, .5 and rounded to 2, 2,
    1, 0."""
    queries = torch.tensor([4.0, 3, 2, 1, -4, -3, -2, -1]).view(1, 1, 1, 8)
    assert coarse.rounded(queries, 2).flatten().tolist() == [2, 2, 1, 0, -2, -2, -1, 0]
    assert_dots(queries, 2)


@pytest.mark.parametrize("broken", ["sign", "half up", "scale of a subspace", "scale of a group"])
def test_the_comparison_of_dots_can_fail(broken, monkeypatch):
    right = coarse.dot_table

    def wrong(queries, largest):
        if broken == "sign":
            return right(-queries, largest)
        if broken == "half up":
            peak = queries.abs().amax(-1, keepdim=True)
            return right((queries * largest / peak + 0.5).floor(), largest)
        if broken == "scale of a subspace":
            parts = [right(part, largest) for part in queries.split(8, -1)]
            return torch.cat(parts, dim=-2)
        fraction = queries.abs().amax(-1) / queries.abs().amax((-2, -1))[..., None]
        table = right(queries, largest).double() * fraction[..., None, None]  # "scale of a group"
        return table.round().to(torch.int16)

    monkeypatch.setattr(coarse, "dot_table", wrong)
    queries, largest = setting(2, subspaces=2)[0], 20
    if broken == "half up":
        queries, largest = torch.tensor([4.0, 3, 2, 1] * 4).expand(1, 1, 2, 16), 2
    with pytest.raises(AssertionError):
        assert_dots(queries, largest)


@given(seeds, largests)
def test_each_heads_own_largest_coordinate_is_largest(seed, largest):
    queries = setting(seed)[0] * torch.tensor([1e-3, 1e3])[:, None]
    assert (coarse.rounded(queries, largest).abs().amax(-1) == largest).all()
    table = coarse.dot_table(queries, largest)
    assert int(table.abs().amax()) <= 8 * largest
    assert torch.equal(table, -table.flip(-1))  # the opposite pattern has the opposite product


def test_a_zero_query_has_zeros():
    queries = setting(0)[0]
    queries[0, 0, 1] = 0
    table = coarse.dot_table(queries, 127)
    assert not table[0, 0, 1].any()
    assert table[0, 0, 0].any()


@given(seeds, st.integers(-60, 60), largests)
def test_dots_do_not_change_when_queries_are_scaled_by_a_power_of_two(seed, power, largest):
    queries = setting(seed)[0]
    want = coarse.dot_table(queries, largest)
    assert torch.equal(coarse.dot_table(queries * 2.0**power, largest), want)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e38])
def test_dots_of_queries_at_the_ends_of_float32(size):
    queries = setting(0)[0].sign() * size
    assert_dots(queries, 127)


@given(seeds)
def test_a_sum_over_subspaces_is_one_inner_product_of_signs_and_integers(seed):
    queries, signs = setting(seed, 1, 2, 2, 20, 4)
    bits = codes.unpack(signs).flatten(-2).int() * 2 - 1  # [B, G, N, D]
    want = coarse.rounded(queries, 127).int() @ bits.mT
    assert torch.equal(coarse.votes(signs, coarse.dot_table(queries, 127)), want)


@pytest.mark.parametrize("subspaces", [1, 8, 16, 32])
def test_two_heads_are_in_one_word(subspaces):
    """Kernels sum two heads in one word: sums fit in 16 bits up to D = 256, for any coordinates."""
    queries = torch.ones(1, 1, 2, 8 * subspaces)
    signs = torch.tensor([255, 0], dtype=torch.uint8).view(1, 1, 2, 1).expand(1, 1, 2, subspaces)
    got = coarse.votes(signs, coarse.dot_table(queries, 127))
    assert got[0, 0].tolist() == [[8 * subspaces * 127, -8 * subspaces * 127]] * 2
    assert 8 * subspaces * 127 < 2**15


# factors

kinds_of_factors = st.sampled_from(["none", "key", "subspace"])


def factors_of(kind, signs, seed):
    if kind == "none":
        return None
    shape = (*signs.shape[:-1], 1 if kind == "key" else signs.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, codes.FACTOR + 1, shape, generator=generator, dtype=torch.int32)


def assert_sums(signs, table, factors, got):
    B, G, g = table.shape[:3]
    assert (got.dtype, got.shape) == (torch.int32, (B, G, g, signs.shape[2]))
    for b in range(B):
        for h in range(G):
            known = None if factors is None else factors[b, h].tolist()
            for i in range(g):
                want = literal.sums(table[b, h, i].tolist(), signs[b, h].tolist(), known)
                assert got[b, h, i].tolist() == want


@settings(max_examples=20)
@given(seeds, kinds_of_factors, st.sampled_from([1, 3, 16]), st.booleans())
def test_votes_are_sums_of_entries_times_factors(seed, kind, subspaces, dots):
    queries, signs = setting(seed, 2, 2, 2, 12, subspaces)
    if dots:
        table = coarse.dot_table(queries, 127)
    else:
        limits = torch.tensor(limits_of(12, 0.5)).expand(2, -1)
        table = coarse.tier_table(queries, coarse.histogram(signs), limits)
    factors = factors_of(kind, signs, seed)
    assert_sums(signs, table, factors, coarse.votes(signs, table, factors))


@pytest.mark.parametrize("broken", ["none", "key", "subspace", "order", "sign"])
def test_the_comparison_of_sums_can_fail(broken):
    queries, signs = setting(3, subspaces=4)
    table, factors = coarse.dot_table(queries, 127), factors_of("subspace", signs, 3)
    given_table, given_factors = table, factors
    if broken == "none":
        given_factors = None
    if broken == "key":
        given_factors = factors[..., :1]
    if broken == "subspace":
        given_factors = factors.flip(-1)
    if broken == "order":
        given_factors = factors.flip(2)
    if broken == "sign":
        given_table = table.to(torch.uint8)
    with pytest.raises(AssertionError):
        assert_sums(signs, table, factors, coarse.votes(signs, given_table, given_factors))


@pytest.mark.parametrize("kind", ["key", "subspace"])
@pytest.mark.parametrize("pattern", [255, 0])
def test_the_largest_factors_and_entries_do_not_overflow(kind, pattern):
    """With D = 256, coordinates ±127 and the largest factors, a vote plus offset fits in int32."""
    queries = torch.ones(1, 1, 2, 256)
    signs = torch.full((1, 1, 3, 32), pattern, dtype=torch.uint8)
    factors = torch.full((1, 1, 3, 1 if kind == "key" else 32), codes.FACTOR).int()
    got = coarse.votes(signs, coarse.dot_table(queries, 127), factors)
    want = 256 * 127 * codes.FACTOR * (1 if pattern else -1)
    assert abs(want) < 2**30  # the bound of offsets is 2^30
    assert (got == want).all()


@settings(max_examples=12)
@given(seeds, kinds_of_factors)
def test_sums_of_dots_follow_a_permutation_of_tokens(seed, kind):
    queries, signs = setting(seed)
    table, factors = coarse.dot_table(queries, 127), factors_of(kind, signs, seed)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    moved = None if factors is None else factors[:, :, order]
    want = coarse.votes(signs, table, factors)[..., order]
    assert torch.equal(coarse.votes(signs[:, :, order], table, moved), want)


# offsets of centers


def literal_offsets(product, query, largest, reference, level):
    """Compute `⟨q, μ⟩` in units of a vote, which are `level` times the steps of a weight and a
    table."""
    peak = max(abs(x) for x in query)
    unit = level * (reference / codes.FACTOR) * (peak / largest)
    return max(-(2**30), min(2**30, round(product / unit))) if unit > 0 else 0


@settings(max_examples=20)
@given(seeds, largests)
def test_offsets_are_those_of_the_literal_reading(seed, largest):
    queries = 3 * setting(seed, 2, 1, 2, 1, 4)[0]
    generator = torch.Generator().manual_seed(seed)
    products = 100 * torch.randn(2, 1, 2, 5, generator=generator)
    reference = torch.tensor([[8.0], [0.25]])
    got = coarse.dot_offsets(products, queries, largest, reference, 0.1)
    assert got.dtype == torch.int32
    for b in range(2):
        for h in range(2):
            query = queries[b, 0, h].tolist()
            want = [
                literal_offsets(x, query, largest, float(reference[b, 0]), 0.1)
                for x in products[b, 0, h].tolist()
            ]
            for mine, theirs in zip(got[b, 0, h].tolist(), want, strict=True):
                # the unit is a product of the same factors in another order
                assert abs(mine - theirs) <= 1


def test_offsets_are_bounded_and_none_without_a_scale():
    queries = setting(0)[0]
    B, G, g, _ = queries.shape
    products = torch.full((B, G, g, 3), 1e30)
    reference = torch.ones(B, G)
    got = coarse.dot_offsets(products, queries, 127, reference, 0.1)
    assert (got == 2**30).all()
    assert not coarse.dot_offsets(products, queries, 127, 0 * reference, 0.1).any()
    assert not coarse.dot_offsets(0 * products, 0 * queries, 127, reference, 0.1).any()


def test_offsets_are_added_to_the_votes_of_their_segment():
    queries, signs = setting(5, 2, 1, 3, 50, 4)
    table, factors = coarse.dot_table(queries, 127), factors_of("key", signs, 5)
    plain = coarse.votes(signs, table, factors)
    offsets = torch.arange(2 * 3 * 4, dtype=torch.int32).view(2, 1, 3, 4) * 1000
    got = coarse.votes(signs, table, factors, offsets, 16) - plain
    assert torch.equal(got, offsets[..., torch.arange(50) // 16])


def test_a_vote_and_its_offset_are_on_one_scale():
    """Votes with offsets, times their unit, are the regression of `q·k` on the signs."""
    generator = torch.Generator().manual_seed(0)
    D, N = 64, 4000
    keys = torch.randn(1, 1, N, D, generator=generator)
    queries = torch.randn(1, 1, 8, D, generator=generator)
    center = torch.randn(D, generator=generator)
    turn = transform.rotation(D, 0)
    directions, norms = transform.normalize(keys)
    levels = codes.levels(D, 3)
    found = codes.encode(transform.rotate(directions, turn), norms, levels, block=D)
    upper = (codes.log_codes(found["weights"], 16) >> 8).to(torch.uint8)
    reference = codes.weight_scale(upper.amax((2, 3)))
    factors = codes.factors(upper, reference, codes.log_factors(16))
    turned = transform.rotate(queries, turn)
    table, level = coarse.dot_table(turned, 127), codes.lloyd_max(D, 0)[0]
    product = (queries @ center)[..., None]
    offsets = coarse.dot_offsets(product, turned, 127, reference, level)
    votes = coarse.votes(found["signs"], table, factors, offsets, N).double()
    truth = (queries @ (keys + center).mT).double()
    unit = (product.double() / offsets.double()).abs()
    error = votes * unit - truth
    spread = truth.std(-1)
    assert (error.mean(-1).abs() < 0.05 * spread).all()
    deviations = votes * unit - (votes * unit).mean(-1, keepdim=True)
    slope = (deviations * truth).mean(-1) / deviations.square().mean(-1)
    assert (slope - 1).abs().max() < 0.1
    assert 0.55 < float((error.std(-1) / spread).mean()) < 0.65  # √(1 - 2/π) = .603
