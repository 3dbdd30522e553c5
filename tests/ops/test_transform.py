import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops.transform import LONGEST, normalize, rotate, rotation

DIMS = (8, 16, 24, 40, 64, 80, 96, 104, 112, 128, 192, 256)

dims = st.sampled_from(DIMS)
seeds = st.integers(0, 2**31)


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthogonal_to_float32(dim):
    matrix = rotation(dim, 0).double()
    assert (matrix @ matrix.T - torch.eye(dim)).abs().max() < 4 * 2**-24


@pytest.mark.parametrize("dim", DIMS)
def test_no_entry_exceeds_its_bound_so_one_round_mixes_all(dim):
    matrix = rotation(dim, 1)
    assert matrix.abs().max() <= math.sqrt(2 / dim) * (1 + 1e-6)


@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_at_a_power_of_two_it_is_the_randomized_hadamard_transform(dim):
    matrix = rotation(dim, 2)
    assert torch.equal(matrix.abs(), torch.full((dim, dim), dim**-0.5))
    signs = matrix[0].sign()
    ones = [[bin(i & j).count("1") for j in range(dim)] for i in range(dim)]
    assert torch.equal(matrix.sign(), (-1.0) ** torch.tensor(ones) * signs)


@given(dims, seeds, seeds)
def test_inner_products_and_norms_are_preserved(dim, seed, data):
    matrix = rotation(dim, seed)
    x, y = normal(data, 2, 5, dim)
    got = (rotate(x, matrix).double() * rotate(y, matrix)).sum(-1)
    want = (x.double() * y).sum(-1)
    # the matrix is rounded once and each of D sums has D products: far below D · 2^-24
    bound = dim * 2**-24 * (x.norm(dim=-1) * y.norm(dim=-1))
    assert ((got - want).abs() <= bound).all()


@given(dims, seeds)
def test_the_same_seed_gives_the_same_matrix_whatever_was_generated_before(dim, seed):
    first = rotation(dim, seed)
    torch.randn(3)
    assert torch.equal(first, rotation(dim, seed))


def test_another_seed_gives_other_signs():
    assert not torch.equal(rotation(64, 0), rotation(64, 1))


def test_rotation_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    want = torch.randn(3)
    torch.manual_seed(5)
    rotation(64, 0)
    assert torch.equal(torch.randn(3), want)


@given(seeds, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_normalize_gives_unit_directions_and_norms(seed, dtype):
    vectors = normal(seed, 3, 4, 24).to(dtype)
    directions, norms = normalize(vectors)
    assert directions.dtype == norms.dtype == torch.float32
    torch.testing.assert_close(norms, vectors.float().norm(dim=-1))
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(3, 4))
    torch.testing.assert_close(directions * norms[..., None], vectors.float())


@given(seeds, st.integers(-56, 56))
def test_directions_do_not_change_when_scaled_by_a_power_of_two(seed, power):
    vectors = normal(seed, 5, 16)
    directions, norms = normalize(vectors)
    scaled, scaled_norms = normalize(vectors * 2.0**power)
    assert torch.equal(scaled, directions)
    assert torch.equal(scaled_norms, norms * 2.0**power)


def test_huge_norms_are_bounded_so_that_products_stay_finite():
    direction = torch.full((16,), 0.25)
    directions, norms = normalize(torch.stack([direction * 1e38, direction * 1e30, direction]))
    assert norms.tolist() == [LONGEST, LONGEST, 1.0]
    assert torch.equal(directions, direction.expand(3, 16))
    assert torch.isfinite(norms * norms.max()).all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e30, 3e38])
def test_normalize_of_extreme_vectors_is_finite(size):
    directions, norms = normalize(torch.tensor([[size, -size] * 8]))
    assert directions.isfinite().all()
    want = 0.0 if size == 0 else 1.0
    assert float(directions.norm()) == pytest.approx(want)
    assert not norms.isnan().any()
