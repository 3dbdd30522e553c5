"""`TokenGraph`: the forward of one token of a transformers model as one CUDA graph.

A forward can be captured if two tokens in a row do the same: some are traced, operation by
operation (`trace.Trace`). From then on tokens are replays, as long as what the graph reads lies
where it lay: weights, modules, layers of the cache, and what the indexes say. Any other token runs
as ever.
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
"""Tokens that are traced for a graph, at most: the first ones may make what later ones read."""

SHORT, SHORT_GRAPHS = 8, 3
"""Replays that a graph is worth; after so many graphs in a row of fewer no more are captured."""

CACHE = object()
"""Stands for the cache in a graph's output."""

Forward = Callable[..., Any]
Contents = dict[tuple[int, str, object], object]


class TokenGraph:
    """The single tokens of one cache: replays where they can be.

    It holds no cache, so that one that nobody holds is gone at once. asked: whether a user asked
    for it. Else a driver that refuses is no warning, and a module whose forward was replaced by
    another is called.
    """

    raises = False
    """Whether what fails in `run` is the caller's error; else the token runs as ever."""
    first, replayed = "it was compared with the next", "replays"
    """What the report says of a token that `run` computes, and calls those that a graph does."""

    def __init__(self, *, asked: bool = True) -> None:
        self.asked = asked
        self._comparing = False
        self._tokens = self._replays = 0
        self._reason = ""
        self.forget()

    @property
    def report(self) -> str:
        """How many single tokens were replays, and why the last one was not."""
        said = f"{self._replays} of {self._tokens} tokens were {self.replayed}"
        return f"{said}; the last was not: {self._reason}" if self._reason else said

    def forget(self) -> None:
        """Hold nothing of the tokens so far."""
        self._inputs = TokenInputs()
        self._begin()

    def another(self) -> TokenGraph:
        """One for a copy of the cache."""
        return TokenGraph(asked=self.asked)

    def look_again(self) -> None:
        """The cache has changed: other tokens may be padded."""
        self._inputs.look_again()

    def _begin(self) -> None:
        self._refused = ""
        self._short = 0  # graphs in a row that were hardly replayed
        self._since = SHORT  # replays of the last graph
        self._compare_anew(traces=0)

    def _compare_anew(self, traces: int) -> None:
        """Tokens are traced until two of them are alike; traces: that there were since a graph."""
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
        """Whether a call, by its arguments, is a token that `replay` gives: it is captured by now.

        forward: what is called, with all arguments by name.
        """
        self._comparing = False
        if not is_one_token(given):
            self._inputs.look_again()
            return False
        self._tokens += 1
        layers = cache.attention_layers()
        self._reason = (
            self._refusal(cache, layers, given)
            # of a graph's layers `prepare_replay` asks the same
            or ("" if self._graph is not None else layer_refusal(cache))
            or self._inputs.mask_refusal(given.get(MASK), layers[0])
        )
        if self.checks and not self._reason and cache.overwrites and not self.asked:
            self._reason = "padding: got some beside linear attention, which cannot be checked"
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
        """Whether `run` compares the call with the one before or after it."""
        return self._comparing

    @property
    def checks(self) -> bool:
        """Whether what `run` gives must be compared with a call by all arguments.

        Where rows are padded a model may do more with the mask than its attention does, which
        `run` does not pass on.
        """
        return self._inputs.padded

    def give_up(self, why: str) -> None:
        """A token that was compared has failed, maybe because it was: compare no more."""
        self._comparing, self._last = False, None
        self._refused = self._reason = why

    def replay(self, cache: IndexCache) -> Any:
        """What the decoder gives for the token that was taken."""
        assert self._graph is not None
        assert self._output is not None
        cache.count_replay(self._graph.replay)
        self._replays += 1
        self._since += 1
        leaves, structure = self._output
        return tree_unflatten([_given_back(leaf, cache) for leaf in leaves], structure)

    def run(self, forward: Forward, cache: IndexCache, **given: Any) -> Any:
        """What the decoder gives for a call that is no replay, operation by operation."""
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
        """Why a call of one token can be no graph of this kind; "" where it can."""
        return refusal(cache, layers, given)

    # Whether tokens are alike

    def _compare(self, cache: IndexCache, trace: Trace, before: Contents) -> None:
        """Compare a token with the one before it, and what layers of the cache held around it."""
        module, last, after = self._module, self._last, _contents_by_name(cache.layers)
        assert module is not None
        why = _moved(before, after) or (last and difference(last, trace))
        if module.hooked:
            why = f"{module.hooked}: got a hook, which no replay would call"
        elif module.replaced and not self.asked:
            why = f"{module.replaced}: got a forward of its own, which no replay would call"
        elif module.compiled:
            why = f"{module.compiled}: got a compiled call, of which no trace tells"
        self._traces, self._last = self._traces + 1, trace
        if last is not None and not why:
            self._alike, self._contents, self._last = True, _parts(cache.layers), None
        elif self._traces >= TRACES:
            self._refused, self._last = why or "model: got other weights all the time", None

    def _unchanged(self, cache: IndexCache) -> bool:
        """Whether model and layers hold what they held when tokens were alike."""
        module, held = self._module, _parts(cache.layers)
        same = len(held) == len(self._contents) and all(map(is_, held, self._contents))
        return same and module is not None and module.unchanged

    # The graph

    def _ready(self, forward: Forward, cache: IndexCache, layers: list[AttentionLayer]) -> str:
        """Why there is no graph to replay now; "" where there is one."""
        reads = [layer.prepare_next() or layer.prepare_replay() for layer in layers]
        if None in reads:
            return layer_refusal(cache)
        if self._graph is not None and all(map(is_, reads, self._reads)):
            return ""
        self._short = self._short + 1 if self._since < SHORT else 0
        self._drop()
        if self._short >= SHORT_GRAPHS:
            self._refused = f"what it reads moved {self._short} times within {SHORT} tokens"
        else:
            self._capture(forward, cache)
        self._reads = reads
        return self._refused

    def _capture(self, forward: Forward, cache: IndexCache) -> None:
        """The graph of a token; a driver that refuses is not asked again."""
        outputs: list[Any] = []

        def work() -> None:
            outputs.append(self._forward(forward, cache))

        device = _device(cache)
        try:
            with cache.attending_by(_attend_captured):
                self._graph = GRAPHS[device.type](device, work)
        except Exception as error:
            self._refused = f"the driver refuses to capture it ({error})"
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
        """What a graph does: the model's forward of the token that was taken."""
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
    """A layer's step, as one operation."""
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
    """A layer's step in a graph: of a token that is real, and that no index is told of."""
    return layer.attend_captured(queries, *rows, **terms)


def _device(cache: IndexCache) -> torch.device:
    return cache.attention_layers()[0].index.geometry.device


def _given_back(leaf: Any, cache: IndexCache) -> Any:
    """A part of a graph's output that the next replay leaves alone."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return cache if leaf is CACHE else leaf


def _contents_by_name(layers: list[Any]) -> Contents:
    """What layers of a cache hold, those mappings as what is in them."""
    held: Contents = {}
    for number, layer in enumerate(layers):
        for name, value in vars(layer).items():
            inner = value if isinstance(value, dict) else {None: value}
            held |= {(number, name, key): one for key, one in inner.items()}
    return held


def _parts(layers: list[Any]) -> list[object]:
    """Layers and the values of `_held`, in few calls: it is asked before each token."""
    values = [value for layer in layers for value in vars(layer).values()]
    inner = [one for value in values if type(value) is dict for one in value.values()]
    return [*layers, *values, *inner]


def _moved(before: Contents, after: Contents) -> str:
    """Which layer of a cache counts on the host, or makes a new tensor for each token; "": none."""
    for key in before | after:
        if before.get(key) is not after.get(key):
            number, name, _ = key
            return f"layer {number}: its cache has another {name} after each token"
    return ""
