"""`TokenGraph`: replays the decode steps of a transformers model as one CUDA graph.

A decode step is the decoder's forward pass of one token per sequence. A graph repeats the same
operations on the same addresses. So steps can be captured if two successive steps run the same
operations. To find out, the first steps are traced operation by operation (`trace.Trace`). Later
steps are replays as long as weights, modules, cache layers and the buffers of the indexes stay at
their addresses. Any other step runs as usual.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kvindex.core.graphs import GRAPHS, Graph
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.layer import IndexedLayer
from kvindex_adapters.hf.graph.token_inputs import (
    MASK,
    TokenInputs,
    is_one_token,
    layer_refusal,
    refusal,
)
from kvindex_adapters.hf.graph.trace import Trace, difference
from kvindex_adapters.hf.model.module_state import ModuleState

TRACES = 4
"""Maximum number of steps that are traced for a graph. More than two may be necessary, because the
first steps may allocate tensors that later steps only read."""

SHORT, SHORT_GRAPHS = 8, 3
"""SHORT: replays after which capturing a graph has paid off. SHORT_GRAPHS: after this number of
successive graphs with fewer replays, no more graphs are captured."""

CACHE = object()
"""Placeholder for the cache in a graph's output."""

Forward = Callable[..., Any]
Contents = dict[tuple[int, str, object], object]


