"""Where tests of kernels run: on a CPU by emulation, on a GPU as they are."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import kvindex_cuda
from kvindex import ops
from kvindex.core import backend
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv import executor
from tests.cuda import emulator

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

on_devices = pytest.mark.parametrize("device", DEVICES)


def on(device, **settings):
    """Kernels take tensors of `device`; settings: as of `emulator.emulated`."""
    return emulator.emulated(**settings) if device == "cpu" else nullcontext()


def poisoned(monkeypatch):
    """New tensors hold garbage: what a kernel leaves out shows."""
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **how: empty(*size, **how).view(torch.uint8).fill_(0xA5).view(how["dtype"]),
    )


def torch_ops_and_an_executor(monkeypatch, *, far, **others):
    """`backend="cuda"` is an executor over codes of the torch ops: searches are alike to the bit.

    far: whether rows of a device go to a cache; others: ops in place of those of torch.
    """
    doors = {name: getattr(kvindex_cuda, name) for name in ("accelerate", "refusal", "store")}
    both = {name: getattr(ops, name) for name in ops.__all__} | doors | others
    both, resolve = SimpleNamespace(**both, ready=lambda device: None), backend.resolve
    monkeypatch.setattr(backend, "resolve", lambda name: both if name == "cuda" else resolve(name))
    monkeypatch.setattr(executor, "encoder_of", lambda *given: None)
    monkeypatch.setattr(DeviceAllocator, "far", far)
