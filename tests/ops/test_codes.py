"""Codes: bits, levels and weights on both scales, and estimates from them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvindex.ops import codes
from kvindex.ops.transform import normalize
from tests.support import literal
from tests.support.helpers import sampled

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


@pytest.mark.parametrize(("bits", "subspace"), sampled([0, 1, 2, 3, 4, 5], [2, 3, 4, 8, 16, 64]))
def test_each_level_is_the_mean_of_its_cell(subspace, bits):
    """Check Lloyd's condition by integrating the density of |u_j| with the midpoint rule in θ."""
    levels = np.array(codes.lloyd_max(subspace, bits))
    assert (np.diff(levels) > 0).all()
    theta = (np.arange(2_000_000) + 0.5) * (np.pi / 2 / 2_000_000)  # u = sin θ
    u, density = np.sin(theta), np.cos(theta) ** (subspace - 2)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, u)
    coverage = np.bincount(cell, density, minlength=len(levels))
    mean = np.bincount(cell, density * u, minlength=len(levels)) / coverage
    # the ends of a cell have an error of half a grid step, and so has its mean at most
    np.testing.assert_allclose(levels, mean, atol=1e-5)


@pytest.mark.parametrize("subspace", [2, 3, 8, 30])
def test_no_bits_give_the_mean(subspace):
    mean = math.gamma(subspace / 2) / math.gamma((subspace + 1) / 2) / math.sqrt(math.pi)
    assert codes.lloyd_max(subspace, 0) == pytest.approx((mean,))


@pytest.mark.parametrize(("subspace", "bits"), [(1, 3), (8, -1)])
def test_levels_without_a_law_are_refused(subspace, bits):
    with pytest.raises(ValueError, match=f"subspace: got {subspace}, .*bits: got {bits}"):
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
    """⟨w_b v_b, k̃_b⟩ = ‖k‖ r_b², so the estimate of ⟨k, k⟩ is exact."""
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
    # either, because the norm is rounded
    assert int(codes.unpack(got["magnitudes"][0, 0, 0])[0]) in (0, 1)
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
    """Compare signs, planes and one weight per block with the literal implementation."""
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
def test_a_block_has_one_weight_and_the_nearest_levels(dim, block, seed, count):
    levels = codes.levels(block, count)
    rotated, norms = directions(seed, 3, dim), torch.tensor([0.5, 1.0, 3.0])
    got = codes.encode(rotated, norms, levels, block=block)
    assert_as_the_spec_says(rotated, norms, got, levels, block)


@given(seeds)
def test_a_block_is_a_subspace_by_default(seed):
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


# weights on a logarithmic scale

log_bits = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16])
octaves = st.floats(-20, 20, allow_nan=False)
ULP = 2.0**-23


def half_step(bits):
    """The largest ratio between a weight on the scale and the nearest point of the scale."""
    return 2 ** (codes.OCTAVES / 2 / 2**bits)


def on_scale(powers, bits):
    """Return weights float32 `[n]` at these octaves, their codes, and the decoded weights."""
    weights = torch.tensor(powers).double().exp2().float()
    got = codes.log_codes(weights, bits)
    return weights, got, codes.log_weights(got, bits)


def assert_log_scale(powers, bits):
    weights, got, back = on_scale(powers, bits)
    assert (got.dtype, back.dtype) == (torch.int32, torch.float32)
    ends = [literal.log_weight(code, bits) for code in (1, 2**bits - 1)]
    for weight, code, value in zip(weights.tolist(), got.tolist(), back.tolist(), strict=True):
        assert code == literal.log_code(weight, bits)
        assert value == pytest.approx(literal.log_weight(code, bits), rel=4 * ULP)
        if ends[0] / half_step(bits) <= weight <= ends[1] * half_step(bits):
            ratio = value / weight
            assert max(ratio, 1 / ratio) <= half_step(bits) * (1 + 8 * ULP)
        else:
            assert code == (1 if weight < 1 else 2**bits - 1)


@given(st.lists(octaves, min_size=1, max_size=20), log_bits)
@example([-4.0, -12.0], 2)  # halfway between codes, rounded to the even code
def test_a_log_weight_is_off_by_at_most_half_a_step_and_clipped_at_the_ends(powers, bits):
    assert_log_scale(powers, bits)


@pytest.mark.parametrize("broken", ["floor", "shift", "octaves"])
def test_the_comparison_of_log_weights_can_fail(broken, monkeypatch):
    right = codes.log_codes

    def wrong(weights, bits):
        if broken == "floor":  # has an error of up to a whole step
            return right(weights * 2 ** (-16 / 2**bits), bits)
        if broken == "shift":
            return right(weights, bits) - 1
        return right(weights.sqrt(), bits)

    monkeypatch.setattr(codes, "log_codes", wrong)
    with pytest.raises(AssertionError):
        assert_log_scale(torch.linspace(-7.5, 0, 50).tolist(), 8)


