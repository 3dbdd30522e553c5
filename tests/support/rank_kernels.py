"""Kernels of a rank: emulated, or on a GPU of its own."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist

from kvindex.pariskv.index import ParisKV
from tests.cuda import emulator


def device():
    """Return this rank's device, by the backend that sends its messages."""
    return "cpu" if dist.get_backend() == "gloo" else f"cuda:{dist.get_rank()}"


def kernels():
    """Use kernels for tensors of the device. The host may not read their numbers, as on a GPU."""
    until = ExitStack()
    if device() == "cpu":
        until.enter_context(emulator.emulated())
        until.enter_context(mock.patch.object(ParisKV, "_defers", True))
        until.enter_context(mock.patch("kvindex.core.check.finite", return_value=None))
    else:
        torch.cuda.set_device(device())
    return until