class TokenGraph:
    """Runs the decode steps of one cache, as replays of a graph where possible.

    It has no reference to the cache, so that an unused cache is freed immediately.

    Args:
        asked: Whether the user has asked for the graph. If not, a failed capture causes no warning,
            and steps of a model with a replaced forward method are not replayed.
    """

    raises = False
    """True if errors in `run` are passed to the caller; False if the step then runs as usual."""
    first, replayed = "it was compared with the next", "replays"
    """Words of the report: why a traced step was no replay, and what replays are called."""

    def __init__(self, *, asked: bool = True) -> None:
        self.asked = asked
        self._comparing = False
        self._tokens = self._replays = 0
        self._reason = ""
        self.forget()

    @property
    def report(self) -> str:
        """How many decode steps were replays, and why the last one was not."""
        said = f"{self._replays} of {self._tokens} tokens were {self.replayed}"
        return f"{said}; the last was not: {self._reason}" if self._reason else said

    def forget(self) -> None:
        """Drop the graph and everything recorded about earlier steps."""
        self._inputs = TokenInputs()
        self._begin()

    def another(self) -> TokenGraph:
        """Make an empty object for a copy of the cache."""
        return TokenGraph(asked=self.asked)

    def look_again(self) -> None:
        """Read the padding again, because the tokens of the cache have changed."""
        self._inputs.look_again()

    def _begin(self) -> None:
        self._refused = ""
        self._short = 0  # number of successive graphs with fewer than SHORT replays
        self._since = SHORT  # number of replays of the last graph
        self._compare_anew(traces=0)

    def _compare_anew(self, traces: int) -> None:
        """Trace steps until two are equal. `traces` counts the steps traced since the last
        graph."""
        self._traces, self._alike = traces, False
        self._module: ModuleState | None = None
        self._contents: list[object] = []
        self._last: Trace | None = None
        self._drop()

    def _drop(self) -> None:
        self._graph: Graph | None = None
        self._reads: list[object] = []
        self._output: tuple[list[Any], TreeSpec] | None = None

    # One call of the decoder

    def takes(self, forward: Forward, cache: IndexCache, given: Mapping[str, Any]) -> bool:
        """Return True if `replay` can compute a call of the decoder. This may capture a graph.

        Args:
            forward: The function that is called.
            cache: The cache.
            given: All arguments of the call, by name.
        """
        self._comparing = False
        if not is_one_token(given):
            self._inputs.look_again()
            return False
        self._tokens += 1
        layers = cache.attention_layers()
        self._reason = (
            self._refusal(cache, layers, given)
            # for an existing graph, `prepare_replay` checks the layers instead
            or ("" if self._graph is not None else layer_refusal(cache))
            or self._inputs.mask_refusal(given.get(MASK), layers[0])
        )
        if self.checks and not self._reason and cache.overwrites and not self.asked:
            self._reason = (
                "padding: got some together with linear attention, which cannot be checked"
            )
        if self._reason:
            self._inputs.look_again()
            return False
        if not self._inputs.take(given):
            self._begin()
        if self._refused:
            self._reason = self._refused
            return False
        if self._alike:
            cache.roll()
            if not self._unchanged(cache):
                self._compare_anew(self._traces)
        if not self._alike:
            why = layer_refusal(cache)
            self._comparing, self._reason = not why, why or self.first
            return False
        self._reason = self._ready(forward, cache, layers)
        return not self._reason

    @property
    def comparing(self) -> bool:
        """True if `run` compares the call with the one before or after it."""
        return self._comparing

    @property
    def checks(self) -> bool:
        """True if the output of `run` must be compared with a call that passes all arguments.

        `run` does not pass the padding mask. If tokens are padded, a model might read the mask
        outside of attention, too.
        """
        return self._inputs.padded

    def give_up(self, why: str) -> None:
        """Stop comparing steps, because one has failed, possibly due to the comparison."""
        self._comparing, self._last = False, None
        self._refused = self._reason = why

    def replay(self, cache: IndexCache) -> Any:
        """Compute the output of the decoder for the step that `takes` has accepted."""
        assert self._graph is not None
        assert self._output is not None
        cache.count_replay(self._graph.replay)
        self._replays += 1
        self._since += 1
        leaves, structure = self._output
        return tree_unflatten([_given_back(leaf, cache) for leaf in leaves], structure)

    def run(self, forward: Forward, cache: IndexCache, **given: Any) -> Any:
        """Compute the output of the decoder without a graph, and trace it for a comparison."""
        if not self._comparing:
            return forward(**given)
        if self._module is None or not self._module.unchanged:
            self._module, self._last = ModuleState(cache.decoder), None
        cache.roll()
        before, trace = _contents_by_name(cache.layers), Trace(_device(cache))
        with cache.attending_by(partial(_attend_traced, trace), trace.refuse), trace:
            output = forward(**self._inputs.arguments(cache))
        cache.count_rolled()
        self._compare(cache, trace, before)
        return output

    def _refusal(
        self, cache: IndexCache, layers: list[AttentionLayer], given: Mapping[str, Any]
    ) -> str:
        """Return why a call of one token cannot be replayed, or "" if it can."""
        return refusal(cache, layers, given)

    # Comparing steps

    def _compare(self, cache: IndexCache, trace: Trace, before: Contents) -> None:
        """Compare a step with the one before it, and the cache layers before and after it."""
        module, last, after = self._module, self._last, _contents_by_name(cache.layers)
        assert module is not None
        why = _moved(before, after) or (last and difference(last, trace))
        if module.hooked:
            why = f"{module.hooked}: got a hook, which no replay would call"
        elif module.replaced and not self.asked:
            why = f"{module.replaced}: got a forward of its own, which no replay would call"
        elif module.compiled:
            why = f"{module.compiled}: got a compiled call, which no trace records"
        self._traces, self._last = self._traces + 1, trace
        if last is not None and not why:
            self._alike, self._contents, self._last = True, _parts(cache.layers), None
        elif self._traces >= TRACES:
            self._refused, self._last = why or "model: got other weights in each step", None

    def _unchanged(self, cache: IndexCache) -> bool:
        """Return True if model and layers have the same contents as when steps were equal."""
        module, parts = self._module, _parts(cache.layers)
        same = len(parts) == len(self._contents) and all(map(is_, parts, self._contents))
        return same and module is not None and module.unchanged

    # The graph

    def _ready(self, forward: Forward, cache: IndexCache, layers: list[AttentionLayer]) -> str:
        """Capture a graph if there is none. Return why there is still none, or ""."""
        reads = [layer.prepare_next() or layer.prepare_replay() for layer in layers]
        if None in reads:
            return layer_refusal(cache)
        if self._graph is not None and all(map(is_, reads, self._reads)):
            return ""
        self._short = self._short + 1 if self._since < SHORT else 0
        self._drop()
        if self._short >= SHORT_GRAPHS:
            self._refused = f"memory that it reads moved {self._short} times within {SHORT} tokens"
        else:
            self._capture(forward, cache)
        self._reads = reads
        return self._refused

    def _capture(self, forward: Forward, cache: IndexCache) -> None:
        """Capture a graph of a decode step. If that fails, never try again."""
        outputs: list[Any] = []

        def work() -> None:
            outputs.append(self._forward(forward, cache))

        device = _device(cache)
        try:
            with cache.attending_by(_attend_captured):
                self._graph = GRAPHS[device.type](device, work)
        except Exception as error:
            self._refused = f"capturing it failed ({error})"
            if not isinstance(error, RuntimeError) and self.asked:
                raise
            if self.asked:
                warnings.warn(
                    f"token_graph: {self._refused}, so that tokens run operation by operation",
                    stacklevel=2,
                )
            return
        finally:
            cache.attachment.take_pending()
        leaves, structure = tree_flatten(outputs[0])
        self._output = [CACHE if leaf is cache else leaf for leaf in leaves], structure
        self._traces = self._since = 0

    def _forward(self, forward: Forward, cache: IndexCache) -> Any:
        """Run the work of the graph: the model's forward pass of the current token."""
        return forward(**self._inputs.arguments(cache))


