import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops import codes
from kvindex.ops.rerank import estimate
from kvindex.ops.transform import normalize
from tests.support import literal

LEVELS = codes.levels(8, 3)
seeds = st.integers(0, 2**31)
shapes = st.sampled_from([(24, 8), (24, 24), (80, 16), (80, 80)])


def coded(seed, count=12, dim=24, block=8, levels=LEVELS):
    """Return queries `[2, 2, 3, D]`, and codes and float32 weights of `[2, 2, count]` rotated
    keys."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, 2, 3, dim, generator=generator)
    keys = torch.randn(2, 2, count, dim, generator=generator)
    got = codes.encode(*normalize(keys), levels, block=block)
    return queries, keys, got["signs"], got["magnitudes"], got["weights"]


def represented(signs, magnitudes, weights, levels=LEVELS):
    """Return the vectors that the codes represent, float64."""
    v = codes.decode(signs, magnitudes, levels).double()
    return (v.unflatten(-1, (weights.shape[-1], -1)) * weights.double()[..., None]).flatten(-2)


def assert_close_to_inner_products(queries, keys, got):
    want = queries.double() @ keys.mT
    # D products, each rounded with a relative error of 2^-24, and a sum of D terms
    size = queries.double().abs() @ keys.abs().mT
    assert ((got - want).abs() <= keys.shape[-1] * 2**-24 * size).all()


@given(seeds)
def test_estimate_is_the_inner_product_with_what_the_codes_represent(seed):
    queries, _, *parts = coded(seed)
    got = estimate(queries, *parts, LEVELS)
    assert (got.dtype, got.shape) == (torch.float32, (2, 2, 3, 12))
    assert_close_to_inner_products(queries, represented(*parts), got)


@given(seeds, shapes, st.integers(0, 5))
def test_estimate_with_a_weight_per_block(seed, shape, bits):
    dim, block = shape
    levels = codes.levels(block, bits)
    queries, _, *parts = coded(seed, 12, dim, block, levels)
    assert parts[2].shape == (2, 2, 12, dim // block)
    got = estimate(queries, *parts, levels)
    assert (got.dtype, got.shape) == (torch.float32, (2, 2, 3, 12))
    assert_close_to_inner_products(queries, represented(*parts, levels), got)


@given(seeds, shapes, st.integers(0, 5))
def test_a_keys_own_inner_product_is_estimated_exactly(seed, shape, bits):
    dim, block = shape
    levels = codes.levels(block, bits)
    _, keys, *parts = coded(seed, 12, dim, block, levels)
    got = estimate(keys, *parts, levels).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(got, keys.square().sum(-1), rtol=1e-5, atol=1e-5)


@given(seeds)
def test_one_weight_may_be_repeated_for_every_subspace(seed):
    queries, _, signs, magnitudes, weights = coded(seed, block=24)
    want = estimate(queries, signs, magnitudes, weights, LEVELS)
    repeated = weights.expand(-1, -1, -1, 3)
    assert torch.equal(estimate(queries, signs, magnitudes, repeated, LEVELS), want)


@given(seeds)
def test_estimate_is_exact_for_keys_that_codes_represent_exactly(seed):
    """A key w_b v_b, where v_b has norm 1, is encoded as the code v_b and the weight w_b."""
    queries, _, signs, magnitudes, weights = coded(seed)
    keys = represented(signs, magnitudes, weights)
    again = codes.encode(*normalize(keys.float()), LEVELS)
    # a decoded v_b does not have norm 1, and after normalizing it the nearest levels may differ;
    # so the test keeps only keys that are encoded as the same codes again
    back = (again["signs"] == signs).all(-1) & (again["magnitudes"] == magnitudes).all((-1, -2))
    assert back.any()
    got = estimate(queries, again["signs"], again["magnitudes"], again["weights"], LEVELS)
    want = queries.double() @ keys.mT
    size = queries.double().abs() @ keys.abs().mT
    wrong = (got - want).abs() > 24 * 2**-22 * size
    assert not (wrong & back[:, :, None]).any()


@given(seeds)
def test_keys_of_one_magnitude_are_represented_exactly(seed):
    """If every coordinate of a subspace is ±a, all have the same level, so w_b v_b = k_b."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (1, 1, 9, 24), generator=generator) * 2.0 - 1
    keys = sign * torch.rand(1, 1, 9, 3, generator=generator).repeat_interleave(8, -1)
    queries = torch.randn(1, 1, 2, 24, generator=generator)
    got = codes.encode(*normalize(keys), LEVELS)
    estimates = estimate(queries, got["signs"], got["magnitudes"], got["weights"], LEVELS)
    torch.testing.assert_close(estimates, queries @ keys.mT, rtol=1e-5, atol=1e-5)


@given(seeds)
def test_estimate_follows_equation_10_term_by_term(seed):
    queries, keys, *parts = coded(seed, count=2)
    got = estimate(queries, *parts, LEVELS)
    values = LEVELS.tolist()
    for i in range(2):
        key = keys[0, 1, i].tolist()
        unit = [x / literal.norm(key) for x in key]
        query = queries[0, 1, 2].tolist()
        total = 0.0
        for part, q in zip(literal.parts(unit), literal.parts(query), strict=True):
            c, index, weight = literal.encode_part(part, literal.norm(key), values)
            v = literal.decode_part([c >> j & 1 for j in range(8)], index, values)
            total += weight * literal.dot(v, q)
        assert float(got[0, 1, 2, i]) == pytest.approx(total, rel=1e-4, abs=1e-4)


@given(seeds)
def test_estimates_follow_a_permutation_of_tokens(seed):
    queries, _, *parts = coded(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    moved = [part[:, :, order] for part in parts]
    torch.testing.assert_close(
        estimate(queries, *moved, LEVELS), estimate(queries, *parts, LEVELS)[..., order]
    )


@given(seeds, st.integers(-20, 20))
def test_estimates_scale_with_the_query(seed, power):
    queries, _, *parts = coded(seed)
    want = estimate(queries, *parts, LEVELS) * 2.0**power
    assert torch.equal(estimate(queries * 2.0**power, *parts, LEVELS), want)


def test_zero_weights_and_zero_queries_give_zero():
    queries, _, signs, magnitudes, weights = coded(0)
    assert not estimate(queries, signs, magnitudes, weights * 0, LEVELS).any()
    assert not estimate(queries * 0, signs, magnitudes, weights, LEVELS).any()


def test_the_comparison_with_inner_products_can_fail():
    queries, _, *parts = coded(0)
    right = estimate(queries, *parts, LEVELS)
    for wrong in (-right, right.flip(0), right * (1 + 1e-4), right.flip(3)):
        with pytest.raises(AssertionError):
            assert_close_to_inner_products(queries, represented(*parts), wrong)


def test_the_comparison_notices_weights_of_other_blocks():
    queries, _, signs, magnitudes, weights = coded(0, dim=80, block=16)
    wants = represented(signs, magnitudes, weights)
    for wrong in (weights.flip(-1), weights[..., :1], weights.repeat(1, 1, 1, 2)):
        got = estimate(queries, signs, magnitudes, wrong, LEVELS)
        with pytest.raises(AssertionError):
            assert_close_to_inner_products(queries, wants, got)
