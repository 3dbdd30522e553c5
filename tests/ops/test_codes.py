import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops import codes
from kvindex.ops.transform import normalize
from tests import literal

SPEC = (0.0425, 0.1280, 0.2152, 0.3053, 0.4003, 0.5030, 0.6193, 0.7648)
LEVELS = codes.levels(8, 3)
seeds = st.integers(0, 2**31)
bits = st.integers(0, 5)


def directions(seed, *shape):
    vectors = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return normalize(vectors)[0]


def encoded(seed, dim=24, count=6, levels=LEVELS):
    rotated = directions(seed, count, dim)
    norms = torch.linspace(0.5, 3, count)
    return rotated, norms, codes.encode(rotated, norms, levels)


def test_levels_of_the_spec():
    assert [round(level, 4) for level in codes.lloyd_max(8, 3)] == list(SPEC)


@pytest.mark.parametrize("subspace", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 5])
def test_each_level_is_the_mean_of_its_cell(subspace, bits):
    """Lloyd's condition, with the density of |u_j| summed on a fine grid (midpoint rule in θ)."""
    levels = np.array(codes.lloyd_max(subspace, bits))
    assert (np.diff(levels) > 0).all()
    theta = (np.arange(2_000_000) + 0.5) * (np.pi / 2 / 2_000_000)  # u = sin θ
    u, density = np.sin(theta), np.cos(theta) ** (subspace - 2)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, u)
    mass = np.bincount(cell, density, minlength=len(levels))
    mean = np.bincount(cell, density * u, minlength=len(levels)) / mass
    # a cell's ends are off by half a step of the grid, which moves its mean by no more than that
    np.testing.assert_allclose(levels, mean, atol=1e-5)


@pytest.mark.parametrize("subspace", [2, 3, 8, 30])
def test_no_bits_give_the_mean(subspace):
    mean = math.gamma(subspace / 2) / math.gamma((subspace + 1) / 2) / math.sqrt(math.pi)
    assert codes.lloyd_max(subspace, 0) == pytest.approx((mean,))


@pytest.mark.parametrize(("subspace", "bits"), [(1, 3), (8, -1)])
def test_levels_without_a_law_are_refused(subspace, bits):
    with pytest.raises(ValueError, match=f"{subspace}, {bits}"):
        codes.lloyd_max(subspace, bits)


@given(st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=9))
def test_pack_and_unpack_are_inverse_least_significant_bit_first(rows):
    packed = codes.pack(torch.tensor(rows))
    assert packed.tolist() == [sum(bit << j for j, bit in enumerate(row)) for row in rows]
    assert codes.unpack(packed).bool().tolist() == rows


def test_centroids_are_all_sign_patterns_as_unit_vectors():
    table = codes.centroids()
    torch.testing.assert_close(table.norm(dim=-1), torch.ones(256))
    assert torch.equal(table.sign(), torch.tensor(literal.CENTROIDS))


@given(seeds)
def test_id_is_the_nearest_of_all_centroids(seed):
    rotated, _, got = encoded(seed)
    parts = rotated.reshape(6, 3, 8)
    nearest = (parts.double() @ codes.centroids().double().T).argmax(-1)  # (6)
    assert torch.equal(got["signs"].long(), nearest)


@given(seeds, bits)
def test_levels_are_the_nearest_and_weights_follow_equations_7_and_9(seed, count):
    levels = codes.levels(8, count)
    rotated, norms, got = encoded(seed, levels=levels)
    values = [float(level) for level in levels]
    assert got["magnitudes"].shape == (6, count, 3)
    for i in range(6):
        for b, part in enumerate(literal.parts(rotated[i].tolist())):
            sign, index, weight = literal.encode_part(part, float(norms[i]), values)
            assert int(got["signs"][i, b]) == sign == literal.centroid_id(part)
            assert float(got["weights"][i, b]) == pytest.approx(weight, rel=1e-5)
            planes = [codes.unpack(got["magnitudes"][i, p, b]).tolist() for p in range(count)]
            assert [sum(plane[j] << p for p, plane in enumerate(planes)) for j in range(8)] == index


