"""Every index stays on the device of its tensors, and returns the same hits as on the CPU."""

from functools import partial

import pytest
import torch

import kvindex
from benchmarks.comparing.field import SPECS
from kvindex.testing.cases import Case
from kvindex.testing.contract.devices import K, check_tensors_stay_on_their_device
from kvindex.testing.elsewhere import PLACE, known
from tests.support.helpers import mostly_slow

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8)
NAMES = [
    spec.replace("{k}", str(K))
    for name in kvindex.names()
    for spec in dict.fromkeys([name, *SPECS.get(name, ())])
]


@pytest.mark.parametrize("name", mostly_slow(NAMES, *kvindex.names()))
def test_an_index_keeps_to_its_device(name):
    check_tensors_stay_on_their_device(partial(CASE.index, name), CASE)


@pytest.fixture
def elsewhere():
    with known():
        yield


def test_devices_that_meet_are_noticed(elsewhere):
    there, here = torch.zeros(3, device=PLACE), torch.ones(3)
    for meeting in (
        lambda: there + here,
        lambda: torch.cat([here, there]),
        lambda: here[there > 0],
    ):
        with pytest.raises(RuntimeError, match="two devices"):
            meeting()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    there[torch.tensor([0, 2])] += 1
    assert (there + here.to(PLACE)[1:2]).tolist() == [2, 1, 2]
