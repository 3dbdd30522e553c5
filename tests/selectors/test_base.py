import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.selectors.base import kept_always, smallest_set
from tests.support.selecting import naive_top


def test_block_0_the_own_block_and_the_one_before_are_kept():
    want = [[1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]
    assert kept_always(2, 5, 3).int().tolist() == want
    assert kept_always(2, 2, 0).int().tolist() == [[1, 0], [1, 1]]


@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.5, 0.9, 0.999]))
def test_the_smallest_set_is_found_by_sorting(seed, mass):
    weights = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed)) ** 4
    got = smallest_set(weights, mass)
    for row, kept in zip(weights, got, strict=True):
        assert sorted(naive_top(row.double(), mass)) == kept.nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("weights", "mass", "kept"),
    [
        ([0.25, 0.25, 0.5, 0.0], 0.5, [2]),
        ([0.25, 0.25, 0.5, 0.0], 0.51, [0, 1, 2]),
        ([0.25, 0.25, 0.25, 0.25], 0.25, [0, 1, 2, 3]),
        ([0.25, 0.25, 0.5, 0.0], 1.0, [0, 1, 2, 3]),
        ([0.0, 0.0, 8.0, 0.0], 0.99, [2]),
        ([0.0, 0.0, 0.0, 0.0], 0.5, [0, 1, 2, 3]),
    ],
)
def test_equal_weights_at_the_threshold_are_kept_together(weights, mass, kept):
    assert smallest_set(torch.tensor(weights), mass).nonzero()[:, 0].tolist() == kept


def test_a_set_of_nothing_is_empty():
    assert smallest_set(torch.zeros(2, 0), 0.5).shape == (2, 0)
