"""The error of quantization in groups is at most half a step, for any size, range and offset."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.storage.quantize import BITS, GROUP, code_bytes, dequantize, groups, quantize

seeds = st.integers(0, 2**20)


def bound(numbers, bits):
    """Return the largest error of a number, float64 `[..., n]`: half a step of a rounded range."""
    number, size = groups(numbers.shape[-1])
    spare = numbers[..., -1:].expand(*numbers.shape[:-1], number * size - numbers.shape[-1])
    grouped = torch.cat([numbers, spare], -1).double().unflatten(-1, (number, size))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    span = high - low + low.abs() * 2**-7  # low is rounded down to bfloat16
    step = span / (2**bits - 1) * (1 + 2**-7) + 2**-133  # the step is rounded up
    off = step / 2 + 2**-22 * (low.abs() + high.abs())  # float32
    return off.expand(grouped.shape).flatten(-2)[..., : numbers.shape[-1]]


@given(
    seed=seeds,
    count=st.sampled_from([1, 3, 8, 32, 33, 80, 128]),
    bits=st.sampled_from(BITS),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    offset=st.sampled_from([0.0, 1.0, -100.0]),
)
def test_a_number_is_off_by_half_a_step(seed, count, bits, scale, offset):
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(3, count, generator=generator) + offset) * scale
    codes, scales = quantize(numbers, bits)
    assert (codes.dtype, codes.shape) == (torch.uint8, (3, code_bytes(count, bits)))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (3, groups(count)[0], 2))
    back = dequantize(codes, scales, count, bits)
    assert back.shape == numbers.shape
    assert ((back.double() - numbers.double()).abs() <= bound(numbers, bits)).all()


def test_the_bound_can_fail():
    numbers = torch.linspace(0, 15, 16)
    assert ((numbers - (numbers + 0.6)).abs() > bound(numbers, 4)).all()


def test_codes_lie_side_by_side():
    numbers = torch.tensor([0.0, 1, 2, 15, 7])
    codes, scales = quantize(numbers, 4)
    assert codes.tolist() == [0x10, 0xF2, 0x07]
    assert scales.tolist() == [[0.0, 1.0]]
    assert quantize(torch.tensor([3.0, 0, 1, 2]), 2)[0].tolist() == [0b10010011]


def test_groups_are_of_equal_size():
    assert [groups(n) for n in (1, GROUP, 40, 80)] == [(1, 1), (1, 32), (2, 20), (3, 27)]


@pytest.mark.parametrize("number", [0.0, -0.0, 2.5, -7.0])
def test_equal_numbers_have_no_step(number):
    numbers = torch.full((5,), number)
    codes, scales = quantize(numbers, 2)
    assert not codes.any()
    assert torch.equal(dequantize(codes, scales, 5, 2), numbers)
    assert number or not scales.view(torch.uint8).any()


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_floats_come_back_finite(bits):
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([largest, -largest, 0.0, largest / 2])
    back = dequantize(*quantize(numbers, bits), 4, bits)
    assert back.isfinite().all()
    assert (back[0] - largest).abs() <= largest * 2**-6