@given(st.lists(octaves, min_size=2, max_size=20), log_bits)
def test_log_codes_are_monotone_and_so_is_what_they_represent(powers, bits):
    _, got, back = on_scale(sorted(powers), bits)
    assert (got.diff() >= 0).all()
    assert (back.diff() >= 0).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_only_the_weight_0_has_the_code_0(bits):
    got = codes.log_codes(torch.tensor([0.0, 1e-45, 1e-38, 2.0**-9, 1.0, 3e38]), bits)
    assert (got == 0).tolist() == [True] + [False] * 5
    assert int(got[-1]) == 2**bits - 1
    assert int(got[-2]) == 2 ** (bits - 1)
    back = codes.log_weights(got, bits)
    assert back[0] == 0
    assert back[-2] == 1
    assert (back[1:] > 0).all()


@given(seeds, st.integers(-10, 10), st.sampled_from([8, 16]))
def test_log_weights_scale_exactly_with_a_power_of_two(seed, power, bits):
    weights = torch.rand(60, generator=torch.Generator().manual_seed(seed)) + 2**-5
    want, got = codes.log_codes(weights, bits), codes.log_codes(weights * 2.0**power, bits)
    assert torch.equal(got, want + power * 2**bits // codes.OCTAVES)
    back = codes.log_weights(got, bits)
    assert torch.equal(back, codes.log_weights(want, bits) * 2.0**power)


@given(st.lists(octaves, min_size=1, max_size=20), st.sampled_from([8, 16]))
def test_the_weight_scale_is_the_least_octave_above_all_weights(powers, bits):
    _, got, back = on_scale(powers, bits)
    scale = codes.weight_scale((got >> bits - 8).amax())
    top = float(back.amax())
    assert float(scale.log2()) == int(scale.log2())
    assert top < float(scale) <= 2 * top * 2 ** (codes.OCTAVES / 256)


def assert_factors_follow_weights(factors, weights, scale):
    """Check that factors are `FACTOR · weight / scale` within half a step of an upper byte."""
    step = 2 ** (codes.OCTAVES / 256)
    true = weights.double() / scale * codes.FACTOR
    assert ((factors - true).abs() <= true * (step**0.5 - 1 + 8 * ULP) + 0.5).all()


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=20), st.sampled_from([8, 16]))
def test_factors_are_in_proportion_to_the_weights(powers, bits):
    _, got, back = on_scale(powers, bits)
    upper = (got >> bits - 8).to(torch.uint8).view(1, 1, -1, 1)
    scale = codes.weight_scale(upper.amax((2, 3)))
    table = codes.log_factors(bits)
    assert (table.shape, table.dtype) == ((256,), torch.int32)
    assert int(table.max()) <= codes.FACTOR
    found = codes.factors(upper, scale, table)
    assert_factors_follow_weights(found.flatten(), back, float(scale))


def test_the_comparison_of_factors_can_fail():
    _, got, back = on_scale([1.0, 3.2, -2.6], 16)
    upper = (got >> 8).to(torch.uint8).view(1, 1, -1, 1)
    scale, table = codes.weight_scale(upper.amax((2, 3))), codes.log_factors(16)
    for wrong in (table.roll(1), table // 2, codes.log_factors(8).roll(-1)):
        found = codes.factors(upper, scale, wrong).flatten()
        with pytest.raises(AssertionError):
            assert_factors_follow_weights(found, back, float(scale))


def test_factors_end_fifteen_octaves_below_the_scale():
    """Even for the smallest byte, the index is within the table."""
    for largest in (0, 1, 7, 8, 200, 255):
        bytes_ = torch.arange(largest + 1).to(torch.uint8).view(1, 1, -1, 1)
        scale = codes.weight_scale(torch.tensor([[largest]]))
        found = codes.factors(bytes_, scale, codes.log_factors(16)).flatten()
        assert (found.diff() >= 0).all()
        if largest == 255:
            assert not found[: 255 - 16 * 8].any()


# centers of blocks


def block_means(keys, valid, every):
    """Return the mean of each block's valid keys, `[B, G, S, D]`."""
    parts = zip(keys.split(every, 2), valid.split(every, 1), strict=True)
    return torch.stack(
        [(k * v[:, None, :, None]).sum(2) / v.sum(1).clamp_min(1)[:, None, None] for k, v in parts],
        dim=2,
    )


@pytest.mark.parametrize("every", [1, 7, 20, 64])
def test_a_center_is_the_mean_of_its_blocks_valid_keys(every):
    valid = torch.arange(50) >= torch.tensor([0, 25, 50])[:, None]
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 50, 8, generator=generator) * valid[:, None, :, None]
    got = codes.centers(keys, valid, every)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), block_means(keys, valid, every), rtol=5e-3, atol=5e-3)
    assert torch.equal(codes.centers(keys[:1], None, every), got[:1])
    assert not got[2].any()


def test_centers_of_huge_keys_are_finite():
    keys = torch.full((1, 1, 20, 8), torch.finfo(torch.float32).max)
    assert codes.centers(keys, None, 8).isfinite().all()
