"""`IndexedLayer`: a layer of a transformers cache that stores its tokens in an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvindex.core import check
from kvindex.core.protocol import Rows
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.parallel import is_sharded
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.padding import MaskInfo, Padding
from kvindex_adapters.hf.cache.prompt_rows import ExpectedPrompt, PromptRows

LayerFactory = Callable[..., AttentionLayer]
"""A function that makes an attention layer from the keyword arguments of `Geometry` (`head_dim`,
`dtype`, …), which are known at the first attention call."""


class IndexedLayer(CacheLayerMixin):
    """A cache layer that stores its tokens in a `kvindex.AttentionLayer`.

    Args:
        make: Function that creates this `kvindex.AttentionLayer` when attention is first computed.
        padding: The padding of the current forward pass, which all layers share.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    ours = frozenset({"_make", "_padding", "_rows", "attention", "expected"})
    """Attributes of this class that the cache layers of transformers do not have."""

    def __init__(self, make: LayerFactory, padding: Padding) -> None:
        self._make, self._padding = make, padding
        self.attention: AttentionLayer | None = None
        self.expected: ExpectedPrompt | None = None
        """The prompt that is read next, or None if its length is unknown."""
        self._rows: PromptRows | None = None  # rows of a prompt that is being read, or None

    @property
    def is_croppable(self) -> bool:
        """Always True: `crop` can remove any number of the newest tokens."""
        return True

    @property
    def is_initialized(self) -> bool:
        """True if the layer contains a token."""
        return self.attention is not None

    @property
    def keys(self) -> TensorSpec | None:
        """Shape `[B, G, N, D]`, dtype and device of the keys. None before the first token."""
        return self._spec("head_dim")

    @property
    def values(self) -> TensorSpec | None:
        """Shape `[B, G, N, Dv]`, dtype and device of the values. None before the first token."""
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
        """Return the new keys and values unchanged. `attend` appends them later."""
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
        """Append `T` new tokens, and compute their attention.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            mask: The attention mask of all `N + T` tokens.
            scale: Factor by which `q·k` is multiplied. None means `D**-0.5`.
            softcap: Soft cap of the attention logits, or None.
            tokens: Ids of the new tokens, int64 `[B, T]`, for indexes that use token ids. None if
                unknown.
            bias: A bias of the attention logits, passed to `AttentionLayer.step`, or None.
            sink_logits: Logits of learned sinks, passed to `AttentionLayer.step`, or None.
            ids: Positions of the tokens that a trained indexer has chosen, passed to
                `AttentionLayer.step`, or None.
            value_in_key: Whether each value is the beginning of its key (latent attention).

        Returns:
            Attention outputs `[B, H, T, Dv]`.

        Raises:
            UnsupportedError: The scale, the soft cap or the padding of past tokens differs from
                earlier calls, or `AttentionLayer.step` does not support the call.
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
        plain = all(term is None for term in terms.values()) and not value_in_key
        self._begin_prompt(keys, values, plain=plain)
        rows = self._rows_with(keys, values, plain=plain)
        if rows is None:
            output = self.attention.step(queries, keys, values, **terms)
        else:
            output = self.attention.read_chunk(queries, rows)
            if self._rows is None:  # it was the last chunk
                self.attention.settle()  # otherwise its tokens would stay in the window for a while
        if tokens is not None and tokens.shape == (batch, T):
            # pass the ids after `step`, because `step` may report the end of the prompt to the
            # index
            self.attention.index.observe_tokens(tokens, first=len(self.attention) - T)
        return output

    def _begin_prompt(self, keys: Tensor, values: Tensor, *, plain: bool) -> None:
        """Before the first chunk of an announced prompt, decide where its rows are stored.

        `plain` is True if `AttentionLayer.read_chunk` supports the call.
        """
        assert self.attention is not None
        if (prompt := self.expected) is None:
            return
        before, self.expected, self._rows = len(self.attention), None, None
        self.attention.expect_prompt(max(prompt.length, before))
        several = 1 < keys.shape[2] < prompt.length and not before
        # `step` must be called if its class overrides it. It must also be called if tokens are
        # sharded, because all ranks must read the index, and not all may have enough memory.
        own = type(self.attention).step is not AttentionLayer.step
        if not several or not plain or own or is_sharded(self.attention.index):
            return
        if prompt.fits(keys, values):
            self._rows = PromptRows(prompt.length, keys, values)

    def _rows_with(self, keys: Tensor, values: Tensor, *, plain: bool) -> Rows | None:
        """Return all rows of a prompt that is being read, including the new ones, or None if only
        the index has them. The arguments are those of `_begin_prompt`."""
        held, attention = self._rows, self.attention
        assert attention is not None
        if held is None:
            return None
        end = held.length + keys.shape[2]
        fits = held.length == len(attention) and end <= held.room
        if not plain or not fits or attention.decodes(keys.shape[2]):
            self._rows = None
            return None
        if end == held.room:
            self._rows = None  # this is the last chunk
        return held.extended(keys, values)

    def forget_prompt(self) -> None:
        """Forget an announced prompt, and free the rows of one that is being read."""
        self.expected = self._rows = None

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
        """Append one token to each sequence, and compute its attention.

        This is called while a CUDA graph is captured.
        """
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
        """Compute the attention of another model layer that uses this layer's keys and values.

        Args:
            queries: `[B, H, T, D]` of the newest `T` tokens, after the rotary embedding.
            scale: Factor by which `q·k` is multiplied. None means `D**-0.5`.
            softcap: Soft cap of the attention logits, or None.
            sink_logits: Logits of learned sinks, passed to `AttentionLayer.attend`, or None.

        Returns:
            Attention outputs `[B, H, T, Dv]`.

        Raises:
            UnsupportedError: The scale or the soft cap differs from the first call, or
                `AttentionLayer.attend` does not support the call.
        """
        assert self.attention is not None
        g = self.attention.index.geometry
        self._check_same(g.head_dim**-0.5 if scale is None else scale, softcap)
        return self.attention.attend(queries.to(g.dtype), sink_logits=sink_logits)

    def make(self, **geometry: Any) -> AttentionLayer:
        """Make an empty attention layer with an index for these sizes."""
        return in_plain_torch(self._make)(**geometry)

    def _check_same(self, scale: float, softcap: float | None) -> None:
        """Raise UnsupportedError if the logits' scale or soft cap differs from earlier calls."""
        assert self.attention is not None
        g = self.attention.index.geometry
        if (scale, softcap) != (g.scale, g.softcap):
            raise UnsupportedError(
                f"scaling, softcap: got {scale}, {softcap}, but the layer's first call had "
                f"{g.scale}, {g.softcap}; these values must not change"
            )

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        attention = self.attention  # read only once, because another thread may set it to None
        return 0 if attention is None else attention.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the attention mask. The mask covers all keys, so the
        offset is 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which means that the length is not limited."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing. The first call of `attend` makes the index."""

    def reset(self) -> None:
        """Remove all tokens."""
        self.attention = self._rows = None

    def checkpoint(self) -> Any:
        """Return a checkpoint for `rollback`. It is None for an empty layer."""
        return None if self.attention is None else (self.attention, self.attention.checkpoint())

    def rollback(self, checkpoint: Any) -> None:
        """Return to the state that `checkpoint` recorded."""
        self.attention = self._rows = None
        if checkpoint is not None:
            attention, before = checkpoint
            attention.rollback(before)
            self.attention = attention

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens. The argument is their number, negated; positive values raise
        ValueError."""
        removed = check_crop(tokens_to_remove)
        self._rows = None
        if self.attention is not None:
            self.attention.truncate(max(len(self.attention) + removed, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`."""
        self._rows = None
        if self.attention is not None:
            self.attention.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times. The copies of a sequence are
        adjacent."""
        self.reorder_cache(repeated(self._batch, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences `indices` of the batch: int64 indices, or a bool mask `[B]`."""
        self.reorder_cache(selected(self._batch, indices))

    def offload(self) -> None:
        """Raise UnsupportedError. The option `store` of the index determines where keys and values
        are stored."""
        raise UnsupportedError(
            "offloading: got True, but an index does not support it; to store keys and values in "
            'host memory, pass index_options={"store": "host"}'
        )

    prefetch = offload

    @property
    def _batch(self) -> int:
        return 0 if self.attention is None else self.attention.batch_size


