"""Where the kernels of a rank run: emulated, or on a GPU of its own."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist

from kvindex.pariskv.index import ParisKV
from tests.cuda import emulator


def device():
    """Of this rank, by what carries its messages."""
    return "cpu" if dist.get_backend() == "gloo" else f"cuda:{dist.get_rank()}"


def kernels():
    """Kernels take tensors of the device, and nobody asks them for numbers, as on a GPU."""
    until = ExitStack()
    if device() == "cpu":
        until.enter_context(emulator.emulated())
        until.enter_context(mock.patch.object(ParisKV, "_defers", True))
        until.enter_context(mock.patch("kvindex.core.check.finite", return_value=None))
    else:
        torch.cuda.set_device(device())
    return until
