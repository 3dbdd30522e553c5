"""Checks of numbers: one pass finds the same as a check of each number."""

import math

import pytest
import torch

from kvindex.core import check

BAD = [math.nan, math.inf, -math.inf, 1.01 * check.LARGEST, -1.01 * check.LARGEST]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_a_number_out_of_range_is_found_wherever_it_is(dtype, bad, count):
    numbers = torch.linspace(-3, 3, count).to(dtype)
    assert check.in_range(numbers)
    for place in {0, count // 3, count - 1}:
        spoiled = numbers.clone()
        spoiled[place] = bad
        assert not check.in_range(spoiled)
        with pytest.raises(ValueError, match=r"keys: got .*, allowed is a finite number"):
            check.finite("keys", spoiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_number_and_no_number_are_in_range(dtype):
    most = min(check.LARGEST, torch.finfo(dtype).max)
    assert check.in_range(torch.tensor([-most, most], dtype=dtype))
    assert check.in_range(torch.zeros(2, 0, dtype=dtype))
