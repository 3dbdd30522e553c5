"""A transformers cache whose full-attention layers keep their tokens in an index.

`update()` receives keys and values after rotary embedding, the attention function sees the
queries. They meet through the cache: `update()` leaves the layer as pending and returns the new
tokens alone; the attention function that runs next takes it and appends the keys and values that
reach it, whatever the model's class did to them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from kvindex import check
from kvindex.layer import AttentionLayer
from kvindex.protocol import KVIndex
from kvindex_adapters.hf.refuse import UnsupportedError
from kvindex_adapters.hf.report import Report

LayerFactory = Callable[..., AttentionLayer]
"""Makes a layer from the geometry that its first call shows."""


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
    ) -> Tensor:
        """Append and attend: `[B, H, T, Dv]`; padding bool `[B, N + T]`, or None for none.

        Raises UnsupportedError where the past of `padding` is not what it was, and what
        `AttentionLayer.step` raises.
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
        valid = None
        if padding is not None:
            self._check_past(padding)
            valid = padding[:, -keys.shape[2] :]
        queries, values = queries.to(keys.dtype), values.to(keys.dtype)
        return self.attention.step(queries, keys, values, valid=valid)

    def _check_past(self, padding: Tensor) -> None:
        """The mask must say of the past what it said when the tokens came."""
        length = self.get_seq_length()
        if length == 0 or self.attention is None:
            return
        was = self.attention.valid
        now = padding[:, :length]
        if not bool(now.all() if was is None else torch.equal(now, was)):
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
        if self.attention is not None:
            indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self.attention.reorder(indices.long())

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
        for number in dense_layers:
            if not isinstance(number, int) or not 0 <= number < len(self.layers):
                raise ValueError(
                    f"dense_layers: got {number!r}, allowed are 0 to {len(self.layers) - 1}"
                )
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer and i not in dense_layers:
                self.layers[i] = IndexedLayer(make)
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

    def indexes(self) -> list[KVIndex]:
        """The indexes of the layers that have one and have seen a token."""
        return [layer.attention.index for layer in self._indexed() if layer.attention]

    def report(self) -> Report:
        """What the searching steps have read so far, and what the cache holds."""
        layers = [layer.attention for layer in self._indexed() if layer.attention]
        traffic = [layer.traffic for layer in layers]
        steps = sum(part.steps for part in traffic)
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
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens. Raises ValueError above 0.

        Positive numbers mean different things in different versions of transformers.
        """
        super().crop(_check_crop(tokens_to_remove))

    def reset(self) -> None:
        """Forget all tokens; the cache can be used again."""
        super().reset()
        self._pending = self._broken = None

    def lengths(self) -> list[int]:
        """Tokens that each indexed layer holds."""
        return [layer.get_seq_length() for layer in self._indexed()]

    def recover(self, lengths: list[int]) -> None:
        """After a step that failed: go back to `lengths`, or stay unusable until `reset()`."""
        self._pending = None
        for layer, length in zip(self._indexed(), lengths, strict=True):
            layer.crop(length - layer.get_seq_length())
        if len(self._indexed()) < len(self.layers):
            self._broken = "a step failed half way and only indexed layers could go back"

    def close(self) -> None:
        """Refuse every further use but reports."""
        self._closed = True

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "iteration over keys and values: the rows are in the indexes' stores"
        )

    def _indexed(self) -> list[IndexedLayer]:
        return [layer for layer in self.layers if isinstance(layer, IndexedLayer)]


def _check_crop(tokens_to_remove: int) -> int:
    """As an int: transformers 5.17 passes a tensor of no dimensions."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"tokens_to_remove: got {tokens_to_remove}, allowed is 0 or minus the number of tokens"
        )
    return int(tokens_to_remove)
