"""`IndexCache`: a transformers cache whose full-attention layers store their tokens in an index.

transformers passes keys and values to the cache's `update()`, and queries to the attention
function. The cache connects both calls: `update()` marks the layer as pending and returns only the
new tokens. The attention function, which runs next, takes the pending layer and appends the keys
and values that it receives, because the model's class may have changed them in between
(`IndexedLayer.attend`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvindex.core import check
from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.parallel import check_whole
from kvindex_adapters.common.prompt import Conversation
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.count import Count
from kvindex_adapters.hf.cache.layer import (
    IndexedLayer,
    LayerFactory,
    check_crop,
    repeated,
    selected,
)
from kvindex_adapters.hf.cache.layer_kinds import indexed_layer
from kvindex_adapters.hf.cache.padding import Padding
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.hf.cache.saving import load_cache, save_cache
from kvindex_adapters.hf.cache.sliding import Ring, SlidingLayer
from kvindex_adapters.hf.cache.takeover import check_past, fill
from kvindex_adapters.hf.model.attachment import Attachment
from kvindex_adapters.hf.model.info import layer_device
from kvindex_adapters.hf.unsupported import check_dense, has_full_attention

ROWS = "cache.layers[i].keys and .values for shape, dtype and device: the rows are in an index"
REPLACED = {
    "key_cache": ROWS,
    "value_cache": ROWS,
    "to_legacy_cache": "cache.fork() for a copy, or cache.save(folder) for a file",
    "from_legacy_cache": "model(ids, past_key_values=cache), which reads the prompt",
    "seen_tokens": "cache.get_seq_length()",
    "_seen_tokens": "cache.get_seq_length()",
    "get_usable_length": "cache.get_seq_length()",
}
"""Attribute of a cache in earlier versions of transformers -> its replacement here."""


class Checkpoint(NamedTuple):
    """The state of a cache at one time.

    Args:
        steps: Number of steps that the decoder had begun.
        layers: The layers of the cache.
        states: The state of each layer.
    """

    steps: int
    layers: list[Any]
    states: list[Any]


class StepGraph(Protocol):
    """The methods that a cache needs of its `TokenGraph`, which replays decode steps."""

    @property
    def report(self) -> str:
        """How many decode steps were replays, and why the last one was not."""
        ...

    def forget(self) -> None:
        """Drop the graph, because the layers of the cache were replaced."""
        ...

    def look_again(self) -> None:
        """Read the padding again, because the tokens of the cache have changed."""
        ...

    def another(self) -> StepGraph:
        """Make an empty graph for a copy of the cache."""
        ...


class IndexCache(DynamicCache):
    """The cache that `attach` yields. Pass it, or a `copy.deepcopy` of it, as `past_key_values`.

    An index replaces only the full attention of the model's layers. Layers with sliding-window or
    linear attention keep transformers' own cache layers, and so do the `dense_layers` of `attach`.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        make: LayerFactory,
        dense_layers: Sequence[int],
        attachment: Attachment,
        token_graph: StepGraph | None = None,
    ) -> None:
        super().__init__(config=config)
        full = [i for i, layer in enumerate(self.layers) if has_full_attention(layer)]
        # transformers 5.17 makes no cache layer for a layer that uses the keys of another one
        layers = max(len(self.layers), 1 + max(attachment.sharing, default=-1))
        check_dense(dense_layers, layers, full, attachment.sharing)
        self.indexed = [i for i in full if i not in dense_layers]
        """Numbers of the layers that have an index."""
        self.attachment = attachment
        """State of the `attach` that yielded this cache."""
        self.padding = Padding()
        """Padding of the current step."""
        self.ids: Tensor | None = None
        """Ids int64 `[N]` of all tokens, or None if other calls than `read` and `generate` added
        some."""
        self.conversation: Conversation | None = None
        """The messages that `read` and `generate` appended. It is outdated (other tokens came after
        it) if its `ids` are not the same tensor object as `ids` of the cache."""
        self.tokens: Tensor | None = None
        """Ids int64 `[B, T]` of the tokens of the current step, if they are known."""
        self.rereads = 0
        """Number of tokens of the next step, if that step must read all tokens again; else 0."""
        self.token_graph = token_graph
        """Replays decode steps as a CUDA graph where possible, or None."""
        self.attend_override: Callable[..., Tensor] | None = None
        """Called instead of `IndexedLayer.attend` while a decode step is traced or captured."""
        self.on_branch: Callable[[str], None] | None = None
        """Called for each branch on the number of tokens while a decode step is traced."""
        self.steps = 0
        """Number of steps that the decoder has begun, including those that were undone."""
        self._config, self._make = config, make
        self._broken: str | None = None
        self.layers = self._empty_layers()
        # store layer numbers, so that finding these layers before each decode step is fast
        self._windows = [i for i, one in enumerate(self.layers) if isinstance(one, SlidingLayer)]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Receive the keys and values of a layer; transformers calls this.

        Args:
            key_states: `[B, G, T, D]`, usually after the rotary embedding.
            value_states: `[B, G, T, Dv]`.
            layer_idx: Number of the layer.
            *args: Further arguments of transformers.
            **kwargs: Further arguments of transformers.

        Returns:
            The same tensors for a layer with an index; for other layers, all keys and values that
            the newest token attends to.

        Raises:
            UnsupportedError: The previous `update` was not followed by the attention function.
            RuntimeError: The `attach` context has ended, a step has failed half way, or another
                thread is in a call.
        """
        self.attachment.exclusive.check()
        self.check_usable()
        self.check_attended()
        layer, states = self.layers[layer_idx], (key_states, value_states)
        if not isinstance(layer, IndexedLayer):  # a layer with an index appends them in `attend`
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.attachment.set_pending(self, layer, states)
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer.

        While a decode step is traced, the number is a `Count`, which reports branches on it.
        """
        length: int = super().get_seq_length(layer_idx)
        if self.on_branch is None or self.attachment.exclusive.used_by_other_thread:
            return length
        return Count.of(length, self.on_branch)

    @property
    def is_initialized(self) -> bool:
        """True if the cache has received a token since it was made or reset."""
        # layers with only linear attention have no such attribute
        return any(getattr(layer, "is_initialized", False) for layer in self.layers)

    if not TYPE_CHECKING:  # type checkers would otherwise accept any attribute name

        def __getattr__(self, name: str) -> NoReturn:
            instead = f"; use {REPLACED[name]}" if name in REPLACED else ""
            raise AttributeError(f"cache: got no attribute {name!r}{instead}", name=name, obj=self)

    def check_attended(self) -> None:
        """Raise UnsupportedError if the attention function did not run after an `update`."""
        if self.attachment.take_pending() is not None:
            raise UnsupportedError(
                "model: its attention does not go through transformers' AttentionInterface, or it "
                "is not the model that this cache was attached to"
            )

    def check_usable(self) -> None:
        """Raise RuntimeError if the context has ended, or a step has failed half way."""
        if self.attachment.closed:
            raise RuntimeError(
                "past_key_values: got a cache whose attach() context has closed; attach again"
            )
        if self._broken:
            raise RuntimeError(f"past_key_values: {self._broken}; call reset() first")

    @property
    def usable(self) -> bool:
        """True unless a step has failed half way and could not be undone."""
        return self._broken is None

    def attention_layers(self) -> list[AttentionLayer]:
        """Return the attention layers that have an index and at least one token."""
        made = [layer.attention for layer in self._indexed()]
        return [one for one in made if one is not None and one.tokens]

    def indexes(self) -> list[KVIndex]:
        """Return the indexes of `attention_layers()`."""
        return [layer.index for layer in self.attention_layers()]

    def report(self, *, all_ranks: bool = False) -> Report:
        """Report the rows that searching steps have read so far, and the memory of the cache.

        Any thread may call this at any time. During a step, some layers may already include the new
        tokens, and others not yet.

        Args:
            all_ranks: Add up the reports of all processes. All of them must call this
                (`Report.over_ranks`).

        Returns:
            The report.
        """
        others = [layer for layer in self.layers if not isinstance(layer, IndexedLayer)]
        other = sum(map(_nbytes, others)) if others else None
        report = sum_up(self.attention_layers(), len(self._indexed()), other)
        graph = None if self.token_graph is None else self.token_graph.report
        report = replace(report, graph=graph)
        return report.over_ranks() if all_ranks else report

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens.

        Args:
            tokens_to_remove: Minus the number of tokens to remove, or 0. Positive numbers are not
                allowed, because their meaning depends on the version of transformers.

        Raises:
            ValueError: `tokens_to_remove` is above 0.
            RuntimeError: A sliding window no longer stores the rows before the removed tokens.
        """
        removed = check_crop(tokens_to_remove)
        self._change_all(lambda layer: layer.crop(removed))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`.

        Args:
            beam_idx: Indices of sequences, int64 `[B]`.
        """
        self._change_all(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times; copies of a sequence are adjacent.

        Args:
            repeats: At least 1.
        """
        self.reorder_cache(repeated(self._batch, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the selected sequences of the batch.

        This calls `reorder_cache` of every layer. Some of transformers' layers with linear
        attention have no `batch_select_indices`, or one that does not change their states.

        Args:
            indices: Indices of the sequences, int64, or bool `[B]`, True for those to keep.

        Raises:
            ValueError: A shape or an index does not fit.
            TypeError: `indices` is not such a tensor.
        """
        self.reorder_cache(selected(self._batch, indices))

    def reset(self) -> None:
        """Remove all tokens. Afterwards the cache can be used again, even after a failed step."""
        with self.attachment.exclusive():
            self.layers = self._empty_layers()
            self.attachment.take_pending()
            self.ids = self._broken = None
            if self.token_graph is not None:
                self.token_graph.forget()

    def restart(self) -> None:
        """Remove all tokens inside a transaction. `rollback` restores them."""
        self.layers = self._empty_layers()
        self._look_again()

    def lengths(self) -> list[int]:
        """Return the number of tokens of each layer with an index."""
        return [layer.get_seq_length() for layer in self._indexed()]

    def checkpoint(self) -> Checkpoint:
        """Return the state of the cache, for `rollback`.

        As long as the result exists, the rows of layers without an index stay in memory, and so do
        all layers that `restart` or `reset` replace.
        """
        states = [
            layer.checkpoint() if isinstance(layer, IndexedLayer) else _attributes(layer)
            for layer in self.layers
        ]
        return Checkpoint(self.steps, self.layers, states)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Restore the state of `checkpoint`. If that fails, the cache must be `reset()`."""
        self.attachment.take_pending()
        self._look_again()
        self._broken = "a step failed half way and could not be undone"
        steps, layers, states = checkpoint
        if self.overwrites and all(states[number] is None for number in self.indexed):
            self.layers = self._empty_layers()  # new layers also reset linear attention
            self._broken = None
            return
        self.layers = layers
        for layer, before in zip(layers, states, strict=True):
            if isinstance(layer, IndexedLayer):
                layer.rollback(before)
            else:
                vars(layer).update(before)
        if (
            not self.overwrites or self.steps == steps
        ):  # the state of linear attention is valid if no step ran
            self._broken = None

    def undo(self, checkpoint: Checkpoint, ids: Tensor | None) -> None:
        """Restore the layers and the ids of the tokens.

        Args:
            checkpoint: The value that `checkpoint()` returned.
            ids: The value of `self.ids` at that time.
        """
        self.rollback(checkpoint)
        self.ids = ids

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the state at the beginning of the context if the body raises."""
        self.check_usable()
        before, ids = self.checkpoint(), self.ids
        try:
            yield
        except BaseException:  # KeyboardInterrupt, too
            self.undo(before, ids)
            raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save all layers, the ids and messages of the tokens if known, and the model's identity.

        To identify the model, it is run on a few fixed tokens without this cache. If the call
        fails, no folder remains. `load` reads the folder.

        Args:
            folder: A new folder.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The cache is empty.
            RuntimeError: The model fails for the fixed tokens.
        """
        with self.attachment.exclusive():
            self.check_usable()
            self.check_attended()
            check.at_least("len(cache)", self.get_seq_length(), 1)
            check_whole(self.decoder)
            model = self.decoder, self._config
            save_cache(folder, self.layers, self.ids, *model, self.conversation)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Fill this empty cache from a saved one.

        Model and indexes must be the same. `k`, `coverage`, `dense_below`, device, store and
        backend may differ. A call that fails leaves this cache unchanged.

        Args:
            folder: The folder that `save` has written.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder has changed since it was saved, it belongs to another model or to
                other indexes or sizes of regions, or this cache stores tokens.
            RuntimeError: The model fails for a few fixed tokens.
        """
        with self.attachment.exclusive():
            self.check_usable()
            check_whole(self.decoder)
            self._check_empty()
            layers = self._empty_layers()
            known = load_cache(folder, layers, self.decoder, self._config)
            self.layers, (self.ids, self.conversation) = layers, known
            self._look_again()

    def from_cache(
        self,
        past: DynamicCache,
        *,
        ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> IndexCache:
        """Copy the contents of a filled cache of transformers into this empty cache.

        Keys and values of full attention go into the indexes; sliding windows and the states of
        linear attention are copied. `past` does not change, and shares no memory with this cache.
        The next call continues as if the attached model had read the prompt here in one chunk. To
        find how each layer attends, the model is run on two tokens. A call that fails leaves this
        cache unchanged.

        Args:
            past: A `DynamicCache` that the same model has filled outside of any `attach`.
            ids: The token ids of `past`, int64 `[B, N]` (or `[N]` for one sequence). They are only
                needed for `kvhf.generate` and for indexes that read the text.
            attention_mask: `[B, N]`, 0 for padding; None if no token is padding.

        Returns:
            This cache.

        Raises:
            TypeError: `past` is another kind of cache.
            ValueError: This cache stores tokens; `past` stores none; a layer of `past` has another
                class, length, shape, dtype or device than this model requires; or the index learns
                from the queries of a prompt, which no cache stores.
        """
        with self.attachment.exclusive():
            self.check_usable()
            self._check_empty()
            ids, valid = check_past(past, ids, attention_mask)
            probe = ProbeCache.of(self)
            probe.run()
            layers = self._empty_layers()
            fill(layers, past, probe.layers, ids, valid)
            self.layers = layers
            known = ids is not None and len(ids) == 1 and valid is None
            self.ids = ids[0].clone() if ids is not None and known else None
            self._look_again()
        return self

    def _check_empty(self) -> None:
        """Raise ValueError if this cache stores tokens."""
        if length := self.get_seq_length():
            raise ValueError(
                f"cache: got one that holds {length} tokens, allowed is an empty one, or reset()"
            )

    @contextmanager
    def attending_by(
        self, attend: Callable[..., Tensor], on_branch: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Inside the context, let layers attend by calling `attend`, and treat all tokens as real.

        Args:
            attend: Called instead of `IndexedLayer.attend`, with that call as its first argument.
            on_branch: Called for each branch on the number of tokens, as in `Count`.
        """
        self.attend_override, self.on_branch, self.padding.all_real = attend, on_branch, True
        try:
            yield
        finally:
            self.attend_override = self.on_branch = None
            self.padding.forget()

    def count_replay(self, replay: Callable[[], None]) -> None:
        """Append one token to all layers by replaying a graph; if that fails, remove it."""
        before, ids, self.ids = self.get_seq_length(), self.ids, None
        self.steps += 1
        self._broken = "a token failed half way and could not be undone"
        try:
            replay()
            for layer in self.attention_layers():
                layer.count_replay()
            self.count_rolled()
        except BaseException:
            self.undo_replay(before, ids)
            raise
        self._broken = None

    def undo_replay(self, length: int, ids: Tensor | None) -> None:
        """Remove the token that a replayed graph has appended.

        Args:
            length: Tokens in the cache before the replay.
            ids: The value of `self.ids` before the replay.
        """
        self._broken = "a token failed half way and could not be undone"
        for layer in self.attention_layers():
            layer.truncate(length)
        for window in self._rolled():
            window.go_back(length)
        if not self.overwrites:
            self._broken, self.ids = None, ids

    def roll(self) -> None:
        """Move the rows of sliding windows into rings, to which a graph can append."""
        layers = [layer for layer in self.sliding() if layer.ring is None]
        real = self.attention_layers()[0].valid if layers else None
        for layer in layers:
            layer.roll(real)

    def count_rolled(self) -> None:
        """Count the token that the device has appended to the rings."""
        for ring in self._rolled():
            ring.length += 1

    @property
    def decoder(self) -> nn.Module:
        """The module whose calls are steps of this cache."""
        assert self.attachment.decoder is not None
        return self.attachment.decoder

    @property
    def overwrites(self) -> bool:
        """True if a layer has linear attention, whose steps overwrite its state."""
        return any(hasattr(layer, "recurrent_states") for layer in self.layers)

    def _look_again(self) -> None:
        if self.token_graph is not None:
            self.token_graph.look_again()

    def _change_all(self, change: Callable[[Any], None]) -> None:
        """Apply `change` to every layer; if it raises for one layer, restore all layers."""
        before: list[tuple[Any, dict[str, Any], Any]] = []
        ids, broken = self.ids, self._broken
        try:
            with self.attachment.exclusive():
                before = [(layer, _attributes(layer), _checkpoint(layer)) for layer in self.layers]
                self.ids = None
                self._look_again()
                # Change layers without an index first: they may raise, and they can be restored
                # because they make new tensors.
                for layer in sorted(self.layers, key=lambda one: isinstance(one, IndexedLayer)):
                    change(layer)
        except BaseException:
            if before:
                self._broken = "a change of the cache failed half way"
                for layer, attributes, checkpoint in before:
                    vars(layer).update(attributes)
                    if isinstance(layer, IndexedLayer):
                        layer.rollback(checkpoint)
                self._broken, self.ids = broken, ids
            raise

    def _empty_layers(self) -> list[Any]:
        """Make new layers without tokens. Transformers' own `reset` would zero tensors in place."""
        layers = DynamicCache(config=self._config).layers
        for i in self.indexed:
            layers[i] = indexed_layer(layers[i], partial(self._make, i), self.padding)
        if self.token_graph is not None:
            for i, layer in enumerate(layers):
                if type(layer) is DynamicSlidingWindowLayer:
                    layers[i] = SlidingLayer(layer.sliding_window)
        return layers

    def fork(self) -> IndexCache:
        """Return an independent copy of the cache, for the same model and context.

        Only the rows of sink and window are copied. The rows and codes of the indexes are shared
        until both caches have appended to them (docs/adapters/several-questions.md).
        `copy.deepcopy(cache)` does the same.

        Returns:
            The copy.
        """
        return deepcopy(self)

    def restore(self, fork: IndexCache) -> None:
        """Restore the state of a fork of this cache.

        Args:
            fork: Made by `fork()` of this cache. It must not be used afterwards, because its layers
                become those of this cache.
        """
        with self.attachment.exclusive():
            self.attachment.take_pending()
            self.layers, self.padding, self.ids = fork.layers, fork.padding, fork.ids
            self.conversation, self._broken = fork.conversation, fork._broken
            if self.token_graph is not None:  # its graph reads the replaced layers
                self.token_graph.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexCache:
        """Make an independent copy, for the same model and context."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        memo[id(self.attachment)] = self.attachment
        memo[id(self._config)] = self._config
        memo[id(self._make)] = self._make
        if self.token_graph is not None:  # a graph reads the layers of one cache
            memo[id(self.token_graph)] = self.token_graph.another()
        with self.attachment.exclusive():
            for layer in self.layers:
                if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, SlidingLayer):
                    # the copy can share these tensors, because such layers never write to them
                    memo |= {id(rows): rows for rows in (layer.keys, layer.values)}
            other.__dict__.update(deepcopy(vars(self), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cache: got pickle or copy.copy, allowed is copy.deepcopy(cache) inside its attach() "
            "context; for another process, cache.save(folder) and cache.load(folder)"
        )

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "iteration over keys and values: the rows are in the indexes' stores"
        )

    @property
    def _batch(self) -> int:
        """Number of sequences in the batch, 0 for an empty cache."""
        return next((layer.batch_size for layer in self.attention_layers()), 0)

    def _indexed(self) -> list[IndexedLayer]:
        return [self.layers[number] for number in self.indexed]

    def sliding(self) -> list[SlidingLayer]:
        """Return the sliding-window layers whose rows can be stored in a ring."""
        return [self.layers[number] for number in self._windows]

    def _rolled(self) -> list[Ring]:
        return [ring for layer in self.sliding() if (ring := layer.ring) is not None]


class ProbeCache(IndexCache):
    """A temporary cache of two tokens, which shows how the layers of the attached model attend."""

    given: dict[int, tuple[Tensor, Tensor]]  # number of a layer -> keys and values of `update`

    @classmethod
    def of(cls, cache: IndexCache) -> ProbeCache:
        """Make a probe for the model of an empty cache.

        Args:
            cache: An empty cache of the attached model. It does not change.
        """
        probe = cls.__new__(cls)
        probe.__dict__.update(vars(cache.fork()))
        probe.token_graph, probe.given = None, {}
        return probe

    def run(self) -> None:
        """Let the model read two tokens.

        Raises:
            UnsupportedError: A layer attends to other keys or values than it passes to its cache.
        """
        read: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(plain: Callable[[], Tensor], layer: Any, *given: Any, **terms: Any) -> Tensor:
            if given[1] is not None:  # None for a layer that uses the keys of another layer
                read[self.layers.index(layer)] = given[1]
            return plain()

        # Two tokens, because the rotary embedding does not change the first one. Not the padding
        # token, whose keys and values may be 0.
        token = int(getattr(self._config, "pad_token_id", None) == 0)
        ids = torch.full((1, 2), token, device=layer_device(self.decoder, 0))
        with torch.no_grad(), self.attending_by(attend):
            self.decoder(input_ids=ids, past_key_values=self, use_cache=True)
        for number, rows in read.items():
            geometry = self.layers[number].attention.index.geometry
            if not geometry.value_in_key and not all(map(torch.equal, rows, self.given[number])):
                raise UnsupportedError(
                    f"past: layer {number} of the model attends to other keys or values than it "
                    "passes to its cache, so the prompt must be read inside attach()"
                )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Record the keys and values, and pass them to `IndexCache.update`."""
        self.given[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _checkpoint(layer: Any) -> Any:
    """Return the checkpoint of a layer with an index, and None for other layers."""
    return layer.checkpoint() if isinstance(layer, IndexedLayer) else None


def _nbytes(layer: Any) -> int:
    """Count the bytes of a layer without an index, while another thread may change the layer."""
    if isinstance(layer, SlidingLayer):
        return layer.nbytes()
    rows = [getattr(layer, name, None) for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in rows if tensor is not None)


def _attributes(layer: Any) -> dict[str, Any]:
    """Copy a layer's attributes. Tensors are not copied, because a step makes new ones."""
    if isinstance(layer, SlidingLayer):
        layer.settle()  # move rows out of the ring, to which steps write in place
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(layer).items()
    }
