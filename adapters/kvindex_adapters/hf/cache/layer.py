"""`IndexedLayer`: a layer of a transformers cache whose tokens are in an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvindex.core import check
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.padding import MaskInfo, Padding

LayerFactory = Callable[..., AttentionLayer]
"""Creates an attention layer from the geometry that the first call shows."""


class IndexedLayer(CacheLayerMixin):
    """A layer of the cache around a `kvindex.AttentionLayer`; padding: shared by all layers."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    ours = frozenset({"_make", "_padding", "attention"})
    """Attributes that are not of transformers."""

    def __init__(self, make: LayerFactory, padding: Padding) -> None:
        self._make, self._padding = make, padding
        self.attention: AttentionLayer | None = None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` restores the state before the tokens that it removes."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen a token."""
        return self.attention is not None

    @property
    def keys(self) -> TensorSpec | None:
        """Shape `[B, G, N, D]`, dtype and device of the keys; None before the first token."""
        return self._spec("head_dim")

    @property
    def values(self) -> TensorSpec | None:
        """Shape `[B, G, N, Dv]`, dtype and device of the values; None before the first token."""
        return self._spec("value_dim")

    def _spec(self, width: str) -> TensorSpec | None:
        if self.attention is None:
            return None
        g, length = self.attention.index.geometry, len(self.attention)
        shape = torch.Size((self._batch, g.kv_heads, length, getattr(g, width)))
        return TensorSpec(shape, g.dtype, g.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new tokens unchanged; `attend` appends them."""
        return key_states, value_states

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: MaskInfo,
        *,
        scale: float | None,
        softcap: float | None,
        tokens: Tensor | None = None,
        bias: Tensor | None = None,
        sink_logits: Tensor | None = None,
        ids: Tensor | None = None,
        value_in_key: bool = False,
    ) -> Tensor:
        """Append tokens and attend from them.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            mask: The attention mask of all `N + T` tokens.
            scale: Factor of the logits; None for `D**-0.5`.
            softcap: Softcap of the logits, or None.
            tokens: Ids of the new tokens, int64 `[B, T]`, for indexes that read the text; None if
                unknown.
            bias: As in `AttentionLayer.step`.
            sink_logits: As in `AttentionLayer.step`.
            ids: As in `AttentionLayer.step`.
            value_in_key: As in `Geometry`.

        Returns:
            Attention outputs `[B, H, T, Dv]`.

        Raises:
            UnsupportedError: The scale, the softcap or the padding of past tokens has changed; also
                what `AttentionLayer.step` raises.
        """
        if self.attention is None:
            self.attention = self.make(
                q_heads=queries.shape[1],
                kv_heads=keys.shape[1],
                head_dim=keys.shape[3],
                value_dim=values.shape[3],
                scale=scale,
                softcap=softcap,
                dtype=keys.dtype,
                device=keys.device,
                value_in_key=value_in_key,
            )
        batch, _, T, D = keys.shape
        self._check_same(D**-0.5 if scale is None else scale, softcap)
        valid = self._padding.of_new(self.attention, mask.real, T)
        if queries.dtype is not keys.dtype or values.dtype is not keys.dtype:
            queries, values = queries.to(keys.dtype), values.to(keys.dtype)
        terms: Any = dict(valid=valid, bias=bias, sink_logits=sink_logits, ids=ids)
        if mask.visible is not None:
            terms["visible"] = mask.visible
        output = self.attention.step(queries, keys, values, **terms)
        if tokens is not None and tokens.shape == (batch, T):
            # after the step: a boundary that is marked in it lies before these tokens
            self.attention.index.observe_tokens(tokens, first=len(self.attention) - T)
        return output

    def attend_captured(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `attend` of one real token for each row, for a graph: the layer's `captured_step`."""
        assert self.attention is not None
        self._check_same(keys.shape[-1] ** -0.5 if scale is None else scale, softcap)
        queries, values = queries.to(keys.dtype), values.to(keys.dtype)
        return self.attention.captured_step(queries, keys, values, sink_logits=sink_logits)

    def attend_shared(
        self,
        queries: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attend from the newest tokens for a layer that has no keys of its own: `[B, H, T, Dv]`.

        Raises as `attend`, and what `AttentionLayer.attend` raises.
        """
        assert self.attention is not None
        g = self.attention.index.geometry
        self._check_same(g.head_dim**-0.5 if scale is None else scale, softcap)
        return self.attention.attend(queries.to(g.dtype), sink_logits=sink_logits)

    def make(self, **geometry: Any) -> AttentionLayer:
        """An empty attention layer for this one, around an index of this geometry."""
        return in_plain_torch(self._make)(**geometry)

    def _check_same(self, scale: float, softcap: float | None) -> None:
        """Raises UnsupportedError unless scale and softcap are those of the index."""
        assert self.attention is not None
        g = self.attention.index.geometry
        if (scale, softcap) != (g.scale, g.softcap):
            raise UnsupportedError(
                f"scaling, softcap: got {scale}, {softcap}, allowed is what the layer's first "
                f"call had: {g.scale}, {g.softcap}"
            )

    def get_seq_length(self) -> int:
        """Count of tokens."""
        attention = self.attention  # read once: another thread may set it to None meanwhile
        return 0 if attention is None else attention.tokens

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

    def checkpoint(self) -> Any:
        """The state of the layer, for `rollback`; None before its first step."""
        return None if self.attention is None else (self.attention, self.attention.checkpoint())

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of `checkpoint`."""
        self.attention = None
        if checkpoint is not None:
            attention, before = checkpoint
            attention.rollback(before)
            self.attention = attention

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens. Raises ValueError above 0."""
        removed = check_crop(tokens_to_remove)
        if self.attention is not None:
            self.attention.truncate(max(len(self.attention) + removed, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` of the batch becomes what row `beam_idx[b]` was."""
        if self.attention is not None:
            self.attention.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times in a row."""
        self.reorder_cache(repeated(self._batch, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch: int64, or bool `[B]`."""
        self.reorder_cache(selected(self._batch, indices))

    def offload(self) -> None:
        """Raises UnsupportedError: the index itself decides where rows are stored (`store`)."""
        raise UnsupportedError('offloading: got True; allowed is index_options={"store": "host"}')

    prefetch = offload

    @property
    def _batch(self) -> int:
        return 0 if self.attention is None else self.attention.batch_size


def repeated(batch: int, repeats: int) -> Tensor:
    """Indices of the sequences of a batch, each repeated `repeats` times in a row.

    Args:
        batch: Number of sequences.
        repeats: At least 1.

    Returns:
        Int64 `[batch * repeats]`.

    Raises:
        ValueError: `repeats` is below 1.
    """
    check.at_least("repeats", repeats, 1)
    return torch.arange(batch).repeat_interleave(repeats)


def selected(batch: int, indices: Tensor) -> Tensor:
    """Convert a selection of sequences of a batch to their indices.

    Args:
        batch: Number of sequences, or 0 to allow any.
        indices: Int64 indices, or bool `[B]`, True for the sequences to select.

    Returns:
        Int64 indices.

    Raises:
        ValueError: A shape or an index does not fit.
        TypeError: `indices` is not such a tensor.
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        check.tensor("indices", indices, {"B": batch or None})
        return indices.nonzero()[:, 0]
    check.rows("indices", indices, batch or None)
    return indices


def check_crop(tokens_to_remove: Any) -> int:
    """The argument as an int; transformers 5.17 passes a tensor. Raises ValueError above 0."""
    removed = tokens_to_remove.item() if isinstance(tokens_to_remove, Tensor) else tokens_to_remove
    if not isinstance(removed, int) or isinstance(removed, bool) or removed > 0:
        raise ValueError(
            f"tokens_to_remove: got {removed!r}, allowed is 0 or minus the number of tokens"
        )
    return removed


WHY = "the rows are in the index's store and in the window"


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor without its numbers, as `layer.keys` and `layer.values` of a cache."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that a tensor of this shape and dtype takes."""
        return self.numel() * self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"keys, values: got .{name}, allowed are shape, dtype, device: {WHY}")

    def __getitem__(self, index: object) -> NoReturn:
        raise UnsupportedError(
            f"keys, values: got an index, allowed are shape, dtype, device: {WHY}"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise UnsupportedError(f"keys, values: got {name}, allowed are shape, dtype, device: {WHY}")
