"""Find the kernels that a call launches, and the number of nodes of its CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvindex_cuda.runtime import launch as launching


class Launches:
    """Context that collects the names of the kernels that are launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Launches:
        self._before = dict(launching.LOADERS)
        for kind, loader in self._before.items():
            launching.LOADERS[kind] = partial(self._load, loader)
        return self

    def __exit__(self, *_: object) -> None:
        launching.LOADERS.update(self._before)

    def _load(self, loader: launching.Loader, *which: Any) -> launching.Launch:
        self.names.append(which[1])
        return loader(*which)


def nodes_of(run: Callable[[], Any]) -> int | None:
    """Return the number of nodes (kernels, copies, fills) of a CUDA graph of `run`, or None if it
    is unknown.
    """
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        count = ctypes.c_size_t()
        handle = ctypes.c_void_p(graph.raw_cuda_graph())
        failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    except (RuntimeError, AttributeError, TypeError, OSError):
        return None
    return None if failed else count.value
