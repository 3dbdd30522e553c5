"""`IndexCache`: a transformers cache whose full-attention layers store their tokens in an index.

transformers first passes a layer's new keys and values to `update()`, and then calls the attention
function with queries, keys and values. `update()` only records that this layer's attention is due,
and returns the new keys and values unchanged. The attention function appends the keys and values
that it receives, because the model may have changed them after `update()` (`IndexedLayer.attend`).
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
from kvindex_adapters.hf.cache.prompt_rows import ExpectedPrompt
from kvindex_adapters.hf.cache.recording import check_window, stop_recording
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.hf.cache.saving import load_cache, save_cache
from kvindex_adapters.hf.cache.sliding import Ring, SlidingLayer
from kvindex_adapters.hf.cache.takeover import check_past, fill
from kvindex_adapters.hf.model.attachment import Attachment
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import layer_device
from kvindex_adapters.hf.unsupported import check_dense, has_full_attention

ROWS = "cache.layers[i].keys and .values for shape, dtype and device: the rows are in an index"
REPLACED = {
    "key_cache": ROWS,
    "value_cache": ROWS,
    "to_legacy_cache": "cache.fork() for a copy, or cache.save(folder) for a file",
    "from_legacy_cache": f"model(ids, {CACHE}=cache), which reads the prompt",
    "seen_tokens": "cache.get_seq_length()",
    "_seen_tokens": "cache.get_seq_length()",
    "get_usable_length": "cache.get_seq_length()",
}
"""Maps attributes that caches of older versions of transformers have to their replacements."""


class Checkpoint(NamedTuple):
    """A snapshot of a cache, for `IndexCache.rollback`.

    Args:
        steps: Value of `IndexCache.steps`, the number of forward passes so far.
        layers: The layers of the cache.
        states: The state of each layer.
    """

    steps: int
    layers: list[Any]
    states: list[Any]


class StepGraph(Protocol):
    """Protocol with the methods of `TokenGraph` that a cache calls.

    A `TokenGraph` replays decode steps as a CUDA graph.
    """

    @property
    def report(self) -> str:
        """A text that says how many decode steps were replays of a CUDA graph.

        If the last decode step was not a replay, the text also gives the reason.
        """
        ...

    def forget(self) -> None:
        """Delete the graph, because the layers of the cache were replaced."""
        ...

    def look_again(self) -> None:
        """Look for padding in the cache again before the next replay of the graph.

        Call this when tokens were added or removed without a replay.
        """
        ...

    def another(self) -> StepGraph:
        """Make a `TokenGraph` without a captured graph, for a copy of the cache."""
        ...


class IndexCache(DynamicCache):
    """The cache that `attach` yields. Pass the cache, or its `copy.deepcopy`, as `past_key_values`.

    Only full-attention layers have an index. Sliding-window layers, linear-attention layers and the
    `dense_layers` of `attach` keep transformers' own cache layers.
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
        # transformers 5.17 makes no cache layer for a layer that uses the keys of another layer
        layers = max(len(self.layers), 1 + max(attachment.sharing, default=-1))
        check_dense(dense_layers, layers, full, attachment.sharing)
        self.indexed = [i for i in full if i not in dense_layers]
        """Numbers of the layers that have an index."""
        self.attachment = attachment
        """The state of the `attach` call that yielded this cache."""
        self.padding = Padding()
        """The padding of the current forward pass."""
        self.ids: Tensor | None = None
        """Ids int64 `[N]` of all tokens. None if a call other than `kvhf.read` or `kvhf.generate`
        added tokens."""
        self.conversation: Conversation | None = None
        """The chat messages that `kvhf.read` and `kvhf.generate` appended. Valid only if
        `conversation.ids` is the same tensor object as `self.ids`; otherwise other tokens were
        added later."""
        self.tokens: Tensor | None = None
        """Ids int64 `[B, T]` of the new tokens in the current forward pass, or None if unknown."""
        self.rereads = 0
        """Number of tokens of the whole sequence, if the next forward pass must process it again.

        Otherwise 0.
        """
        self.token_graph = token_graph
        """Object that replays decode steps as a CUDA graph where possible. None if graphs are off.
        """
        self.attend_override: Callable[..., Tensor] | None = None
        """Function to call instead of `IndexedLayer.attend` while a decode step is traced or
        captured."""
        self.on_branch: Callable[[str], None] | None = None
        """Function to call when a traced decode step branches on the number of tokens."""
        self.steps = 0
        """Number of forward passes that the decoder has started, including failed ones."""
        self.chunk_unit = 1
        """Chunks of a prompt should end at multiples of this number of tokens in the sequence."""
        self._config, self._make = config, make
        self._broken: str | None = None
        self.layers = self._empty_layers()
        # numbers of the sliding-window layers, stored because looking for them in each decode step
        # takes time
        self._windows = [i for i, one in enumerate(self.layers) if isinstance(one, SlidingLayer)]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Receive the new keys and values of a layer. transformers calls this method.

        Args:
            key_states: `[B, G, T, D]`, usually after the rotary embedding.
            value_states: `[B, G, T, Dv]`.
            layer_idx: Number of the layer.
            *args: Further positional arguments of transformers.
            **kwargs: Further keyword arguments of transformers.

        Returns:
            For a layer with an index, the given tensors. For other layers, the keys and values of
            all tokens that the newest token attends to.

        Raises:
            UnsupportedError: The attention function was not called after the previous `update`.
            RuntimeError: The `attach` context has ended, a forward pass has failed half way, or
                another thread is using the model.
        """
        self.attachment.exclusive.check()
        self.check_usable()
        self.check_attended()
        layer, states = self.layers[layer_idx], (key_states, value_states)
        # a layer with an index appends keys and values later, in `attend`
        if not isinstance(layer, IndexedLayer):
            states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.attachment.set_pending(self, layer, states)
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in a layer.

        While a decode step is traced, the result is a `Count`: an int that reports when the model
        branches on the number of tokens.
        """
        length: int = super().get_seq_length(layer_idx)
        if self.on_branch is None or self.attachment.exclusive.used_by_other_thread:
            return length
        return Count.of(length, self.on_branch)

    def __repr__(self) -> str:
        tokens = max((layer.tokens for layer in self.attention_layers()), default=0)
        count, others = len(self.indexed), len(self.layers) - len(self.indexed)
        layers = (
            f"{count} indexed and {others} other layers" if others else f"{count} indexed layers"
        )
        return f"<{type(self).__name__} of {tokens} tokens in {layers}>"

    @property
    def is_initialized(self) -> bool:
        """True if any layer has received a token since the cache was made or reset."""
        # `getattr`, because linear-attention layers have no attribute `is_initialized`
        return any(getattr(layer, "is_initialized", False) for layer in self.layers)

    if not TYPE_CHECKING:  # with this method, type checkers would accept any attribute name

        def __getattr__(self, name: str) -> NoReturn:
            instead = f"; use {REPLACED[name]}" if name in REPLACED else ""
            raise AttributeError(f"cache: got no attribute {name!r}{instead}", name=name, obj=self)

    def check_attended(self) -> None:
        """Raise UnsupportedError if the attention function was not called after the last
        `update`."""
        if self.attachment.take_pending() is not None:
            raise UnsupportedError(
                "model: got a model whose attention does not go through transformers' "
                "AttentionInterface, or another model than the one that this cache is attached to"
            )

    def check_usable(self) -> None:
        """Raise RuntimeError if the `attach` context has ended, or a forward pass has failed half
        way."""
        if self.attachment.closed:
            raise RuntimeError(
                f"{CACHE}: got a cache whose attach() context has ended; attach again"
            )
        if self._broken:
            raise RuntimeError(f"{CACHE}: {self._broken}; call reset() first")

    @property
    def usable(self) -> bool:
        """False if a forward pass has failed half way and could not be undone."""
        return self._broken is None

    def attention_layers(self) -> list[AttentionLayer]:
        """Return the `AttentionLayer` of each cache layer that has an index and contains tokens."""
        made = [layer.attention for layer in self._indexed()]
        return [one for one in made if one is not None and one.tokens]

    def expect_prompt(self, length: int | None) -> None:
        """Announce the length of the sequence at the end of the prompt that is read next.

        With `attach(prefill="sparse")`, the last tokens of a prompt attend to all tokens.

        Args:
            length: Number of tokens, those in the cache included. None withdraws the announcement.
        """
        with self.attachment.exclusive():
            indexed = self._indexed()
            prompt = None if length is None else ExpectedPrompt(length, len(indexed))
            for layer in indexed:
                layer.forget_prompt()
                layer.expected = prompt

    def indexes(self) -> list[KVIndex]:
        """Return the index of each layer that has an index and contains at least one token."""
        return [layer.index for layer in self.attention_layers()]

    def report(self, *, all_ranks: bool = False) -> Report:
        """Report how many rows decode steps have read from the indexes, and the memory in use.

        Any thread may call this at any time. During a step, some layers may already include the new
        tokens, and others not yet.

        Args:
            all_ranks: Add up the reports of all processes. All processes must then call this
                method.

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
            tokens_to_remove: The number of tokens to remove, negated: -3 removes 3 tokens. Positive
                values are rejected, because their meaning depends on the version of transformers.

        Raises:
            ValueError: `tokens_to_remove` is above 0.
            RuntimeError: A sliding-window layer has already discarded older tokens that the shorter
                sequence would need.
        """
        removed = check_crop(tokens_to_remove)

        def crop(layer: Any) -> None:
            layer.crop(removed)
            check_window(layer)

        self._change_all(crop)

    def stop_recording(self) -> None:
        """Delete the older tokens that assisted decoding has recorded in layers of fixed size."""
        for layer in self.layers:
            stop_recording(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`.

        Args:
            beam_idx: Indices of sequences, int64 `[B]`.
        """
        self._change_all(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch. The copies of a sequence are adjacent.

        Args:
            repeats: Number of copies of each sequence, at least 1.
        """
        self.reorder_cache(repeated(self._batch, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the selected sequences of the batch.

        This calls `reorder_cache` of every layer, because `batch_select_indices` is missing or does
        not select states in some linear-attention layers of transformers.

        Args:
            indices: Indices of the sequences to keep, int64. Or a bool mask `[B]`, True for the
                sequences to keep.

        Raises:
            ValueError: The shape is wrong, or an index is out of range.
            TypeError: `indices` is not an integer or bool tensor.
        """
        self.reorder_cache(selected(self._batch, indices))

    def reset(self) -> None:
        """Remove all tokens. This also makes a cache usable again after a failed forward pass."""
        with self.attachment.exclusive():
            self.layers = self._empty_layers()
            self.attachment.take_pending()
            self.ids = self._broken = None
            if self.token_graph is not None:
                self.token_graph.forget()

    def restart(self) -> None:
        """Remove all tokens, in a way that `rollback` can undo."""
        self.layers = self._empty_layers()
        self._look_again()

    def lengths(self) -> list[int]:
        """Return the number of tokens for each layer that has an index."""
        return [layer.get_seq_length() for layer in self._indexed()]

    def checkpoint(self) -> Checkpoint:
        """Return a snapshot of the cache, for `rollback`.

        The snapshot keeps tensors in memory: the keys and values of layers without an index, and
        any layers that `restart` or `reset` replaces.
        """
        states = [
            layer.checkpoint() if isinstance(layer, IndexedLayer) else _attributes(layer)
            for layer in self.layers
        ]
        return Checkpoint(self.steps, self.layers, states)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Return to the state that `checkpoint` recorded. If this fails, the cache can only be used
        after `reset()`."""
        self.attachment.take_pending()
        self._look_again()
        self._broken = (
            "got a cache with a forward pass that failed half way and could not be undone"
        )
        steps, layers, states = checkpoint
        if self.overwrites and all(states[number] is None for number in self.indexed):
            self.layers = self._empty_layers()  # new layers also have empty linear-attention states
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
        ):  # linear-attention states are valid only if no forward pass ran since the checkpoint
            self._broken = None

    def undo(self, checkpoint: Checkpoint, ids: Tensor | None) -> None:
        """Restore the layers and the token ids.

        Args:
            checkpoint: A result of `checkpoint()`.
            ids: The value of `self.ids` when the checkpoint was made.
        """
        self.rollback(checkpoint)
        self.ids = ids

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context manager that restores the cache if the `with` block raises an exception."""
        self.check_usable()
        before, ids = self.checkpoint(), self.ids
        try:
            yield
        except BaseException:  # including KeyboardInterrupt
            self.undo(before, ids)
            raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the cache to a folder: all layers, known ids and messages, and the model's identity.

        To identify the model, this runs the model on a few fixed tokens, without this cache. `load`
        reads the folder. A call that fails leaves no folder behind.

        Args:
            folder: Path of a folder that does not exist yet.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The cache is empty.
            RuntimeError: The model failed on the fixed tokens.
        """
        with self.attachment.exclusive():
            self.check_usable()
            self.check_attended()
            check.at_least("len(cache)", self.get_seq_length(), 1)
            check_whole(self.decoder)
            model = self.decoder, self._config
            save_cache(folder, self.layers, self.ids, *model, self.conversation)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a saved cache into this empty cache.

        The model and the indexes must be those of the saved cache. `k`, `coverage`, `dense_below`,
        device, store and backend may differ. A call that fails leaves this cache empty.

        Args:
            folder: A folder that `save` has written.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder was modified after it was saved, or was saved with another model,
                other indexes, or other values of `sink`, `local_window` or `update_every`. Or this
                cache already contains tokens.
            RuntimeError: The model failed when it was run on a few fixed tokens to identify it.
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
        """Copy the contents of a filled transformers cache into this empty cache.

        The keys and values of full-attention layers are appended to the indexes. Sliding windows
        and linear-attention states are copied. `past` does not change, and shares no memory with
        this cache. Afterwards this cache is as if the attached model had processed the prompt in
        one chunk.

        This runs the model on two tokens, to find out how each layer computes attention. A call
        that fails leaves this cache unchanged.

        Args:
            past: A `DynamicCache` that the same model has filled outside of any `attach`.
            ids: The token ids of `past`, int64 `[B, N]` (or `[N]` for one sequence). Needed only
                for `kvhf.generate`, and for indexes that use token ids.
            attention_mask: `[B, N]`, 0 for padding. None means no padding.

        Returns:
            This cache.

        Raises:
            TypeError: `past` is not a `DynamicCache`.
            ValueError: This cache already contains tokens, or `past` is empty. Or a layer of `past`
                has a class, length, shape, dtype or device that does not match this model. Or the
                index needs the queries of the prompt, which a cache does not contain.
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
        """Raise ValueError if this cache contains tokens."""
        if length := self.get_seq_length():
            raise ValueError(
                f"cache: got a cache with {length} tokens; use an empty cache or call reset()"
            )

    @contextmanager
    def attending_by(
        self, attend: Callable[..., Tensor], on_branch: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Context manager that replaces the attention of all layers that have an index.

        In the context, no token counts as padding.

        Args:
            attend: Called instead of `IndexedLayer.attend`. Its first argument is a function that
                makes the original call.
            on_branch: Called with a description when the model branches on the number of tokens.
        """
        self.attend_override, self.on_branch, self.padding.all_real = attend, on_branch, True
        try:
            yield
        finally:
            self.attend_override = self.on_branch = None
            self.padding.forget()

    def count_replay(self, replay: Callable[[], None]) -> None:
        """Append one token to all layers by a graph replay. If the replay fails, remove the
        token."""
        before, ids, self.ids = self.get_seq_length(), self.ids, None
        self.steps += 1
        self._broken = "got a cache with a decode step that failed half way and could not be undone"
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
        """Remove the token that a graph replay has appended.

        Args:
            length: Number of tokens in the cache before the replay.
            ids: The value of `self.ids` before the replay.
        """
        self._broken = "got a cache with a decode step that failed half way and could not be undone"
        for layer in self.attention_layers():
            layer.truncate(length)
        for window in self._rolled():
            window.go_back(length)
        if not self.overwrites:
            self._broken, self.ids = None, ids

    def roll(self) -> None:
        """Move the keys and values of sliding windows into ring buffers.

        A CUDA graph can append to these, because their addresses do not change.
        """
        layers = [layer for layer in self.sliding() if layer.ring is None]
        real = self.attention_layers()[0].valid if layers else None
        for layer in layers:
            layer.roll(real)

    def count_rolled(self) -> None:
        """Add 1 to the number of tokens in each ring buffer.

        Called after the replay of a CUDA graph has appended a token to the ring buffers.
        """
        for ring in self._rolled():
            ring.length += 1

    @property
    def decoder(self) -> nn.Module:
        """The module of the attached model that runs its layers with a KV cache.

        Each call of the module is one forward pass.
        """
        assert self.attachment.decoder is not None
        return self.attachment.decoder

    @property
    def overwrites(self) -> bool:
        """True if a layer has linear attention, which overwrites its state in each forward pass."""
        return any(hasattr(layer, "recurrent_states") for layer in self.layers)

    def _look_again(self) -> None:
        if self.token_graph is not None:
            self.token_graph.look_again()

    def _change_all(self, change: Callable[[Any], None]) -> None:
        """Apply `change` to every layer. If it raises an error for one layer, restore all
        layers."""
        before: list[tuple[Any, dict[str, Any], Any]] = []
        ids, broken = self.ids, self._broken
        try:
            with self.attachment.exclusive():
                before = [(layer, _attributes(layer), _checkpoint(layer)) for layer in self.layers]
                self.ids = None
                self._look_again()
                # Start with the layers that have no index, because their methods may raise an
                # error. These methods do not change tensors in place but make new ones, so the
                # changes can still be undone.
                for layer in sorted(self.layers, key=lambda one: isinstance(one, IndexedLayer)):
                    change(layer)
        except BaseException:
            if before:
                self._broken = "got a cache with a change that failed half way"
                for layer, attributes, checkpoint in before:
                    vars(layer).update(attributes)
                    if isinstance(layer, IndexedLayer):
                        layer.rollback(checkpoint)
                self._broken, self.ids = broken, ids
            raise

    def _empty_layers(self) -> list[Any]:
        """Make new layers without tokens. (The `reset` of transformers would overwrite tensors in
        place.)"""
        layers = DynamicCache(config=self._config).layers
        for i in self.indexed:
            layers[i] = indexed_layer(layers[i], partial(self._make, i), self.padding)
        if self.token_graph is not None:
            for i, layer in enumerate(layers):
                if type(layer) is DynamicSlidingWindowLayer:
                    layers[i] = SlidingLayer(layer.sliding_window)
        return layers

    def fork(self) -> IndexCache:
        """Return an independent copy of the cache, for the same `attach` context.

        Only the keys and values of sink and local window are copied. The caches share the rows and
        codes of the indexes until both caches have appended tokens
        (docs/adapters/several-questions.md). `copy.deepcopy(cache)` does the same.

        Returns:
            The copy.
        """
        return deepcopy(self)

    def restore(self, fork: IndexCache) -> None:
        """Return to the state of an earlier fork of this cache.

        Args:
            fork: A result of this cache's `fork()`. Do not use the fork afterwards, because this
                cache takes over its layers.
        """
        with self.attachment.exclusive():
            self.attachment.take_pending()
            self.layers, self.padding, self.ids = fork.layers, fork.padding, fork.ids
            self.conversation, self._broken = fork.conversation, fork._broken
            if self.token_graph is not None:  # delete the graph, which reads the replaced layers
                self.token_graph.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> IndexCache:
        """Implement `copy.deepcopy`: make an independent copy for the same `attach` context."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        memo[id(self.attachment)] = self.attachment
        memo[id(self._config)] = self._config
        memo[id(self._make)] = self._make
        if self.token_graph is not None:  # the copy needs a graph that reads its own layers
            memo[id(self.token_graph)] = self.token_graph.another()
        with self.attachment.exclusive():
            for layer in self.layers:
                if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, SlidingLayer):
                    # Layers of these three transformers classes never write to their tensors in
                    # place. So the copy of the cache uses the same tensors, without copying them.
                    memo |= {id(rows): rows for rows in (layer.keys, layer.values)}
            other.__dict__.update(deepcopy(vars(self), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cache: got pickle or copy.copy; use copy.deepcopy(cache) inside the attach() context, "
            "or cache.save(folder) and cache.load(folder) for another process"
        )

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "cache: got an iteration over keys and values, but these are stored in the indexes"
        )

    @property
    def _batch(self) -> int:
        """Number of sequences in the batch, or 0 for an empty cache."""
        return next((layer.batch_size for layer in self.attention_layers()), 0)

    def _indexed(self) -> list[IndexedLayer]:
        return [self.layers[number] for number in self.indexed]

    def sliding(self) -> list[SlidingLayer]:
        """Return the sliding-window layers whose keys and values can be in a ring buffer."""
        return [self.layers[number] for number in self._windows]

    def _rolled(self) -> list[Ring]:
        return [ring for layer in self.sliding() if (ring := layer.ring) is not None]


class ProbeCache(IndexCache):
    """A temporary cache that records how each layer of the attached model computes attention."""

    given: dict[int, tuple[Tensor, Tensor]]  # layer number -> keys and values passed to `update`

    @classmethod
    def of(cls, cache: IndexCache) -> ProbeCache:
        """Make a probe cache for the model to which `cache` is attached.

        Args:
            cache: An empty cache, which is not changed.
        """
        probe = cls.__new__(cls)
        probe.__dict__.update(vars(cache.fork()))
        probe.token_graph, probe.given = None, {}
        return probe

    def run(self) -> None:
        """Run the model on two tokens, and check its attention calls.

        Raises:
            UnsupportedError: A layer computes attention with keys or values other than those that
                it passes to the cache.
        """
        read: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(plain: Callable[[], Tensor], layer: Any, *given: Any, **terms: Any) -> Tensor:
            if given[1] is not None:  # None for a layer that uses the keys of another layer
                read[self.layers.index(layer)] = given[1]
            return plain()

        # Run the model with two tokens, because the rotary embedding does not change the keys of
        # the first token. Do not use the padding token, because its keys and values may be 0.
        token = int(getattr(self._config, "pad_token_id", None) == 0)
        ids = torch.full((1, 2), token, device=layer_device(self.decoder, 0))
        with torch.no_grad(), self.attending_by(attend):
            self.decoder(input_ids=ids, use_cache=True, **{CACHE: self})
        for number, rows in read.items():
            geometry = self.layers[number].attention.index.geometry
            if not geometry.value_in_key and not all(map(torch.equal, rows, self.given[number])):
                raise UnsupportedError(
                    f"past: got a cache of a model whose layer {number} attends to other keys or "
                    "values than it passes to the cache; run the prompt inside attach() instead"
                )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Record the keys and values that a layer passes to the cache, then append them like
        `IndexCache.update`."""
        self.given[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _checkpoint(layer: Any) -> Any:
    """Return a checkpoint of a layer with an index, or None for any other layer."""
    return layer.checkpoint() if isinstance(layer, IndexedLayer) else None


def _nbytes(layer: Any) -> int:
    """Return the bytes in use by a layer without an index.

    This also works while another thread changes the layer.
    """
    if isinstance(layer, SlidingLayer):
        return layer.nbytes()
    rows = [getattr(layer, name, None) for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in rows if tensor is not None)


def _attributes(layer: Any) -> dict[str, Any]:
    """Copy a layer's attributes. The copy shares the layer's tensors.

    This is safe, because decode steps replace these tensors by new ones, and do not write into
    them.
    """
    if isinstance(layer, SlidingLayer):
        layer.settle()  # move rows out of the ring buffer, which steps overwrite in place
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(layer).items()
    }
