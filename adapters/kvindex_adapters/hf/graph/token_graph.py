"""`TokenGraph`: replays the decode steps of a transformers model as one CUDA graph.

A decode step is the decoder's forward pass with one token per sequence. A CUDA graph repeats the
same operations on the same addresses, so it can replace a decode step only if successive steps run
the same operations. To verify this for any model, the first steps are traced operation by operation
(`trace.Trace`) and compared. Later steps are replays while weights, modules, cache layers and index
buffers stay at the same addresses. All other steps run without a graph.
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
"""Number of decode steps after which tracing stops, if no two successive steps were equal.

Two steps may not be enough, because the first ones may allocate tensors that later steps only read.
"""

SHORT, SHORT_GRAPHS = 8, 3
"""A graph that is replayed fewer than `SHORT` times takes more time to capture than it saves.

After `SHORT_GRAPHS` such graphs in succession, no more graphs are captured.
"""

CACHE = object()
"""Placeholder for the cache in the output of a graph."""

Forward = Callable[..., Any]
Contents = dict[tuple[int, str, object], object]


class TokenGraph:
    """Runs the decode steps of one cache, as replays of a CUDA graph where possible.

    The object has no reference to the cache, so that an unused cache is freed immediately.

    Args:
        asked: Whether the user passed `token_graph=True`. If not, a failed capture causes no
            warning, and no graph is used for a model with a replaced forward method.
    """

    raises = False
    """Whether an error in `run` is raised to the caller. If False, the step runs again without a
    graph."""
    first, replayed = "it was compared with the next", "replays"
    """Phrases in `report`: the reason why a traced step was not a replay, and the word for replays.
    """

    def __init__(self, *, asked: bool = True) -> None:
        self.asked = asked
        self._comparing = False
        self._tokens = self._replays = 0
        self._reason = ""
        self.forget()

    @property
    def report(self) -> str:
        """How many decode steps were graph replays, as text.

        If the last decode step was not a replay, the text also gives the reason.
        """
        said = f"{self._replays} of {self._tokens} tokens were {self.replayed}"
        return f"{said}; the last was not: {self._reason}" if self._reason else said

    def forget(self) -> None:
        """Delete the graph and all records of earlier steps."""
        self._inputs = TokenInputs()
        self._begin()

    def another(self) -> TokenGraph:
        """Make an object without a captured graph, for a copy of the cache."""
        return TokenGraph(asked=self.asked)

    def look_again(self) -> None:
        """Look for padding in the cache again before the next step.

        Call this when tokens were added or removed without a replay.
        """
        self._inputs.look_again()

    def _begin(self) -> None:
        self._refused = ""
        self._short = 0  # number of successive graphs with fewer than SHORT replays
        self._since = SHORT  # number of replays of the last graph
        self._compare_anew(traces=0)

    def _compare_anew(self, traces: int) -> None:
        """Delete the CUDA graph. From now on, trace decode steps until two of them are equal.

        `traces` is the number of steps that were traced since the last graph.
        """
        self._traces, self._alike = traces, False
        self._module: ModuleState | None = None
        self._contents: list[object] = []
        self._last: Trace | None = None
        self._drop()

    def _drop(self) -> None:
        self._graph: Graph | None = None
        self._reads: list[object] = []
        self._output: tuple[list[Any], TreeSpec] | None = None

    # Run one call of the decoder

    def takes(self, forward: Forward, cache: IndexCache, given: Mapping[str, Any]) -> bool:
        """Return True if replaying a CUDA graph can replace this call of a decoder's `forward`.

        The method may capture a graph first.

        Args:
            forward: The method `forward` of the decoder (the model without its LM head).
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
            # `layer_refusal` checks whether the layers support CUDA graphs. If a graph exists,
            # `prepare_replay` makes this check instead.
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
        """True if `run` traces the current call, to compare it with another step."""
        return self._comparing

    @property
    def checks(self) -> bool:
        """True if the caller must compare the output of `run` with that of an ordinary call.

        `run` does not pass the padding mask to the model. With padding, this is wrong for a model
        that uses the mask outside of attention.
        """
        return self._inputs.padded

    def give_up(self, why: str) -> None:
        """Use no graph from now on, because a traced step has failed."""
        self._comparing, self._last = False, None
        self._refused = self._reason = why

    def replay(self, cache: IndexCache) -> Any:
        """Run a decode step by a replay of the CUDA graph. Call this after `takes` returned
        True."""
        assert self._graph is not None
        assert self._output is not None
        cache.count_replay(self._graph.replay)
        self._replays += 1
        self._since += 1
        leaves, structure = self._output
        return tree_unflatten([_given_back(leaf, cache) for leaf in leaves], structure)

    def run(self, forward: Forward, cache: IndexCache, /, **given: Any) -> Any:
        """Compute a decode step without a graph. If `comparing`, trace the step."""
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
        """Return the reason why a graph cannot replace this decode step, or "" if it can."""
        return refusal(cache, layers, given)

    # Compare traced steps

    def _compare(self, cache: IndexCache, trace: Trace, before: Contents) -> None:
        """Check that a decode step ran the same operations as the decode step before it.

        `trace` lists the operations of the step. Also check that the step replaced no attribute of
        a cache layer.
        """
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
        """Return True if nothing has changed since two successive decode steps had equal traces.

        This compares the model and the cache layers with their state at that time.
        """
        module, parts = self._module, _parts(cache.layers)
        same = len(parts) == len(self._contents) and all(map(is_, parts, self._contents))
        return same and module is not None and module.unchanged

    # Capture the graph

    def _ready(self, forward: Forward, cache: IndexCache, layers: list[AttentionLayer]) -> str:
        """Capture a graph, unless there is a valid graph already.

        Return "", or the reason why no graph can be captured.
        """
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
        """Capture a graph of a decode step. After a failure, no graph is captured any more."""
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
        """Run the forward pass that the graph captures."""
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
    """Run the attention of a layer, and record it in the trace as one operation."""
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
    """Run the attention of a layer while a graph is captured. No token is padding, and the index
    does not get token ids."""
    return layer.attend_captured(queries, *rows, **terms)


