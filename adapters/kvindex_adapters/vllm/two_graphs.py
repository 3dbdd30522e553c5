"""CUDA graphs of decode steps with FlashAttention, in addition to those that search.

vLLM captures one full CUDA graph for each batch size, and selects it before the plug-in knows the
lengths of the sequences. So the kernels of a search run even if FlashAttention would be faster for
the whole batch (see `costs`). Therefore vLLM captures a second graph for each batch size, in which
FlashAttention computes the attention, unless the option `dense_graphs` is False. The metadata
builder decides for each batch (`choose`), and the patches of this module replay the graph that it
has chosen.

The graphs of both sets read the same buffers. The builder prepares a search in any case, so a batch
is computed correctly even if a graph of the second set is missing.

vLLM has two model runners, which capture graphs in different classes: `CUDAGraphWrapper` (V1) and
`CudaGraphManager` (V2).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.patches import patch
from kvindex_adapters.vllm.unsupported import has_two_graphs

WRAPPER = "vllm.compilation.cuda_graph", "CUDAGraphWrapper"
MANAGER = "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager"
"""Module and name of the classes that capture graphs."""

OF_THE_MODEL = "ModelCudaGraphManager"
"""Name of the subclass of `CudaGraphManager` that captures the graphs of the model. Others capture
those of a draft model, which has no index."""

_chosen = False
"""Whether FlashAttention computes the batch of the current step."""

_captured: bool | None = None
"""While graphs are captured: whether they contain FlashAttention. Otherwise None."""


def choose(full: bool) -> None:
    """Set whether FlashAttention computes the batch whose metadata were built last."""
    global _chosen
    _chosen = full


def full() -> bool:
    """Return True if FlashAttention computes the current batch, instead of a search."""
    return _chosen if _captured is None else _captured


def install() -> None:
    """Patch the classes that capture graphs in this process. Repeated calls have no effect.

    If a version of vLLM does not have one of these methods, nothing is patched in its place.
    """
    for (module, name), methods in (
        (WRAPPER, {"__call__": _wrapping, "clear_graphs": _clearing}),
        (MANAGER, {"capture": _capturing, "run_fullgraph": _replaying}),
    ):
        try:
            owner = vars(importlib.import_module(module)).get(name)
        except ImportError:  # vLLM has one model runner only
            continue
        if owner is not None:
            for method, wrap in methods.items():
                patch(owner, method, wrap, __name__)


@contextmanager
def capturing(whole: bool) -> Iterator[None]:
    """Let `full` return `whole` until the end of the context."""
    global _captured
    before, _captured = _captured, whole
    try:
        yield
    finally:
        _captured = before


def _wanted(owner: Any) -> bool:
    """Return True if an object of vLLM belongs to an engine that captures two graphs."""
    stored = vars(owner)
    if "kvindex_two_graphs" not in stored:
        options = Options.of_engine(owner.vllm_config)
        stored["kvindex_two_graphs"] = options is not None and has_two_graphs(
            owner.vllm_config, options
        )
    found: bool = stored["kvindex_two_graphs"]
    return found


@contextmanager
def _swapped(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Replace an attribute until the end of the context."""
    own = vars(owner)[name]
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _wrapping(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        """Capture two graphs, or replay one of them."""
        runs = self.runtime_mode == CUDAGraphMode.FULL and is_forward_context_available()
        if not runs or not _wanted(self):
            return own(self, *given, **named)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return own(self, *given, **named)
        second = vars(self).setdefault("kvindex_entries", {})
        first, batch = self.concrete_cudagraph_entries, context.batch_descriptor
        if batch not in first or first[batch].cudagraph is None:
            with capturing(True):
                self.runnable(*given, **named)  # loads kernels, as none can be loaded in a graph
                with _swapped(self, "concrete_cudagraph_entries", second):
                    own(self, *given, **named)
            with capturing(False):
                return own(self, *given, **named)
        if not full() or batch not in second:
            return own(self, *given, **named)
        with _swapped(self, "concrete_cudagraph_entries", second):
            return own(self, *given, **named)

    return call


def _clearing(own: Callable[..., Any]) -> Callable[..., Any]:
    def clear_graphs(self: Any) -> None:
        """Remove the graphs of both sets.

        vLLM captures some graphs to measure their memory, and removes them with the pages and
        buffers that they read.
        """
        own(self)
        vars(self).pop("kvindex_entries", None)

    return clear_graphs


def _capturing(own: Callable[..., Any]) -> Callable[..., Any]:
    def capture(self: Any, *given: Any, **named: Any) -> None:
        """Capture all graphs that search, and then all full graphs with FlashAttention."""
        model = vars(importlib.import_module(MANAGER[0]))[OF_THE_MODEL]
        if not isinstance(self, model) or not _wanted(self):
            own(self, *given, **named)
            return
        with capturing(False):
            own(self, *given, **named)
        batches = self._capture_descs.get(CUDAGraphMode.FULL)
        if not batches:
            return
        second: dict[Any, Any] = {}
        with (
            capturing(True),
            _swapped(self, "_capture_descs", {CUDAGraphMode.FULL: batches}),
            _swapped(self, "graphs", second),
        ):
            own(self, *given, **named)
        vars(self)["kvindex_graphs"] = second
        if samples := vars(self).get("_capture_mem_samples"):
            # vLLM estimates the memory of all graphs from that of a few, in bytes. The graphs of
            # both sets then count as one.
            half = len(samples) // 2
            pairs = zip(samples[:half], samples[half:], strict=True)
            samples[:] = [search + full for search, full in pairs]

    return capture


def _replaying(own: Callable[..., Any]) -> Callable[..., Any]:
    def run_fullgraph(self: Any, batch: Any, *given: Any, **named: Any) -> Any:
        """Replay the graph that the metadata builder has chosen."""
        second = vars(self).get("kvindex_graphs", {})
        if not full() or batch not in second:
            return own(self, batch, *given, **named)
        with _swapped(self, "graphs", second):
            return own(self, batch, *given, **named)

    return run_fullgraph