def _attend_traced(
    trace: Trace,
    plain: Callable[[], Tensor],
    layer: IndexedLayer,
    queries: Tensor,
    rows: tuple[Tensor, Tensor] | None,
    *,
    bias: Tensor | None,
    ids: Tensor | None,
    **terms: Any,
) -> Tensor:
    """Run the step of a layer, and record it in the trace as one operation."""
    given = {
        "a layer without keys of its own": rows is None,
        "a bias of the logits": bias is not None,
    }
    given["rows that the model chose"] = ids is not None
    for name in (name for name, there in given.items() if there):
        trace.refuse(f"attention: got {name}")
    return trace.whole("attention", plain, queries, rows, list(terms.values()))


def _attend_captured(
    plain: Callable[[], Tensor],
    layer: IndexedLayer,
    queries: Tensor,
    rows: tuple[Tensor, Tensor],
    *,
    bias: None,
    ids: None,
    **terms: Any,
) -> Tensor:
    """Run the step of a layer inside a graph, for real tokens. The index does not get their ids."""
    return layer.attend_captured(queries, *rows, **terms)


def _device(cache: IndexCache) -> torch.device:
    return cache.attention_layers()[0].index.geometry.device


def _given_back(leaf: Any, cache: IndexCache) -> Any:
    """Copy a part of a graph's output, so that the next replay does not overwrite it."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return cache if leaf is CACHE else leaf


def _contents_by_name(layers: list[Any]) -> Contents:
    """Collect the attributes of cache layers. Values of mappings are listed one by one."""
    contents: Contents = {}
    for number, layer in enumerate(layers):
        for name, value in vars(layer).items():
            inner = value if isinstance(value, dict) else {None: value}
            contents |= {(number, name, key): one for key, one in inner.items()}
    return contents


def _parts(layers: list[Any]) -> list[object]:
    """List layers and their attributes. This runs before each step, so it makes few calls."""
    values = [value for layer in layers for value in vars(layer).values()]
    inner = [one for value in values if type(value) is dict for one in value.values()]
    return [*layers, *values, *inner]


def _moved(before: Contents, after: Contents) -> str:
    """Name a cache layer that counts on the host or makes new tensors in a step, or return ""."""
    for key in before | after:
        if before.get(key) is not after.get(key):
            number, name, _ = key
            return f"layer {number}: its cache replaces {name} after each token"
    return ""