def repeated(batch: int, repeats: int) -> Tensor:
    """Return the sequence indices `0, 0, …, 1, 1, …`, each one `repeats` times.

    Args:
        batch: Number of sequences.
        repeats: Number of copies of each index, at least 1.

    Returns:
        Int64 `[batch * repeats]`.

    Raises:
        ValueError: `repeats` is below 1.
    """
    check.at_least("repeats", repeats, 1)
    return torch.arange(batch).repeat_interleave(repeats)


def selected(batch: int, indices: Tensor) -> Tensor:
    """Convert a selection of sequences (indices or a mask) to indices.

    Args:
        batch: Number of sequences. 0 skips the check of the range.
        indices: Int64 indices, or a bool mask `[B]`, True for the sequences to select.

    Returns:
        Int64 indices.

    Raises:
        ValueError: The shape is wrong, or an index is out of range.
        TypeError: `indices` is not an int64 or bool tensor.
    """
    if isinstance(indices, Tensor) and indices.dtype == torch.bool:
        check.tensor("indices", indices, {"B": batch or None})
        return indices.nonzero()[:, 0]
    check.rows("indices", indices, batch or None)
    return indices


def check_crop(tokens_to_remove: Any) -> int:
    """Convert the argument of `crop` to an int. transformers 5.17 passes a tensor.

    Raises ValueError if the number is positive.
    """
    removed = tokens_to_remove.item() if isinstance(tokens_to_remove, Tensor) else tokens_to_remove
    if not isinstance(removed, int) or isinstance(removed, bool) or removed > 0:
        raise ValueError(
            f"tokens_to_remove: got {removed!r}, allowed is a number of at most 0 (-3 removes 3 "
            "tokens)"
        )
    return removed


ALLOWED = (
    "allowed are only the attributes shape, dtype and device, because the elements are in the "
    "index and the local window"
)


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """Stands for a layer's keys or values, but has only their shape, dtype and device.

    The elements are in the index. So any operation that needs them raises an error.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions of a tensor of this shape."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes that a tensor of this shape and dtype occupies."""
        return self.numel() * self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or only its size in dimension `dim`, like `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions of the shape, like `Tensor.dim`."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements of a tensor of this shape."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"keys, values: got .{name}, {ALLOWED}")

    def __getitem__(self, index: object) -> NoReturn:
        raise UnsupportedError(f"keys, values: got [{index!r}], {ALLOWED}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise UnsupportedError(f"keys, values: got {name}, {ALLOWED}")
