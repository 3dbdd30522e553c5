"""The codes' reference: bits, levels, weights on either scale, and what estimates make of them.

Longer than most files: each part is checked with what another one gives.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvindex.ops import codes
from kvindex.ops.transform import normalize
from tests.support import literal

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
    coverage = np.bincount(cell, density, minlength=len(levels))
    mean = np.bincount(cell, density * u, minlength=len(levels)) / coverage
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


# blocks of more than a subspace


def assert_as_the_spec_says(rotated, norms, got, levels, block):
    """Signs and planes byte by byte, one weight per block, all by the literal reading."""
    values = [float(level) for level in levels]
    count, dim = rotated.shape
    planes = len(levels).bit_length() - 1
    assert got["signs"].shape == (count, dim // 8)
    assert got["magnitudes"].shape == (count, planes, dim // 8)
    assert got["weights"].shape == (count, dim // block)
    for i, key in enumerate(rotated.tolist()):
        blocks = [key[start : start + block] for start in range(0, dim, block)]
        want = [literal.encode_block(part, float(norms[i]), values) for part in blocks]
        assert got["weights"][i].tolist() == pytest.approx([w for _, w in want], rel=1e-5)
        index = [i for indices, _ in want for i in indices]
        assert got["signs"][i].tolist() == [literal.sign_byte(part) for part in literal.parts(key)]
        for p in range(planes):
            flags = [1.0 if i >> p & 1 else -1.0 for i in index]
            bytes_of = [literal.sign_byte(part) for part in literal.parts(flags)]
            assert got["magnitudes"][i, p].tolist() == bytes_of


@settings(max_examples=10)
@given(seeds, bits)
@pytest.mark.parametrize(
    ("dim", "block"), [(24, 8), (24, 24), (80, 16), (80, 40), (80, 80), (128, 128)]
)
def test_a_block_shares_a_weight_and_takes_the_nearest_levels(dim, block, seed, count):
    levels = codes.levels(block, count)
    rotated, norms = directions(seed, 3, dim), torch.tensor([0.5, 1.0, 3.0])
    got = codes.encode(rotated, norms, levels, block=block)
    assert_as_the_spec_says(rotated, norms, got, levels, block)


@given(seeds)
def test_a_block_is_a_subspace_unless_told(seed):
    rotated, norms, want = encoded(seed)
    got = codes.encode(rotated, norms, LEVELS, block=codes.SUBSPACE)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("broken", ["block", "levels", "norms", "planes"])
def test_the_comparison_of_blocks_can_fail(broken):
    levels = codes.levels(80, 3)
    rotated, norms = directions(1, 3, 80), torch.ones(3)
    if broken == "block":
        got = codes.encode(rotated, norms, levels, block=16)
        got["weights"] = got["weights"][:, :1]
    elif broken == "levels":
        got = codes.encode(rotated, norms, codes.levels(8, 3), block=80)
    else:
        got = codes.encode(rotated, norms * (1 + 1e-4 * (broken == "norms")), levels, block=80)
    if broken == "planes":
        got["magnitudes"] = got["magnitudes"].flip(1)
    with pytest.raises(AssertionError):
        assert_as_the_spec_says(rotated, norms, got, levels, 80)


@given(seeds, bits)
@pytest.mark.parametrize("dim", [24, 80])
def test_one_weight_for_a_key_makes_the_estimate_exact_along_it(dim, seed, count):
    levels = codes.levels(dim, count)
    rotated, norms = directions(seed, 6, dim), torch.linspace(0.5, 3, 6)
    got = codes.encode(rotated, norms, levels, block=dim)
    v = codes.decode(got["signs"], got["magnitudes"], levels)
    along = got["weights"][:, 0] * (v * rotated).sum(-1)
    torch.testing.assert_close(along, norms * rotated.square().sum(-1))


@given(seeds, st.integers(-30, 30))
def test_a_key_with_one_weight_may_be_scaled_by_a_power_of_two(seed, power):
    vectors = torch.randn(6, 24, generator=torch.Generator().manual_seed(seed))
    levels = codes.levels(24, 3)
    want = codes.encode(*normalize(vectors), levels, block=24)
    got = codes.encode(*normalize(vectors * 2.0**power), levels, block=24)
    assert torch.equal(got["signs"], want["signs"])
    assert torch.equal(got["magnitudes"], want["magnitudes"])
    assert torch.equal(got["weights"], want["weights"] * 2.0**power)


def test_zero_key_and_zero_subspace_with_one_weight_for_a_key():
    rotated = directions(0, 2, 24)
    rotated[0] = 0
    rotated[1, 8:16] = 0
    got = codes.encode(rotated, torch.tensor([0.0, 1.0]), codes.levels(24, 3), block=24)
    assert got["weights"][0].tolist() == [0]
    assert float(got["weights"][1]) > 0
    assert got["signs"][0].tolist() == [255] * 3
    assert int(got["signs"][1, 1]) == 255
    assert not got["magnitudes"][0].any()
    assert not got["magnitudes"][1, :, 1].any()


# weights on a scale of equal ratios

log_bits = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16])
octaves = st.floats(-15, 4, allow_nan=False)
ULP = 2.0**-23


def half_step(bits):
    """The largest ratio between a weight on the scale and the nearest point of the scale."""
    return 2 ** (codes.OCTAVES / 2 / 2**bits)


def lowest(bits):
    """Octaves from the reference to half a step below the lowest code, 1."""
    return -codes.OCTAVES * (2**bits - 1.5) / 2**bits


def on_scale(powers, reference, bits):
    """Weights float32 `[1, 1, n, 1]` at these octaves, their codes and what those stand for."""
    weights = (torch.tensor(powers).double().exp2() * reference).float()[None, None, :, None]
    scale = torch.full((1, 1, 1, 1), float(reference))
    got = codes.log_codes(weights, scale, bits)
    return weights, got, codes.log_weights(got, scale, bits)


def assert_log_scale(powers, reference, bits):
    weights, got, back = on_scale(powers, reference, bits)
    assert (got.dtype, back.dtype) == (torch.int32, torch.float32)
    for weight, code, value in zip(
        weights.flatten().tolist(), got.flatten().tolist(), back.flatten().tolist(), strict=True
    ):
        assert code == literal.log_code(weight, reference, bits)
        assert value == pytest.approx(literal.log_weight(code, reference, bits), rel=4 * ULP)
        octave = math.log2(weight / reference)
        if lowest(bits) <= octave <= codes.OCTAVES / 2 / 2**bits:  # half a step above the reference
            ratio = value / weight
            assert 1 / ratio <= half_step(bits) * (1 + 8 * ULP)
            assert ratio <= half_step(bits) * (1 + 8 * ULP)
        else:
            assert code == (1 if octave < 0 else 2**bits - 1)


@given(
    st.lists(octaves, min_size=1, max_size=20), st.sampled_from([2.0**-9, 1.0, 2.0**20]), log_bits
)
@example([-1.0, -3.0], 1.0, 2)  # halfway between codes: the even one
def test_a_log_weight_is_off_by_at_most_half_a_step_and_clipped_at_the_ends(
    powers, reference, bits
):
    assert_log_scale(powers, reference, bits)


@pytest.mark.parametrize("broken", ["floor", "shift", "octaves"])
def test_the_comparison_of_log_weights_can_fail(broken, monkeypatch):
    right = codes.log_codes

    def wrong(weights, reference, bits):
        if broken == "floor":  # a whole step off at worst
            return right(weights * 2 ** (-6 / 2**bits), reference, bits)
        if broken == "shift":
            return right(weights, reference, bits) - 1
        return right(weights.sqrt(), reference.sqrt(), bits)

    monkeypatch.setattr(codes, "log_codes", wrong)
    with pytest.raises(AssertionError):
        assert_log_scale(torch.linspace(-7.5, 0, 50).tolist(), 1.0, 8)


@given(st.lists(octaves, min_size=2, max_size=20), log_bits)
def test_log_codes_are_monotone_and_so_is_what_they_stand_for(powers, bits):
    _, got, back = on_scale(sorted(powers), 1.0, bits)
    assert (got.flatten().diff() >= 0).all()
    assert (back.flatten().diff() >= 0).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_only_the_weight_0_has_the_code_0(bits):
    weights = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-9, 1.0, 3e38])[None, None, :, None]
    one = torch.ones(1, 1, 1, 1)
    got = codes.log_codes(weights, one, bits)
    assert (got == 0).flatten().tolist() == [True] + [False] * 5
    assert got.flatten()[-1] == got.flatten()[-2] == 2**bits - 1
    back = codes.log_weights(got, one, bits).flatten()
    assert back[0] == 0
    assert back[-1] == back[-2] == 1
    assert (back[1:] > 0).all()


@pytest.mark.parametrize("bits", [1, 8, 16])
def test_a_reference_that_was_never_learned_gives_zeros_and_no_nan(bits):
    """A row of the batch that has seen padding and zero keys only: all weights 0."""
    none = torch.zeros(1, 1, 3, 1)
    got = codes.log_codes(none, none[:, :, :1], bits)
    assert not got.any()
    assert not codes.log_weights(got, none[:, :, :1], bits).any()


@given(seeds, st.integers(-60, 60), log_bits)
def test_log_weights_scale_exactly_with_a_power_of_two(seed, power, bits):
    weights = torch.rand(2, 2, 5, 3, generator=torch.Generator().manual_seed(seed)) + 2**-7
    reference = torch.tensor([1.0, 2, 4, 0.5]).reshape(2, 2, 1, 1)
    want = codes.log_codes(weights, reference, bits)
    got = codes.log_codes(weights * 2.0**power, reference * 2.0**power, bits)
    assert torch.equal(got, want)
    back = codes.log_weights(got, reference * 2.0**power, bits)
    assert torch.equal(back, codes.log_weights(want, reference, bits) * 2.0**power)


def assert_factors_follow_weights(factors, bits):
    """Nearest integers to `FACTOR · weight / reference`."""
    every = torch.arange(min(2**bits, 256))
    weights = codes.log_weights(every, torch.ones(1), bits).double() * codes.FACTOR
    # float32 weights are off by a few units in the last place
    assert ((factors[: len(every)] - weights).abs() <= 0.5 + 4 * ULP * weights).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_factors_are_in_proportion_to_the_weights(bits):
    factors = codes.log_factors(bits)
    assert (factors.shape, factors.dtype) == ((256,), torch.int32)
    assert int(factors.max()) == codes.FACTOR
    assert int(factors[0]) == 0
    assert (factors[1:] > 0).all()
    assert_factors_follow_weights(factors, bits)


def test_the_comparison_of_factors_can_fail():
    factors = codes.log_factors(8)
    for wrong in (factors - 1, factors.roll(1), factors // 2, codes.log_factors(7)):
        with pytest.raises(AssertionError):
            assert_factors_follow_weights(wrong, 8)


def test_the_factor_of_an_upper_byte_is_within_half_an_upper_step():
    """Of 16 bits: 256 codes share an upper byte, and the factor is that of their middle."""
    factors = codes.log_factors(16)
    every = torch.arange(256, 2**16)
    weights = codes.log_weights(every, torch.ones(1), 16).double() * codes.FACTOR
    step = 2 ** (256 * codes.OCTAVES / 2**16)  # the ratio between two upper bytes
    off = (factors[every >> 8] - weights).abs()
    assert (off <= weights * (step**0.5 - 1 + 4 * ULP) + 0.5).all()
    # not within a quarter: the bound is no wider than it must be
    assert not (off <= weights * (step**0.25 - 1) + 0.5).all()
    # what lies below the lowest upper byte, twelve octaves down, does not vote
    assert int(factors[0]) == 0
    assert float(codes.log_weights(torch.tensor(255), torch.ones(1), 16)) < 2**-11.9
