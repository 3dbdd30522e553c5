"""CUDA graphs: kernel launches that are captured once and replayed many times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch

from kvindex.core.streams import new_stream


class Graph(Protocol):
    """A captured graph of work on a device, which can be replayed."""

    def replay(self) -> None:
        """Run the captured kernels on the current stream."""
        ...


class CudaGraph:
    """A CUDA graph of all kernels that the function `work` launches.

    The constructor calls `work` to capture the kernels, but does not run them; `replay` does. Each
    graph has its own memory pool, because a shared pool becomes unusable when the last graph that
    uses it is deleted.

    Args:
        device: The CUDA device.
        work: The function to capture.
        draws: The torch generator of the random numbers that `work` uses on the device, or None. A
            replay advances the generator as a call of `work` would.

    Raises:
        RuntimeError: The driver cannot capture the work.
    """

    def __init__(
        self,
        device: torch.device,
        work: Callable[[], object],
        draws: torch.Generator | None = None,
    ) -> None:
        make: Callable[[], Any] = torch.cuda.CUDAGraph  # torch does not annotate it
        graph, side = make(), _capturing_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        if draws is not None:
            graph.register_generator_state(draws)
        collects = gc.isenabled()
        gc.disable()  # a finalizer might make a CUDA call that is forbidden during a capture
        try:
            with torch.cuda.device(device), torch.cuda.stream(side):
                # with the error mode "thread_local", other threads may allocate pinned memory
                # while this thread captures the CUDA graph
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.replay: Callable[[], None] = graph.replay


@lru_cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    return new_stream(device)


GRAPHS: dict[str, Callable[..., Graph]] = {"cuda": CudaGraph}
"""Device type -> class of its graphs. Tests add an emulation for "cpu", which records the calls of
`work` and repeats them (`tests/cuda/graphs.py`)."""
