"""Let a model read a prompt once, and copy the keys and values into the cache of every index.

This saves time when several indexes are compared. It is possible because attention is exact while a
prompt is read, so that every index would get the same keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import ExpandsBatch, KVIndex, ObservesQueries
from kvindex.layer import AttentionLayer
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.evaluate.fidelity import BLOCK as STEPS
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import default_chunk, prefill
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.unsupported import has_full_attention


@dataclass(frozen=True)
class Chunk:
    """Successive tokens of a prompt, with the keys and values that a model computed for them.

    Args:
        ids: Token ids, int64 `[T]`.
        layers: A dictionary for each layer. For a full-attention layer it contains `keys`
            `[1, G, T, D]` and `values` `[1, G, T, Dv]`, and possibly `queries` `[1, H, T, D]`. For
            any other layer it contains all attributes of the cache layer after these tokens.
    """

    ids: Tensor
    layers: Sequence[dict[str, Any]]


class FullAttention:
    """A model with full attention, whose KV cache can be restored to an earlier state.

    Raises:
        UnsupportedError: The model has linear attention, whose state cannot be restored.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        check_restorable(model, self.cache)

    def read(self, ids: Tensor) -> tuple[Chunk, Tensor]:
        """Read tokens with ids int64 `[T]`.

        Return their keys and values, and the logits `[V]` after the last token.
        """
        start, ids = self.cache.get_seq_length(), ids.to(self.model.device)
        with torch.no_grad():
            _read(self.model, ids, self.cache, stop=len(ids) - 1)
        logits = self.step(ids[-1:])[-1]
        return Chunk(ids, [_stored(layer, start) for layer in self.cache.layers]), logits

    def step(self, ids: Tensor) -> Tensor:
        """Read tokens with ids int64 `[T]`, and return the logits `[T, V]` after each token."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> list[dict[str, Any]]:
        """Return the state of the KV cache, for a later call of `rollback`.

        Nothing is copied, because the cache replaces its tensors and never changes them in place.
        """
        return [dict(vars(layer)) for layer in self.cache.layers]

    def rollback(self, checkpoint: list[dict[str, Any]]) -> None:
        """Restore the KV cache to a state that the method `checkpoint` returned before."""
        for layer, before in zip(self.cache.layers, checkpoint, strict=True):
            vars(layer).update(before)

    def nbytes(self) -> int:
        """Return the size of the KV cache in bytes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


def check_restorable(model: PreTrainedModel, cache: Any) -> None:
    """Raise UnsupportedError if the cache of a model has linear attention, whose state cannot be
    restored."""
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        raise UnsupportedError(
            f"model: got {type(model).__name__}, which has linear attention. Its state cannot "
            "be restored to the end of a prompt; pass a model without linear attention"
        )


class ReplayLayer(ParallelLayer):
    """An attention layer that can copy the keys and values of a prompt instead of computing them.

    The layer accepts any index. Decode steps run in parallel if the index supports it
    (`evaluate/parallel.py`).

    Tokens move from the window into the index at the same positions of the text for every index. So
    at each decode step, all indexes contain and search the same tokens. After parallel steps, they
    move before the next step, so that steps that a rollback undoes often leave the index unchanged:
    an index that cannot undo a change need not be built again. Do not truncate the layer between
    these steps.
    """

    _waits = False  # whether tokens move into the index before the next step, if that is due

    def __init__(self, index: KVIndex, **options: Any) -> None:
        AttentionLayer.__init__(self, index, **{**options, "update_phase": None})

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, **terms: Any) -> Tensor:
        """Compute attention as `ParallelLayer` does."""
        self._begin_steps()  # also before a step that is not parallel
        return super().step(queries, keys, values, **terms)

    def _begin_steps(self) -> None:
        if self._waits:
            self._updates.update()
            self._waits = False

    def _end_steps(self) -> None:
        self._waits = True

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self._waits = False

    def checkpoint(self) -> Any:
        """Return the present state for `rollback`."""
        return super().checkpoint(), self._waits

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        before, self._waits = checkpoint
        super().rollback(before)

    def _unit(self, index: KVIndex) -> int:
        return 1 if self.update_every % BLOCK else BLOCK

    @property
    def parallel(self) -> bool:
        """True if the index can run several decode steps in parallel, as one batch."""
        return capability(self.index, ExpandsBatch) is not None

    def fill(
        self, keys: Tensor, values: Tensor, ids: Tensor, queries: Tensor | None = None
    ) -> None:
        """Store the keys and values of tokens as `step` would, without computing attention.

        The index receives them in one append. Some indexes learn from their first append, and their
        papers assume that it is the whole prompt.

        Args:
            keys: Keys `[1, G, T, D]`.
            values: Values `[1, G, T, Dv]`.
            ids: Token ids, int64 `[T]`.
            queries: Queries `[1, H, T, D]`, or None if the index does not learn from them.
        """
        first = len(self)
        self.append(keys, values, queries=queries)
        self.index.observe_tokens(ids[None], first=first)

    def end_prompt(self) -> None:
        """Report the end of the prompt to the index, unless it was reported before.

        The work that an index does then, such as clustering, is not undone by `Indexed.branch` if
        this method is called before it.
        """
        if not self._updates.prompt_ended:
            self._updates.end_prompt()


