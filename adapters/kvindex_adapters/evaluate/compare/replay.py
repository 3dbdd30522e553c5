"""Copy a prompt's keys and values, which full attention computed once, into the cache of any index.

With every index, attention is exact while a prompt is read, so all indexes get the same keys and
values. Therefore the model reads a prompt once, and the result is copied into every index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvindex.core.capability import capability
from kvindex.core.protocol import ExpandsBatch, KVIndex, ObservesQueries
from kvindex.layer import AttentionLayer
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.common.prompt_chunks import chunks
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.unsupported import has_full_attention

CHUNK = 1024
"""Number of tokens of a prompt that the model reads at a time, and that are copied into an index at
a time, as in `kvhf.generate`."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a prompt, and what full attention's cache stores for them.

    Args:
        ids: Int64 `[T]`.
        layers: For each full-attention layer `keys` `[1, G, T, D]` and `values` `[1, G, T, Dv]`;
            for any other layer, its attributes after these tokens.
    """

    ids: Tensor
    layers: Sequence[dict[str, Any]]


class FullAttention:
    """A model with transformers' own cache, which reads prompts in parts and can be restored.

    Raises:
        UnsupportedError: The model has linear attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        if any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers):
            raise UnsupportedError(
                f"model: got {type(model).__name__}, whose linear attention cannot go back to the "
                "end of a prompt; allowed are models without linear attention"
            )

    def read(self, ids: Tensor) -> tuple[Chunk, Tensor]:
        """Read ids int64 `[T]`. Return what the cache stores for them, and the logits `[V]` after
        them."""
        start, ids = self.cache.get_seq_length(), ids.to(self.model.device)
        with torch.no_grad():
            prefill(self.model, ids, self.cache, stop=len(ids) - 1, chunk=CHUNK)
        logits = self.step(ids[-1:])[-1]
        return Chunk(ids, [_stored(layer, start) for layer in self.cache.layers]), logits

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`, and return the logits `[T, V]` after each of them."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> list[dict[str, Any]]:
        """Return the state of the cache, for `rollback`. No copy is needed, because steps make new
        tensors."""
        return [dict(vars(layer)) for layer in self.cache.layers]

    def rollback(self, checkpoint: list[dict[str, Any]]) -> None:
        """Restore the state that `checkpoint` returned."""
        for layer, before in zip(self.cache.layers, checkpoint, strict=True):
            vars(layer).update(before)

    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class ReplayLayer(ParallelLayer):
    """A layer that copies the keys and values of a prompt.

    Unlike its base class it accepts any index. Steps run in parallel if the index supports it
    (`parallel`). Tokens are appended to every index at the same times: when a block is full, and
    when the buffer of the window is full. So all indexes search the same rows.
    """

    def __init__(self, index: KVIndex, **options: Any) -> None:
        AttentionLayer.__init__(self, index, **{**options, "update_phase": None})

    def _unit(self, index: KVIndex) -> int:
        return 1 if self.update_every % BLOCK else BLOCK

    @property
    def parallel(self) -> bool:
        """True if the steps between `begin` and `pause` may run in parallel."""
        return capability(self.index, ExpandsBatch) is not None

    def fill(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        """Store rows as `step` would, for an index that observes no queries.

        Args:
            keys: `[1, G, T, D]`.
            values: `[1, G, T, Dv]`.
            ids: Int64 `[T]`.
        """
        for start, end in chunks(len(ids), CHUNK):
            first, some = len(self), (keys[:, :, start:end], values[:, :, start:end])
            self._window.append(len(self.index), *some, None)
            self._updates.update()
            self.index.observe_tokens(ids[None, start:end], first=first)


class Indexed:
    """An attached model and its cache, which gets a prompt that full attention has read.

    Args:
        model: The attached model.
        cache: Its cache.
        first: Ids int64 `[T]` of the prompt's first tokens, at least two. The model reads them once
            to create its layers.
    """

    def __init__(self, model: PreTrainedModel, cache: IndexCache, first: Tensor) -> None:
        self.model, self.cache = model, cache
        _step(model, cache, first[:2].to(model.device))
        self._observes = any(
            capability(index, ObservesQueries) is not None for index in cache.indexes()
        )
        if self._observes:
            cache.reset()
        else:
            for layer in self.layers:
                layer.reset()

    @property
    def layers(self) -> list[ReplayLayer]:
        """The layers with an index; none before the first part of the prompt."""
        layers = self.cache.attention_layers()
        return [layer for layer in layers if isinstance(layer, ReplayLayer)]

    @property
    def parallel(self) -> bool:
        """True if steps may run in parallel."""
        return all(layer.parallel for layer in self.layers)

    def read(self, chunk: Chunk) -> None:
        """Store the next part of the prompt. If the index observes queries, the model reads that
        part again."""
        if self._observes:
            with torch.no_grad():
                prefill(self.model, chunk.ids, self.cache, stop=len(chunk.ids), chunk=CHUNK)
            return
        for number, stored in enumerate(chunk.layers):
            layer = self.cache.layers[number]
            if number in self.cache.indexed:
                layer.attention.fill(stored["keys"], stored["values"], chunk.ids)
            else:
                vars(layer).update(stored)

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`, and return the logits `[T, V]` after each of them."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> Any:
        """Return the state of the cache, for `rollback`."""
        return self.cache.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        self.cache.rollback(checkpoint)

    @contextmanager
    def branch(self, k: int) -> Iterator[None]:
        """Retrieve `k` rows per step in this context, and restore the state at its end."""
        before = self.checkpoint()
        for layer in self.layers:
            layer.k = k
        try:
            yield
        finally:
            self.pause()
            self.rollback(before)

    def begin(self) -> None:
        """Run the following steps in parallel, if supported."""
        for layer in self.layers:
            if layer.parallel:
                layer.begin()

    def pause(self) -> None:
        """Run the following steps one by one. A step of several tokens then counts as a part of a
        prompt."""
        for layer in self.layers:
            layer.pause()


@contextmanager
def indexed(
    model: PreTrainedModel, first: Tensor, *, index: str, **options: Any
) -> Iterator[Indexed]:
    """Open an empty cache for prompts that begin with `first`. Options are those of `attach`.

    Every step searches, however short the sequence is. The errors are those of `attach`.
    """
    options = {"dense_below": 0, **options}
    with attach(model, index=index, layer=ReplayLayer, **options) as cache:
        yield Indexed(model, cache, first)


def _step(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], past_key_values=cache).logits[0]
    return logits


def _stored(layer: Any, start: int) -> dict[str, Any]:
    """Return what a cache layer stores for the tokens from `start` on (see `Chunk.layers`)."""
    if not has_full_attention(layer):
        return dict(vars(layer))
    if not start:
        return {"keys": layer.keys, "values": layer.values}
    return {"keys": layer.keys[:, :, start:].clone(), "values": layer.values[:, :, start:].clone()}
