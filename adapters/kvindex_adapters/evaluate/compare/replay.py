"""A prompt's keys and values, which full attention reads once, put into the cache of any index.

While a prompt is read attention is exact, whatever the index: its keys and values are those of
full attention. So the model reads a prompt once, and every index gets what that left.
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
"""Tokens of a prompt that are read, and that an index gets, at a time: as `kvhf.generate` does."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of a prompt, and what full attention's cache keeps of them.

    ids: int64 `[T]`; layers: of each layer with full attention `keys` `[1, G, T, D]` and `values`
    `[1, G, T, Dv]`, of any other its attributes after these tokens.
    """

    ids: Tensor
    layers: Sequence[dict[str, Any]]


class FullAttention:
    """A model with a cache of its own, which reads pieces of a prompt and can go back.

    Raises UnsupportedError for a model with linear attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        if any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers):
            raise UnsupportedError(
                f"model: got {type(model).__name__}, whose linear attention cannot go back to the "
                "end of a prompt; allowed are models without"
            )

    def read(self, ids: Tensor) -> tuple[Piece, Tensor]:
        """Read ids int64 `[T]`: what they leave in the cache, and the logits `[V]` after them."""
        start, ids = self.cache.get_seq_length(), ids.to(self.model.device)
        with torch.no_grad():
            prefill(self.model, ids, self.cache, stop=len(ids) - 1, chunk=CHUNK)
        logits = self.step(ids[-1:])[-1]
        return Piece(ids, [_kept(layer, start) for layer in self.cache.layers]), logits

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`: the logits `[T, V]` after each of them."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> list[dict[str, Any]]:
        """What the cache is now, for `rollback`: its layers replace tensors, and keep the old."""
        return [dict(vars(layer)) for layer in self.cache.layers]

    def rollback(self, checkpoint: list[dict[str, Any]]) -> None:
        """Be again what `checkpoint` says."""
        for layer, before in zip(self.cache.layers, checkpoint, strict=True):
            vars(layer).update(before)

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


class ReplayLayer(ParallelLayer):
    """A layer that takes the rows of a prompt as they are.

    Unlike its base it takes any index; steps come at once where the index allows it (`parallel`).
    Whatever the index, tokens wait in the window for a block to be full, and layers update when
    their buffers are: all indexes are searched beside the same rows.
    """

    def __init__(self, index: KVIndex, **options: Any) -> None:
        AttentionLayer.__init__(self, index, **{**options, "update_phase": None})

    def _unit(self, index: KVIndex) -> int:
        return 1 if self.update_every % BLOCK else BLOCK

    @property
    def parallel(self) -> bool:
        """Whether steps may come at once, between `begin` and `pause`."""
        return capability(self.index, ExpandsBatch) is not None

    def fill(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        """Hold rows as `step` would, for an index that observes no queries.

        keys `[1, G, T, D]`, values `[1, G, T, Dv]`, ids int64 `[T]`.
        """
        for start, end in chunks(len(ids), CHUNK):
            first, some = len(self), (keys[:, :, start:end], values[:, :, start:end])
            self._window.append(len(self.index), *some, None)
            self._updates.update()
            self.index.observe_tokens(ids[None, start:end], first=first)


class Indexed:
    """An attached model and its cache, which gets the pieces of a prompt that full attention read.

    first: ids int64 `[T]` of the prompt's first tokens, two at least: reading them, the model says
    what its layers are like.
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
        """The layers with an index; none before the first piece."""
        layers = self.cache.attention_layers()
        return [layer for layer in layers if isinstance(layer, ReplayLayer)]

    @property
    def parallel(self) -> bool:
        """Whether steps may come at once."""
        return all(layer.parallel for layer in self.layers)

    def read(self, piece: Piece) -> None:
        """Hold one more piece. For an index that observes queries the model reads it again."""
        if self._observes:
            with torch.no_grad():
                prefill(self.model, piece.ids, self.cache, stop=len(piece.ids), chunk=CHUNK)
            return
        for number, kept in enumerate(piece.layers):
            layer = self.cache.layers[number]
            if number in self.cache.indexed:
                layer.attention.fill(kept["keys"], kept["values"], piece.ids)
            else:
                vars(layer).update(kept)

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`: the logits `[T, V]` after each of them."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> Any:
        """What the cache is now, for `rollback`."""
        return self.cache.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says."""
        self.cache.rollback(checkpoint)

    @contextmanager
    def branch(self, k: int) -> Iterator[None]:
        """Steps inside retrieve `k` rows; afterwards all is as it was."""
        before = self.checkpoint()
        for layer in self.layers:
            layer.k = k
        try:
            yield
        finally:
            self.pause()
            self.rollback(before)

    def begin(self) -> None:
        """Steps that follow come at once, where they may."""
        for layer in self.layers:
            if layer.parallel:
                layer.begin()

    def pause(self) -> None:
        """Steps that follow come one by one, and several tokens are a prompt."""
        for layer in self.layers:
            layer.pause()


@contextmanager
def indexed(
    model: PreTrainedModel, first: Tensor, *, index: str, **options: Any
) -> Iterator[Indexed]:
    """An empty cache for prompts that begin with `first`; options: as `attach` takes them.

    Every step searches, whatever the length. Raises what `attach` raises.
    """
    options = {"dense_below": 0, **options}
    with attach(model, index=index, layer=ReplayLayer, **options) as cache:
        yield Indexed(model, cache, first)


def _step(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], past_key_values=cache).logits[0]
    return logits


def _kept(layer: Any, start: int) -> dict[str, Any]:
    """Of a layer of transformers' cache what `Piece.layers` says; start: of the piece."""
    if not has_full_attention(layer):
        return dict(vars(layer))
    if not start:
        return {"keys": layer.keys, "values": layer.values}
    return {"keys": layer.keys[:, :, start:].clone(), "values": layer.values[:, :, start:].clone()}
