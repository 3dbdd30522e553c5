"""CUDA graphs: work that is captured once and replayed many times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch

from kvindex.core.streams import new_stream


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Do it again, on the current stream."""
        ...


class CudaGraph:
    """What `work` launches, captured; it runs when it is replayed, not before.

    Each graph has a pool of its own: one that graphs share is not to be had again once the last of
    them is gone. draws: what random numbers in it are drawn from, on the device: replays go on from
    where it is, as calls would. Raises RuntimeError where the driver refuses.
    """

    def __init__(
        self,
        device: torch.device,
        work: Callable[[], object],
        draws: torch.Generator | None = None,
    ) -> None:
        make: Callable[[], Any] = torch.cuda.CUDAGraph  # torch leaves it untyped
        graph, side = make(), _capturing_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        if draws is not None:
            graph.register_generator_state(draws)
        collects = gc.isenabled()
        gc.disable()  # what is let go of in between might call what a capture forbids
        try:
            with torch.cuda.device(device), torch.cuda.stream(side):
                # another thread may pin memory meanwhile
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
"""By type of device. Tests add `cpu`: work that is kept (`tests/cuda/graphs.py`)."""
