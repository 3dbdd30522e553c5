"""CUDA streams: the side stream of appends, and cheap handles of the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own."""
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # torch leaves it untyped
    return make(device)


def raw_stream(device: int) -> int:
    """The driver's handle of the current stream of a CUDA device: cheaper than torch's object."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def raw_device() -> int:
    """The current CUDA device where there is one in use: cheaper than torch's function."""
    number: int = torch._C._cuda_getDevice()
    return number


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that appends of all layers run on, so that they follow one another."""
    return new_stream(device)
