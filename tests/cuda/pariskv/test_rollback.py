"""Codes and rows in blocks, and what kernels read at fixed addresses, are rolled back and
copied.
"""

import copy

import pytest
import torch

from kvindex.layer import AttentionLayer
from kvindex.testing import fail_at, operations_of
from kvindex.testing.contract.faults import (
    check_memory_that_runs_out_anywhere_changes_nothing,
    points,
)
from tests.cuda.devices import DEVICES, on, slow_on_cpu
from tests.support.helpers import Case, assert_same_snapshot, left_padding, part, snapshot
from tests.support.sequences import SIZES, Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=2)


@pytest.fixture(params=DEVICES)
def device(request):
    with on(request.param):
        yield request.param


def placed(device, case=CASE):
    return Case(**{**vars(case), "device": device})


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fast", "paper"])
def test_memory_that_runs_out_anywhere_changes_nothing(preset):
    case = placed("cuda")

    def make(**more):
        return case.index("pariskv", preset=preset, backend="cuda", store="host", **more)

    check_memory_that_runs_out_anywhere_changes_nothing(make, case, 30)


def test_an_index_goes_back_past_what_its_blocks_have_got_since(device):
    case = placed(device)
    index = case.index("pariskv", backend="cuda", store="host")
    tokens = case.tokens(900)
    index.append(*part(tokens, 0, 300), valid=left_padding([0, 70], 300, device))
    want, before = snapshot(index, case.queries()), index.checkpoint()
    index.append(*part(tokens, 300, 900))
    longer = snapshot(index, case.queries())
    index.rollback(before)
    assert_same_snapshot(snapshot(index, case.queries()), want)
    index.append(*part(tokens, 300, 900))
    assert_same_snapshot(snapshot(index, case.queries()), longer)
    index.reorder(torch.tensor([1, 1], device=device))
    index.reset()
    index.rollback(before)
    assert_same_snapshot(snapshot(index, case.queries()), want)


def test_a_copy_has_blocks_of_its_own(device):
    case = placed(device)
    index = case.index("pariskv", backend="cuda", store="host")
    tokens, others = case.tokens(700), case.tokens(700, seed=1)
    index.append(*part(tokens, 0, 300))
    twin = copy.deepcopy(index)
    assert_same_snapshot(snapshot(twin, case.queries()), snapshot(index, case.queries()))
    twin.append(*part(others, 300, 700))
    index.append(*part(tokens, 300, 700))
    alone = case.index("pariskv", backend="cuda", store="host")
    alone.append(*part(tokens, 0, 300))
    alone.append(*part(tokens, 300, 700))
    assert_same_snapshot(snapshot(index, case.queries()), snapshot(alone, case.queries()))
    index.reset()
    assert len(twin) == 700
    twin.search(case.queries(), k=5)


@slow_on_cpu
def test_a_step_that_fails_leaves_the_layer_as_it_was(device):
    """Return what kernels read of the window and the index, also in a captured step."""
    case, here = placed(device), Sequence.of(CASE, 60)
    steps, most = (1, 2) if device == "cpu" else (4, 30)
    at = 30 + steps
    sequence = Sequence.of(case, 60)

    def begun():
        index = case.index("pariskv", backend="cuda", store="host")
        layer = AttentionLayer(index, k=1000, **SIZES)
        sequence.feed(layer, 0, 30)
        for token in range(30, 30 + steps):
            sequence.feed(layer, token, token + 1)
        return layer

    layer, want = begun(), here.dense()
    count = operations_of(lambda: sequence.feed(layer, at, at + 1))
    for point in points(count, most):
        layer = begun()
        if fail_at(lambda layer=layer: sequence.feed(layer, at, at + 1), point):
            for token in range(at, at + 2 * steps):
                got = sequence.feed(layer, token, token + 1)
                here.assert_equals(got.cpu(), want, token)
