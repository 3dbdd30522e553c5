"""Where tests of kernels run: on a CPU by emulation, on a GPU as they are."""

from contextlib import nullcontext

import pytest
import torch

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