class Taken(NamedTuple):
    """The arguments and the result of one call of an attention layer.

    Attributes:
        queries: `[1, H, T, D]`.
        keys: `[1, G, T, D]`.
        values: `[1, G, T, Dv]`.
        outputs: Attention outputs, `[1, H, T, Dv]`.
        sink_logits: Logits of learned sinks, `[H]` or `[1, H, T]`, or None.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    sink_logits: Tensor | None


class RecordingLayer(ReplayLayer):
    """An attention layer that records all its queries, keys, values and outputs in `taken`.

    Use it with a `dense_below` that is larger than any text. Then all tokens attend to all tokens
    before them.
    """

    def __init__(self, index: KVIndex, **options: Any) -> None:
        super().__init__(index, **options)
        self.taken: list[Taken] = []

    def reset(self) -> None:
        """Remove all tokens, and forget what was recorded."""
        super().reset()
        self.taken = []

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, **terms: Any) -> Tensor:
        """Compute attention as `ReplayLayer` does, and record tensors."""
        outputs = super().step(queries, keys, values, **terms)
        self.taken = [*self.taken, Taken(queries, keys, values, outputs, terms.get("sink_logits"))]
        return outputs


class Indexed:
    """A model with an index and a KV cache. Prompts are read once with full attention, and their
    keys and values are copied to this cache, unless the index, sparse attention or `k="auto"`
    requires that the model reads them again.

    Args:
        model: The attached model.
        cache: The KV cache of the model.
        first: Token ids of the beginning of a prompt, int64 `[T]`, at least two. The model reads
            two tokens once, so that the layers of the cache are created.
        sparse: Whether the model reads each prompt again, with sparse attention.
        observed: Whether the chunks of prompts contain queries. Then no index requires that the
            model reads a prompt again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: IndexCache,
        first: Tensor,
        sparse: bool = False,
        observed: bool = False,
    ) -> None:
        self.model, self.cache, self._sparse = model, cache, sparse
        _step(model, cache, first[:2].to(model.device))
        observers = (capability(index, ObservesQueries) for index in cache.indexes())
        self._rereads = sparse or (not observed and any(one is not None for one in observers))
        self._measures = any(layer.error is not None for layer in self.layers)  # their outputs
        self._rereads |= self._measures
        if self._rereads:
            cache.reset()
        else:
            for layer in self.layers:
                layer.reset()

    @property
    def layers(self) -> list[ReplayLayer]:
        """The attention layers with an index. Empty before the model has read its first tokens."""
        layers = self.cache.attention_layers()
        return [layer for layer in layers if isinstance(layer, ReplayLayer)]

    @property
    def parallel(self) -> bool:
        """True if all indexes support parallel decode steps."""
        return all(layer.parallel for layer in self.layers)

    def read(self, chunk: Chunk) -> Tensor | None:
        """Append successive tokens of a prompt to the cache.

        The keys and values of the tokens are copied from `chunk`, where they were stored when the
        model read the prompt with full attention. If the index also uses the queries of the prompt,
        if prompts are read with sparse attention, or if the number of tokens to retrieve follows
        from the outputs of the prompt, the model reads the tokens again instead.

        Returns:
            With sparse attention, the logits `[V]` after the last token. Otherwise None: the logits
            are those of full attention.
        """
        if self._rereads:
            count = len(chunk.ids)
            if count == 1 and (self._sparse or self._measures):
                how = "sparse prompts" if self._sparse else "k='auto'"
                raise ValueError(
                    f"question: got one token, allowed with {how} are two or more, because one "
                    "token alone would be a decode step"
                )
            last = 0 if not self._sparse else 2 if count > 3 else count
            with torch.no_grad():
                _read(self.model, chunk.ids, self.cache, stop=count - last)
            return self.step(chunk.ids[-last:])[-1] if last else None
        for number, stored in enumerate(chunk.layers):
            layer = self.cache.layers[number]
            if number in self.cache.indexed:
                layer.attention.fill(ids=chunk.ids, **stored)
            else:
                vars(layer).update(stored)
        return None

    def step(self, ids: Tensor) -> Tensor:
        """Read tokens with ids int64 `[T]`, and return the logits `[T, V]` after each token."""
        return _step(self.model, self.cache, ids)

    def checkpoint(self) -> Any:
        """Return the state of the KV cache, for a later call of `rollback`."""
        return self.cache.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Restore the KV cache to a state that the method `checkpoint` returned before."""
        self.cache.rollback(checkpoint)

    @contextmanager
    def branch(self, k: int | str) -> Iterator[None]:
        """Context manager inside which decode steps retrieve `k` tokens per KV head.

        If `k` is a text such as "auto", the model must be attached with the options
        `records.automatic(k)`.

        At the end of the `with` block, the KV cache is restored to its state at the beginning.
        """
        before = self.checkpoint()
        for layer in () if isinstance(k, str) else self.layers:
            layer.k = check.wanted_rows(k)
        try:
            yield
        finally:
            self.pause()
            self.rollback(before)

    def begin(self) -> None:
        """From now on, process each token that a call of `step` receives as a decode step.

        The decode steps of one call run in parallel, as one batch. If the index does not support
        this, `begin` has no effect.
        """
        for layer in self.layers:
            if layer.parallel:
                layer.begin()

    def pause(self) -> None:
        """Undo the effect of `begin`.

        From now on, a call of `step` with one token is a decode step, and a call of `step` with
        several tokens reads them as a part of a prompt.
        """
        for layer in self.layers:
            layer.pause()

    def end_prompt(self) -> None:
        """Report the end of the prompt to all indexes, unless it was reported before."""
        for layer in self.layers:
            layer.end_prompt()


class Recorded(NamedTuple):
    """A prompt and a continuation that a model with full attention has read.

    Attributes:
        context: The prompt, with its queries, keys and values.
        logits: Logits after each token of the continuation, `[T, V]`.
        taken: For each full-attention layer, what it received and returned for the continuation.
        indexed: Number of tokens that an index contains after the prompt.
        row_bytes: Bytes of the key and the value of one token in all layers and KV heads.
    """

    context: Chunk
    logits: Tensor
    taken: list[list[Taken]]
    indexed: int
    row_bytes: int


def plain_row_bytes(g: Geometry) -> int:
    """Return the bytes of the uncompressed key and value of one token in all KV heads."""
    width = g.head_dim + (0 if g.value_in_key else g.value_dim)
    return width * g.dtype.itemsize * g.kv_heads


def recorded(model: PreTrainedModel, prompt: Tensor, steps: Tensor, **options: Any) -> Recorded:
    """Let a model with full attention read a prompt and then a continuation, and record both.

    Args:
        model: The model.
        prompt: Token ids, int64 `[P]`, at least two.
        steps: Token ids that follow the prompt, int64 `[T]`.
        options: Sizes of the sink, the local window and so on, as keyword arguments of `attach`.

    Raises:
        UnsupportedError: The model has linear attention.
    """
    options = {**options, "dense_below": 2**62, "layer": RecordingLayer}
    ids = prompt.to(model.device)
    with indexed(model, prompt, index="exact", **options) as full, torch.no_grad():
        check_restorable(model, full.cache)
        _read(model, ids, full.cache, stop=len(ids))
        layers = [layer for layer in full.layers if isinstance(layer, RecordingLayer)]
        count = max(len(layer.index) for layer in layers)
        read = dict(zip(full.cache.indexed, (layer.taken for layer in layers), strict=True))
        stored: list[dict[str, Any]] = []
        for number, other in enumerate(full.cache.layers):
            if number in read:
                stored.append(_joined(read[number]))
            else:
                stored.append(_copied(vars(other)))
        for layer in layers:
            layer.taken = []
        logits = torch.cat([full.step(block) for block in torch.split(steps.to(ids.device), STEPS)])
        row = sum(plain_row_bytes(layer.index.geometry) for layer in layers)
        return Recorded(Chunk(ids, stored), logits, [layer.taken for layer in layers], count, row)


def _joined(taken: Sequence[Taken]) -> dict[str, Any]:
    """Return the queries, keys and values of successive calls as an element of `Chunk.layers`."""
    return {
        "queries": torch.cat([one.queries for one in taken], dim=2),
        "keys": torch.cat([one.keys for one in taken], dim=2),
        "values": torch.cat([one.values for one in taken], dim=2),
    }


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of all tensors."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in attributes.items()
    }


@contextmanager
def indexed(
    model: PreTrainedModel, first: Tensor, *, index: str, observed: bool = False, **options: Any
) -> Iterator[Indexed]:
    """Open an empty KV cache with an index, for prompts that begin with the tokens `first`.

    `options` are passed to `attach`. Every decode step searches, even in a short sequence.
    `observed` is True if the chunks of the prompts contain queries.
    """
    options = {"dense_below": 0, "layer": ReplayLayer, **options}
    with attach(model, index=index, **options) as cache:
        sparse = options.get("prefill") == "sparse"
        yield Indexed(model, cache, first, sparse=sparse, observed=observed)


def _read(model: PreTrainedModel, ids: Tensor, cache: Any, *, stop: int) -> None:
    """Read the first `stop` tokens in chunks of the size that `kvhf.generate` chooses."""
    prefill(model, ids, cache, stop=stop, chunk=default_chunk(model))


def _step(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids[None], **{CACHE: cache}).logits[0]
    return logits


def _stored(layer: Any, start: int) -> dict[str, Any]:
    """Return what a cache layer stores for all tokens after the first `start`.

    The result is an element of `Chunk.layers`.
    """
    if not has_full_attention(layer):
        return dict(vars(layer))
    if not start:
        return {"keys": layer.keys, "values": layer.values}
    return {"keys": layer.keys[:, :, start:].clone(), "values": layer.values[:, :, start:].clone()}
