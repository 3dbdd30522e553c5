"""Traces differ when a model's work differs, and changes of a model are noticed."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from kvindex_adapters.hf.graph.trace import Trace, difference
from kvindex_adapters.hf.model.module_state import ModuleState

CPU = torch.device("cpu")
X = torch.randn(2, 3)


def traced(work):
    trace = Trace(CPU)
    with torch.no_grad(), trace:
        work()
    return trace


def apart(work):
    """Trace two calls of the same work, and return how they differ."""
    return difference(traced(work), traced(work))


class Counting:
    """Work that is different in each call."""

    def __init__(self, work):
        self.count, self._work = 0, work

    def __call__(self):
        self.count += 1
        return self._work(self)


def kept(self):
    """Make a tensor from the tensor that the previous call made."""
    self.last = getattr(self, "last", X) + 1


def inline(self):
    return X + 1 if self.count == 1 else X * 1


@pytest.mark.parametrize(
    "work",
    [
        lambda: X @ X.T,
        lambda: torch.ones(4) * torch.tensor(5.0) + torch.arange(4)[None].float(),
        lambda: X[torch.tensor([1, 0])],
        lambda: nn.functional.layer_norm(X.view(3, 2).t(), (3,)),
        lambda: X.mul_(1),
    ],
)
def test_the_same_work_has_equal_traces(work):
    assert apart(work) is None
    assert traced(work).operations


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda: bool((X > 0).all()), "aten._local_scalar_dense.default: the host reads"),
        (lambda: X.sum().item(), "aten._local_scalar_dense.default: the host reads"),
        (lambda: X.nonzero(), "aten.nonzero.default: the host reads"),
        (lambda: X[X > 0], "aten.index.Tensor: the host reads"),
        (lambda: torch.equal(X, X), "aten.equal.default: the host reads"),
        (lambda: X.tolist(), "tolist: the host reads a tensor (test_trace.py:"),
        (lambda: np.asarray(X), "__array__: the host reads a tensor"),
        (lambda: X.data_ptr(), "data_ptr: the host asks for an address"),
        (lambda: X.to_sparse() * 2, "got a Tensor, allowed are plain tensors"),
        (lambda: X.to("meta"), "gives a tensor on meta, not on cpu"),
    ],
)
def test_what_the_host_reads_is_refused(work, why):
    assert why in apart(work)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda self: X + self.count, "aten.add.Tensor: got 1, at the next token 2"),
        (lambda self: X.new_zeros(self.count), "got 1, at the next token 2"),
        (lambda self: X[: self.count], "at the next token 2"),
        (lambda self: torch.ones(2).expand(self.count, 2) + 1, "at the next token"),
        (lambda self: X + torch.tensor(float(self.count)), "got 1.0, at the next token 2.0"),
        (kept, "aten.add.Tensor: got a tensor that has another address at the next token"),
        (inline, "got aten.add.Tensor, at the next token aten.mul.Tensor"),
        (lambda self: self.count == 1 and X + 1, "an operation of one token, not of the next"),
        (lambda self: (X if self.count == 1 else X.view(3, 2)) + 1, "aten."),
    ],
)
def test_what_differs_is_told(work, why):
    assert why in apart(Counting(work))


def test_shapes_and_layouts_differ_in_words():
    wide, turned, flat = torch.zeros(2, 4), torch.zeros(3, 2).t(), torch.zeros(1, 3)
    cut = wide[:, :3]
    before = traced(lambda: cut + 1)
    assert "got shape [2, 3], at the next token [1, 3]" in difference(
        before, traced(lambda: flat + 1)
    )
    assert "another address" in difference(before, traced(lambda: turned + 1))
    other = wide.view(-1)[:6].view(2, 3)
    assert "other strides" in difference(before, traced(lambda: other + 1))


def test_a_call_that_is_one_operation_may_do_anything():
    def work():
        trace = Trace(CPU)
        with torch.no_grad(), trace:
            made = trace.whole("attention", lambda: X * float(X.sum().item()), X, 2.0)
            made.add_(1)
        return trace

    assert difference(work(), work()) is None
    assert [one.name for one in work().operations] == ["attention", "aten.add_.Tensor"]


def model():
    made = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).eval()
    made[1].options, made[2].config = {"scale": 1.0}, PreTrainedConfig()
    return made


CHANGES = {
    "a weight": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "where weights lie": lambda m: m.double(),
    "a buffer": lambda m: setattr(m[2], "running_mean", torch.zeros(3)),
    "a module": lambda m: setattr(m, "1", nn.Identity()),
    "one more": lambda m: m[1].add_module("more", nn.Identity()),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "training": lambda m: m.train(),
    "a number": lambda m: setattr(m[1], "p", 0.25),
    "a number in a mapping": lambda m: m[1].options.update(scale=2.0),
    "a configuration": lambda m: setattr(m[2].config, "experts", "eager"),
    "a forward": lambda m: setattr(m[0], "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_model_is_noticed(change):
    some = model()
    state = ModuleState(some)
    some(torch.zeros(2, 3))
    with torch.no_grad():
        some[0].weight.add_(1)  # changed in place, so a graph reads the new numbers
    assert state.unchanged
    CHANGES[change](some)
    assert not state.unchanged


def test_a_hook_is_named():
    some = model()
    assert ModuleState(some).hooked is None
    some[2].register_forward_pre_hook(lambda *_: None)
    assert ModuleState(some).hooked == "BatchNorm1d"
