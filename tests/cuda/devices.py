"""The devices that kernels are tested on: a CPU, where they are emulated, and a GPU."""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import kvindex_cuda
from kvindex import ops
from kvindex.core import backend
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv import executor
from tests.cuda import emulator
from tests.support.helpers import sampled

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

on_devices = pytest.mark.parametrize("device", DEVICES)

SLOWLY = [pytest.param("cpu", marks=[*DEVICES[0].marks, pytest.mark.slow]), DEVICES[1]]
"""The same devices for a test that is slow on a CPU."""

on_devices_slowly = pytest.mark.parametrize("device", SLOWLY)

slow_on_cpu = pytest.mark.parametrize("device", SLOWLY, indirect=True)
"""Mark a test that takes the fixture `device` as slow on a CPU."""


def mostly_slow_on_cpu(names, values, *fast, indirect=True, **options):
    """Parametrize a test by `device` and `names`. On a CPU, values are slow unless in `fast`.

    values: with their own marks, which the cases of a GPU keep. A value that is a tuple has one
    element for each name. indirect: whether `device` is a fixture.
    """
    values = [
        value
        if isinstance(value, type(DEVICES[0]))
        else pytest.param(*(value if isinstance(value, tuple) else (value,)))
        for value in values
    ]
    fast = [value if isinstance(value, tuple) else (value,) for value in fast]
    if unknown := [one for one in fast if one not in [value.values for value in values]]:
        raise ValueError(f"fast: got {unknown}, allowed is one of {values}")
    cases = []
    for device in DEVICES:
        for value in values:
            marks = [*device.marks, *value.marks]
            if device.values == ("cpu",) and value.values not in fast:
                marks.append(pytest.mark.slow)
            name = value.id and f"{device.values[0]}-{value.id}"
            cases.append(pytest.param(*device.values, *value.values, marks=marks, id=name))
    indirect = ["device"] if indirect else False
    return pytest.mark.parametrize(f"device, {names}", cases, indirect=indirect, **options)


def sampled_on_cpu(names, *lists, **options):
    """Parametrize a test by `device` and the product of lists, one for each name.

    On a CPU, cases are slow, except a diagonal with every value.
    """
    fast = [case.values for case in sampled(*lists) if not case.marks]
    return mostly_slow_on_cpu(names, product(*lists), *fast, **options)


def on(device, **settings):
    """Context in which kernels accept tensors of `device`.

    settings: those of `emulator.emulated`.
    """
    return emulator.emulated(**settings) if device == "cpu" else nullcontext()


def poisoned(monkeypatch):
    """Fill new tensors with garbage, so that a test notices what a kernel does not write."""
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **how: empty(*size, **how).view(torch.uint8).fill_(0xA5).view(how["dtype"]),
    )


def torch_ops_and_an_executor(monkeypatch, *, on_host, **others):
    """Make `backend="cuda"` an executor that runs on codes of the torch ops.

    Its searches must equal those of torch bit by bit. on_host: whether rows of the device are
    cached as if they were on the host. others: functions that replace some of the torch ops.
    """
    doors = {name: getattr(kvindex_cuda, name) for name in ("accelerate", "refusal", "store")}
    both = {name: getattr(ops, name) for name in ops.__all__} | doors | others
    both, resolve = SimpleNamespace(**both, ready=lambda device: None), backend.resolve
    monkeypatch.setattr(backend, "resolve", lambda name: both if name == "cuda" else resolve(name))
    monkeypatch.setattr(executor, "encoder_of", lambda *given: None)
    monkeypatch.setattr(DeviceAllocator, "on_host", on_host)
