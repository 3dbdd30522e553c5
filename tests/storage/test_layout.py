"""Layouts of states: the letters of a tensor's axes determine its allowed shapes."""

import pytest
import torch

from kvindex.storage.layout import StateSizes, TensorSpec, check_layout

LAYOUT = {"some": TensorSpec("B G ..."), "all": TensorSpec("B U<=4")}


def check(some, every):
    check_layout(LAYOUT, {"some": torch.zeros(some), "all": torch.zeros(every)}, {"B": 2})


@pytest.mark.parametrize("some", [(2, 3, 5), (2, 3, 5, 7), (2, 3, 0)])
def test_axes_after_the_named_ones_may_be_any(some):
    check(some, (2, 4))


@pytest.mark.parametrize(
    ("some", "every", "name"),
    [((1, 3, 5), (2, 4), "some"), ((2,), (2, 4), "some"), ((2, 3, 5), (2, 5), "all")],
)
def test_other_sizes_and_too_few_axes_are_refused(some, every, name):
    with pytest.raises(ValueError, match=rf"^state\['{name}'\]: got "):
        check(some, every)


def test_units_are_as_many_as_the_longest_sequence_fills():
    assert StateSizes(2, 9, torch.tensor([9, 5]), {}).units(4) == "3"
    assert StateSizes(2, 9, None, {}).units(4) == "U<=3"
    assert StateSizes(0, 9, torch.tensor([]), {}).units(4) == "0"
