"""CUDA streams: the side stream of appends, cheap handles of the current one, copies to hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


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


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Have a tensor copied to the CPU: what is given back waits for the copy, and gives it."""
    copy = tensor.to("cpu", non_blocking=True)
    if tensor.device.type != "cuda":
        return lambda: copy
    done = torch.cuda.current_stream(tensor.device.index).record_event()

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that appends of all layers run on, so that they follow one another."""
    return new_stream(device)