@given(seeds, bits)
def test_decode_gives_the_signed_levels_and_encodes_to_the_same_codes(seed, count):
    levels = codes.levels(8, count)
    rotated, _, got = encoded(seed, levels=levels)
    v = codes.decode(got["signs"], got["magnitudes"], levels)
    assert torch.equal(v >= 0, rotated >= 0)
    assert torch.isin(v.abs(), levels).all()
    u = rotated.reshape(6, 3, 8)
    u = (u / u.norm(dim=-1, keepdim=True)).abs().flatten(-2)
    nearest = (u[..., None] - levels).abs().amin(-1)
    torch.testing.assert_close((u - v.abs()).abs(), nearest, rtol=0, atol=1e-6)


@given(seeds)
def test_weight_makes_the_estimate_exact_along_the_key(seed):
    """⟨w_b v_b, k̃_b⟩ = ‖k‖ r_b²: so the estimate of ⟨k, k⟩ is exact."""
    rotated, norms, got = encoded(seed)
    v = codes.decode(got["signs"], got["magnitudes"], LEVELS).reshape(6, 3, 8)
    parts = rotated.reshape(6, 3, 8)
    product = (got["weights"][..., None] * v * parts).sum(-1)
    torch.testing.assert_close(product, norms[:, None] * parts.square().sum(-1))


@given(seeds, st.integers(-30, 30))
def test_codes_do_not_change_when_keys_are_scaled_by_a_power_of_two(seed, power):
    vectors = torch.randn(6, 24, generator=torch.Generator().manual_seed(seed))
    want = codes.encode(*normalize(vectors), LEVELS)
    got = codes.encode(*normalize(vectors * 2.0**power), LEVELS)
    assert torch.equal(got["signs"], want["signs"])
    assert torch.equal(got["magnitudes"], want["magnitudes"])
    assert torch.equal(got["weights"], want["weights"] * 2.0**power)


def test_zero_key_and_zero_subspace_have_weight_0_and_bits_1():
    rotated = directions(0, 2, 24)
    rotated[0] = 0
    rotated[1, 8:16] = 0
    got = codes.encode(rotated, torch.tensor([0.0, 1.0]), LEVELS)
    assert (got["weights"][0] == 0).all()
    assert got["weights"][1, 1] == 0
    assert (got["weights"][1, ::2] > 0).all()
    assert (got["signs"][0] == 255).all()
    assert got["signs"][1, 1] == 255
    assert (got["magnitudes"][0] == 0).all()


def test_a_negative_zero_has_bit_1():
    rotated = torch.tensor([[-0.0, 1.0, -1.0, 0.0, -1.0, 1.0, -1.0, 1.0]])
    assert codes.encode(rotated, torch.ones(1), LEVELS)["signs"].item() == 0b10101011


def test_midway_between_levels_is_the_lower_level():
    edge = float((LEVELS[3] + LEVELS[4]) / 2)
    assert int(torch.bucketize(torch.tensor(edge), (LEVELS[1:] + LEVELS[:-1]) / 2)) == 3
    part = torch.zeros(1, 8)
    part[0, 0], part[0, 1] = edge, math.sqrt(1 - edge**2)
    got = codes.encode(part, torch.ones(1), torch.tensor([0.0, 2 * edge]))
    assert int(codes.unpack(got["magnitudes"][0, 0, 0])[0]) in (0, 1)  # the norm rounds
    exact = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]])
    got = codes.encode(exact, torch.ones(1), torch.tensor([0.5, 1.5]))
    assert int(got["magnitudes"][0, 0, 0]) == 0


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-20])
def test_a_tiny_subspace_gives_finite_weights(size):
    rotated = torch.zeros(1, 16)
    rotated[0, :8], rotated[0, 8] = size, 1.0
    got = codes.encode(rotated, torch.ones(1), LEVELS)
    assert got["weights"].isfinite().all()
    assert (got["weights"] >= 0).all()