def _device(cache: IndexCache) -> torch.device:
    return cache.attention_layers()[0].index.geometry.device


def _given_back(leaf: Any, cache: IndexCache) -> Any:
    """Return one element of a graph's output in a form that the caller may keep.

    A tensor is copied, because the next replay overwrites it. The placeholder `CACHE` is replaced
    by the cache. Other elements are returned unchanged.
    """
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return cache if leaf is CACHE else leaf


def _contents_by_name(layers: list[Any]) -> Contents:
    """Return the values of all attributes of the cache layers, by layer number and attribute name.

    The keys of the result are `(layer number, attribute name, key)`. If an attribute is a dict,
    each of its entries is listed with its own key. Otherwise `key` is None.
    """
    contents: Contents = {}
    for number, layer in enumerate(layers):
        for name, value in vars(layer).items():
            inner = value if isinstance(value, dict) else {None: value}
            contents |= {(number, name, key): one for key, one in inner.items()}
    return contents


def _parts(layers: list[Any]) -> list[object]:
    """Return the layers and their attributes as a list of objects, to detect replaced attributes.

    This runs before each decode step, so it must be fast.
    """
    values = [value for layer in layers for value in vars(layer).values()]
    inner = [one for value in values if type(value) is dict for one in value.values()]
    return [*layers, *values, *inner]


def _moved(before: Contents, after: Contents) -> str:
    """Return a message about a cache layer that replaced an attribute during a step, or "" if none
    did."""
    for key in before | after:
        if before.get(key) is not after.get(key):
            number, name, _ = key
            return f"layer {number}: its cache replaces {name} after each token"
    return ""
