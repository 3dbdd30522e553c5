"""Microseconds of CUDA graphs, and how much time is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex_cuda.runtime import launch as launching

Times = dict[str, float]
Timed = Callable[..., Times]
"""Of a function that does the work of `layers` layers: microseconds per layer."""


class OutOfTimeError(RuntimeError):
    """The time that was given is used up."""


class Clock:
    """How much is left of `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds until the end, below 0 after it."""
        return self._seconds - self.spent

    def check(self) -> None:
        """Raises OutOfTimeError if no time is left."""
        left = self.left
        if left < 0:
            raise OutOfTimeError(f"{left:.0f} s are left of {self._seconds:.0f}")


class Launches:
    """While it is entered: which kernels a step launches; those past `most` are left out."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.names: list[str] = []

    def begin(self) -> None:
        """A new step: count from 0 again."""
        self.names = []

    def __enter__(self) -> Launches:
        self._before = dict(launching.LOADERS)
        for kind, loader in self._before.items():
            launching.LOADERS[kind] = partial(self._load, loader)
        return self

    def __exit__(self, *_: object) -> None:
        launching.LOADERS.update(self._before)

    def _load(self, loader: launching.Loader, *which: Any) -> launching.Launch:
        if self.most is not None and len(self.names) >= self.most:
            return lambda *_: None
        self.names.append(which[1])
        return loader(*which)


class GraphTimer:
    """Times replays of CUDA graphs by CUDA events, after the L2 cache was filled otherwise."""

    def __init__(self, replays: int, clock: Clock, l2_bytes: int) -> None:
        self._replays, self._clock = replays, clock
        words = 4 * l2_bytes // 16
        self._flush = torch.randint(2**31, (words, 4), dtype=torch.int32, device="cuda")
        self._sum = torch.zeros(1, dtype=torch.int32, device="cuda")

    def __call__(
        self,
        run: Callable[[], Any],
        layers: int,
        before: Callable[[int], Any] | None = None,
        *,
        graph: bool = True,
    ) -> Times:
        """`run`'s time over `layers`; `graph`: whether it was captured, or timed as it is.

        before: is called with the number of the replay, untimed. graph: False for what must not
        be captured, as a library that allocates.
        """
        self._clock.check()
        try:
            replay = captured(run).replay if graph else None
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            replay = None
        marks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self._replays)
        ]
        for i, (start, stop) in enumerate([*marks[:2], *marks]):  # the first two warm up
            if before is not None:
                before(i)
            read_all(self._flush, self._sum)
            start.record()
            (replay or run)()
            stop.record()
        torch.cuda.synchronize()
        self._clock.check()
        times = quartiles([a.elapsed_time(b) * 1e3 / layers for a, b in marks])
        return {**times, "graph": replay is not None}


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `run`, which has been run before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may be pinning memory (`HostStore`)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def quartiles(times_us: list[float]) -> Times:
    """Median and quartiles of times, microseconds."""
    low, middle, high = statistics.quantiles(times_us, n=4)
    return {"median_us": middle, "low_us": low, "high_us": high, "replays": len(times_us)}


def read_all(data: Tensor, total: Tensor, blocks: int = 2112, loads: int = 4) -> None:
    """Read a contiguous tensor once, adding its 32-bit words to `total`, int32 `[1]`."""
    words = data.nbytes // 16
    launching.launch("ops/ceiling.cu", "total", (blocks,), (512,), data, words, total, LOADS=loads)


def read_pieces(data: Tensor, total: Tensor, piece: int, apart: int, blocks: int = 264) -> None:
    """Read the first `piece` bytes of records of `apart` bytes as the scan does.

    total: int32 `[1]`, to which the 32-bit words of each record's first 512 bytes are added.
    """
    shape = (blocks,), (256,)
    records = data.nbytes // apart
    given = data, records, apart, piece, total
    launching.launch("ops/ceiling.cu", "pieces", *shape, *given, shared_bytes=16 * piece, LOADS=4)
