"""A graph on a CPU: launches that are kept while it is made, and run when it is replayed.

As with a CUDA graph, none runs while it is made, and each is passed what it was passed then:
addresses as well as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvindex_cuda.pariskv import graph as replaying
from kvindex_cuda.runtime import launch as launching


class NoWork(TorchDispatchMode):
    """While it is entered, an operation of torch that is not a view is an error."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if not function.is_view:
            raise RuntimeError(f"{function}: got an operation that a graph would not do again")
        return function(*args, **kwargs or {})


class KeptGraph:
    """What `work` launches."""

    made, replays = 0, 0

    def __init__(self, device: torch.device, work: Callable[[], object]) -> None:
        type(self).made += 1
        self._launches: list[Callable[[], None]] = []
        load = launching.LOADERS[device.type]
        launching.LOADERS[device.type] = partial(self._kept, load)
        try:
            with NoWork():
                work()
        finally:
            launching.LOADERS[device.type] = load

    def _kept(self, load: launching.Loader, *which: Any) -> launching.Launch:
        def keep(grid, block, arguments, shared_bytes, overlap):
            run = partial(load(*which), grid, block, list(arguments), shared_bytes, overlap)
            self._launches.append(run)

        return keep

    def replay(self) -> None:
        """Run it."""
        type(self).replays += 1
        for run in self._launches:
            run()


@contextmanager
def kept() -> Iterator[type[KeptGraph]]:
    """Steps of tensors on a CPU are captured, too; gives what counts graphs and replays."""
    counting = type("Counting", (KeptGraph,), {})
    replaying.GRAPHS["cpu"] = counting
    try:
        yield counting
    finally:
        del replaying.GRAPHS["cpu"]
