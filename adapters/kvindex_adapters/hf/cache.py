"""A transformers cache whose full-attention layers keep their tokens in an index.

`update()` receives keys and values after rotary embedding, the attention function sees the
queries. They meet through the cache: `update()` leaves the layer as pending and returns the new
tokens alone; the attention function that runs next takes it and appends the keys and values that
reach it, whatever the model's class did to them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvindex import check
from kvindex.layer import AttentionLayer, Mark
from kvindex.protocol import KVIndex
from kvindex_adapters.hf.refuse import UnsupportedError
from kvindex_adapters.hf.report import Report

LayerFactory = Callable[..., AttentionLayer]
"""Makes a layer from its number and the geometry that its first call shows."""


class IndexedLayer(CacheLayerMixin):
    """A layer of the cache around a `kvindex.layer.AttentionLayer`."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, make: LayerFactory) -> None:
        super().__init__()
        self._make = make
        self.attention: AttentionLayer | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens as they are; `attend` appends them."""
        return key_states, value_states

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        padding: Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Append and attend: `[B, H, T, Dv]`; padding bool `[B, N + T]`, or None for none.

        tokens: ids of the new tokens int64 `[B, T]`, which the index reads, or None if unknown.
        Raises UnsupportedError where scale, softcap or the past of `padding` is not what it was,
        and what `AttentionLayer.step` raises.
        """
        if self.attention is None:
            self.attention = self._make(
                q_heads=queries.shape[1],
                kv_heads=keys.shape[1],
                head_dim=keys.shape[3],
                value_dim=values.shape[3],
                scale=scale,
                softcap=softcap,
                dtype=keys.dtype,
                device=keys.device,
            )
        self._check_same(keys.shape[3] ** -0.5 if scale is None else scale, softcap)
        self._check_past(padding)
        valid = None if padding is None else padding[:, -keys.shape[2] :]
        queries, values = queries.to(keys.dtype), values.to(keys.dtype)
        output = self.attention.step(queries, keys, values, valid=valid)
        T = keys.shape[2]
        if tokens is not None and tokens.shape == (len(keys), T):
            # after the step: a boundary that is marked in it lies before these tokens
            self.attention.index.read(tokens, first=len(self.attention) - T)
        return output

    def _check_same(self, scale: float, softcap: float | None) -> None:
        """The index was made for one scale and one softcap."""
        assert self.attention is not None
        g = self.attention.index.geometry
        if (scale, softcap) != (g.scale, g.softcap):
            raise UnsupportedError(
                f"scaling, softcap: got {scale}, {softcap}, allowed is what the layer's first "
                f"call had: {g.scale}, {g.softcap}"
            )

    def _check_past(self, padding: Tensor | None) -> None:
        """The mask must say of the past what it said when the tokens came."""
        length = self.get_seq_length()
        if length == 0 or self.attention is None:
            return
        was = self.attention.valid
        now = None if padding is None else padding[:, :length]
        if was is None or now is None:
            some = now if was is None else was
            same = some is None or bool(some.all())
        else:
            same = torch.equal(now, was)
        if not same:
            raise UnsupportedError(
                "attention_mask: got one that hides tokens of the past which were visible before "
                "(or the reverse), allowed is the same past"
            )

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.attention is None else len(self.attention)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers: all of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first `attend` makes the index."""

    def reset(self) -> None:
        """Forget all tokens."""
        self.attention = None

    def mark(self) -> Mark | None:
        """Where the layer is now; None before its first step."""
        return None if self.attention is None else self.attention.mark()

    def back_to(self, mark: Mark | None) -> None:
        """Forget what came after `mark`."""
        if mark is None or self.attention is None:
            self.attention = None
        else:
            self.attention.back_to(mark)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens. Raises ValueError above 0."""
        removed = _check_crop(tokens_to_remove)
        if self.attention is not None:
            self.attention.truncate(max(len(self.attention) + removed, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` of the batch becomes what row `beam_idx[b]` was."""
        if self.attention is not None:
            self.attention.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times in a row."""
        check.at_least("repeats", repeats, 1)
        self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch: int64, or bool `[B]`."""
        if self.attention is None:
            return
        if isinstance(indices, Tensor) and indices.dtype == torch.bool:
            check.tensor("indices", indices, {"B": self._batch})
            indices = indices.nonzero()[:, 0]
        self.attention.reorder(indices)

    def offload(self) -> None:
        """Refused: where rows live is the index's own choice (`store`)."""
        raise UnsupportedError('offloading: got True; allowed is index_options={"store": "host"}')

    prefetch = offload

    @property
    def _batch(self) -> int:
        return 0 if self.attention is None else self.attention.batch_size


class IndexCache(DynamicCache):
    """The cache that `attach` gives: pass it as `past_key_values`.

    Only the model's full-attention layers are replaced; sliding-window and linear layers stay
    what transformers makes them, and so do `dense_layers`.
    """

    def __init__(self, config: Any, make: LayerFactory, dense_layers: Sequence[int]) -> None:
        super().__init__(config=config)
        full = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        _check_dense(dense_layers, len(self.layers), full)
        self.indexed = [i for i in full if i not in dense_layers]
        """Numbers of the layers that have an index."""
        for i in self.indexed:
            self.layers[i] = IndexedLayer(partial(make, i))
        self.tokens: Tensor | None = None
        """Ids int64 `[B, T]` of the tokens of the step that is under way, if they are known."""
        self._config = config
        self._pending: Any = None
        self._closed = False
        self._broken: str | None = None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """As transformers calls it; the layer is then pending for the attention function."""
        self.check_usable()
        self.check_taken()
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._pending = self.layers[layer_idx]
        return states

    def take_pending(self) -> Any:
        """The layer whose `update` ran last, once; None if its attention has run already."""
        layer, self._pending = self._pending, None
        return layer

    def check_taken(self) -> None:
        """Raises UnsupportedError if an `update` never met the attention function."""
        if self.take_pending() is not None:
            raise UnsupportedError(
                "model: its attention does not go through transformers' AttentionInterface, or it "
                "is not the model that this cache was attached to"
            )

    def check_usable(self) -> None:
        """Raises RuntimeError after the context has closed or a step has failed half way."""
        if self._closed:
            raise RuntimeError(
                "past_key_values: got a cache whose attach() context has closed; attach again"
            )
        if self._broken:
            raise RuntimeError(f"past_key_values: {self._broken}; call reset() first")

    def attention_layers(self) -> list[AttentionLayer]:
        """The layers that have an index and have seen a token."""
        return [layer.attention for layer in self._indexed() if layer.attention]

    def indexes(self) -> list[KVIndex]:
        """Their indexes."""
        return [layer.index for layer in self.attention_layers()]

    def report(self) -> Report:
        """What the searching steps have read so far, and what the cache holds."""
        layers = self.attention_layers()
        traffic = [layer.traffic for layer in layers]
        steps = sum(part.steps for part in traffic)
        asked = steps > 0 and any(layer.mass is not None for layer in layers)
        nbytes: dict[str, int] = {}
        for layer in layers:
            for tier, size in layer.nbytes().items():
                nbytes[tier] = nbytes.get(tier, 0) + size
        others = [layer for layer in self.layers if not isinstance(layer, IndexedLayer)]
        held = [getattr(layer, name, None) for layer in others for name in ("keys", "values")]
        if others:
            nbytes["other"] = sum(tensor.nbytes for tensor in held if tensor is not None)
        return Report(
            tokens=max((len(layer) for layer in layers), default=0),
            layers=len(self._indexed()),
            steps=max((part.steps for part in traffic), default=0),
            rows_read=float(sum(float(part.rows_read) for part in traffic)) / max(steps, 1),
            rows_full=float(sum(float(part.rows_full) for part in traffic)) / max(steps, 1),
            bytes_fetched=int(sum(float(part.bytes_fetched) for part in traffic)),
            nbytes=nbytes,
            mass=float(sum(float(part.mass) for part in traffic)) / steps if asked else None,
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens. Raises ValueError above 0.

        Positive numbers mean different things in different versions of transformers. Raises
        RuntimeError where a sliding window has lost the rows to go back to.
        """
        removed = _check_crop(tokens_to_remove)
        self._every(lambda layer: layer.crop(removed))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` of the batch becomes what row `beam_idx[b]` was."""
        self._every(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times in a row."""
        self._every(lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch: int64, or bool `[B]`."""
        self._every(lambda layer: layer.batch_select_indices(indices))

    def reset(self) -> None:
        """Forget all tokens; the cache can be used again."""
        fresh = DynamicCache(config=self._config).layers  # 5.17 only zeroes what a layer holds
        for i, layer in enumerate(self.layers):
            if isinstance(layer, IndexedLayer):
                layer.reset()
            else:
                self.layers[i] = fresh[i]
        self._pending = self._broken = None

    def lengths(self) -> list[int]:
        """Tokens that each indexed layer holds."""
        return [layer.get_seq_length() for layer in self._indexed()]

    def marks(self) -> list[Any]:
        """Where each layer is now. Keeps the rows of layers without an index alive."""
        return [
            layer.mark() if isinstance(layer, IndexedLayer) else _held(layer)
            for layer in self.layers
        ]

    def back_to(self, marks: list[Any]) -> None:
        """After a step that failed: go back to `marks`, or stay unusable until `reset()`."""
        self._pending = None
        self._broken = "a step failed half way and could not be undone"
        for layer, mark in zip(self.layers, marks, strict=True):
            if isinstance(layer, IndexedLayer):
                layer.back_to(mark)
            else:
                vars(layer).update(mark)
        # all layers make new tensors, but linear attention overwrites its state
        if not any(hasattr(layer, "recurrent_states") for layer in self.layers):
            self._broken = None

    def _every(self, change: Callable[[Any], None]) -> None:
        """`change` for every layer, or for none if a layer refuses it."""
        others = [layer for layer in self.layers if not isinstance(layer, IndexedLayer)]
        held, done = [_held(layer) for layer in others], 0
        try:
            for layer in others:
                change(layer)
            for layer in self._indexed():
                change(layer)
                done += 1
        except BaseException:
            for layer, before in zip(others, held, strict=True):
                vars(layer).update(before)
            if done:  # they all hold the same batch and length: what one does, all can
                self._broken = "a change of the cache failed half way"
            raise

    def close(self) -> None:
        """Refuse every further use but reports."""
        self._closed = True

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "iteration over keys and values: the rows are in the indexes' stores"
        )

    def _indexed(self) -> list[IndexedLayer]:
        return [layer for layer in self.layers if isinstance(layer, IndexedLayer)]


def _check_crop(tokens_to_remove: Any) -> int:
    """As an int: transformers 5.17 passes a tensor of no dimensions."""
    removed = tokens_to_remove.item() if isinstance(tokens_to_remove, Tensor) else tokens_to_remove
    if not isinstance(removed, int) or isinstance(removed, bool) or removed > 0:
        raise ValueError(
            f"tokens_to_remove: got {removed!r}, allowed is 0 or minus the number of tokens"
        )
    return removed


def _check_dense(dense_layers: Any, layers: int, full: list[int]) -> None:
    if not isinstance(dense_layers, Collection):
        raise ValueError(f"dense_layers: got {dense_layers!r}, allowed is a tuple of layer numbers")
    for number in dense_layers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < layers:
            raise ValueError(f"dense_layers: got {number!r}, allowed are 0 to {layers - 1}")
    if set(full) <= set(dense_layers):
        raise ValueError(
            f"dense_layers: got {list(dense_layers)}, which leaves no layer to index; allowed is "
            f"all but one of the full-attention layers {full}"
        )


def _held(layer: Any) -> dict[str, Any]:
    """What a layer of transformers holds: as long as it makes new tensors, a copy of it."""
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(layer).items()
    }
