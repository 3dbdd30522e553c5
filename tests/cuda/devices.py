"""The devices that kernels are tested on: a CPU, where they are emulated, and a GPU."""

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
