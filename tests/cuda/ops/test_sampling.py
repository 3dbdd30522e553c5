"""Rows sampled at random by a kernel and by the reference. On a CPU, the kernel is emulated."""

from contextlib import nullcontext

import pytest
import torch

from kvindex.ops import sampling as reference
from kvindex_cuda.ops import sampling
from tests.cuda import emulator
from tests.cuda.devices import sampled_on_cpu
from tests.cuda.pariskv.steps.test_sign_votes import DEVICES


def rows(count, strength, seed=0, unused=0):
    """Logits `[2, 3, count]` in descending order, the last `unused` of them −inf; and ids in any
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (strength * torch.randn(2, 3, count, generator=generator)).sort(-1, True).values
    ids = torch.rand(2, 3, 4 * count, generator=generator).argsort(-1)[..., :count].clone()
    if unused:
        logits[..., -unused:], ids[..., -unused:] = float("-inf"), -1
    return logits, ids


def both(device, logits, ids, k, sampled, order="forward"):
    """Return the kernel's positions and weights on the CPU, and the reference's."""
    with emulator.emulated(order=order, seed=1) if device == "cpu" else nullcontext():
        found = sampling.sample(logits.to(device), ids.to(device), k, sampled)
    return [part.cpu() for part in found], reference.sample(logits, ids, k, sampled)


def assert_same(found, want):
    assert torch.equal(found[0], want[0])
    torch.testing.assert_close(found[1], want[1], rtol=1e-6, atol=1e-6)


@sampled_on_cpu(
    "sizes, strength",
    [
        (800, 100, 50),
        (160, 20, 20),
        (320, 40, 4),
        (33, 16, 8),
        (2100, 260, 130),
        (8, 1, 0),
        (9, 1, 1),
    ],
    [1.0, 6.0, 0.0, 300.0, 0.1],
    indirect=False,
)
def test_the_kernel_draws_the_references_rows(sizes, strength, device):
    count, k, sampled = sizes
    assert_same(*both(device, *rows(count, strength), k, sampled))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unused", [1, 290, 310, 320])
def test_slots_without_a_row_are_not_drawn(unused, device):
    found, want = both(device, *rows(320, 1.0, unused=unused), 40, 20)
    assert_same(found, want)
    assert ((found[0] < 0) == (found[1] == float("-inf"))).all()
    assert found[0].max() < 320 - unused


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_the_order_of_threads_changes_nothing():
    given = rows(320, 1.0)
    first, *others = [both("cpu", *given, 40, 20, order)[0] for order in emulator.ORDERS]
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def test_more_rows_than_a_block_holds_are_drawn_in_plain_torch(monkeypatch):
    given = rows(70, 1.0)
    monkeypatch.setattr(sampling, "MOST", 64)
    assert_same(sampling.sample(*given, 8, 4), reference.sample(*given, 8, 4))


def test_the_comparison_can_fail():
    logits, ids = rows(320, 1.0)
    want = reference.sample(logits, ids, 40, 20)
    ids[0, 0, 100] += 5000
    with pytest.raises(AssertionError):
        assert_same(reference.sample(logits, ids, 40, 20), want)


def test_wrong_tensors_are_refused():
    logits, ids = rows(20, 1.0)
    with pytest.raises(ValueError, match=r"logits: got torch\.float64"):
        sampling.sample(logits.double(), ids, 4, 2)
    with pytest.raises(ValueError, match=r"ids: got shape \(2, 3, 19\)"):
        sampling.sample(logits, ids[..., 1:], 4, 2)
