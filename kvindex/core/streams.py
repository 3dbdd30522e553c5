"""CUDA streams: a stream for appends, fast access to the current stream, and copies to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new CUDA stream."""
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream  # torch does not annotate it
    return make(device)


def raw_stream(device: int) -> int:
    """Return the CUDA driver's handle of the current stream of a device.

    This is faster than `torch.cuda.current_stream`.
    """
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def raw_device() -> int:
    """Return the number of the current CUDA device.

    This is faster than `torch.cuda.current_device`, but CUDA must be initialized.
    """
    number: int = torch._C._cuda_getDevice()
    return number


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the CPU, and return a function that waits for the copy."""
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
    """Return the CUDA stream on which the appends of all layers run, one after the other."""
    return new_stream(device)
