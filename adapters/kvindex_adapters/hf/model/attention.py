"""The attention and mask functions that transformers calls by the name `kvindex`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kvindex.core.transaction import in_plain_torch
from kvindex.ops.attention import attend_blocks, with_sink_logits
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.layer import IndexedLayer
from kvindex_adapters.hf.cache.layer_kinds import ChosenLayer, chosen_ids
from kvindex_adapters.hf.cache.padding import MaskInfo
from kvindex_adapters.hf.cache.sliding import SlidingLayer
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.latent import absorbed, is_latent, projected
from kvindex_adapters.hf.unsupported import check_attention, layer_number, sink_logits_of

NAME = "kvindex"
"""Name of the attention implementation in a model's configuration."""

QUERIES = 1024
"""Queries that a dense layer processes at a time. This limits memory, and does not affect
results."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; transformers calls this.

    Args:
        module: The attention module.
        query: `[B, H, T, D]`, after the rotary embedding.
        key: `[B, G, T, D]`, as the cache's `update` returned it, or all `N` keys of a dense layer.
        value: `[B, G, T, Dv]`, in the same way.
        attention_mask: The result of `mask`, or a mask that the model made itself.
        scaling: Factor of the logits; None for `D**-0.5`.
        dropout: Dropout probability, which must be 0.
        softcap: Softcap of the logits, or None.
        **kwargs: Further arguments of the model's attention call.

    Returns:
        The output `[B, T, H, Dv]`, and None instead of attention weights.

    Raises:
        UnsupportedError: The call is not supported.
    """
    name, attachment = type(module).__name__, attached.get(module)
    pending: Any = None if attachment is None else attachment.take_pending()
    shares_keys = attachment is not None and pending is None
    if attachment is not None and shares_keys:
        pending = attachment.shared(layer_number(module))
    if pending is None:
        raise UnsupportedError(
            f"{name}: got a call of attention without an update of the cache before it; allowed "
            "is one call for each update of the cache that attach() gave"
        )
    (cache, layer, states), ids = pending, None
    latent = isinstance(layer, IndexedLayer) and not shares_keys and is_latent(module)
    # some models project the latents before `update`, so that the cache gets keys and values
    latent = latent and states[0] is not key
    if isinstance(layer, ChosenLayer):
        chosen = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
        heads, known = 1 if latent else key.shape[1], layer.get_seq_length()
        ids = chosen_ids(module, heads, known, attention_mask, *chosen)
        attention_mask = None  # the chosen rows exclude the masked ones
    tokens = query.shape[2]
    if tokens > 1:  # with past tokens or a mask, attention follows a mask, not `is_causal`
        past = layer.get_seq_length() if isinstance(layer, IndexedLayer) else key.shape[2] - tokens
        tokens = 1 if past or attention_mask is not None else tokens
    check_attention(name, module, tokens, dropout, kwargs)
    gradients = torch.is_grad_enabled()
    attend = _attend_without_gradient if gradients else _attend
    terms = kwargs.get("position_bias"), sink_logits_of(name, module, kwargs), ids
    if latent:
        query, key, value = absorbed(module, query, *states)
    rows = None if shares_keys and isinstance(layer, IndexedLayer) else (key, value)
    output = attend(cache, layer, query, rows, attention_mask, scaling, softcap, *terms, latent)
    if latent:
        output = projected(module, output)
    if output.dtype is not query.dtype:
        output = output.to(query.dtype)
    output = output.transpose(1, 2).contiguous()
    if gradients and query.requires_grad:
        apply: Callable[..., Tensor] = _NoGradient.apply  # torch leaves it untyped
        output = apply(output, query)
    return output, None


def _attend(
    cache: Any,
    layer: Any,
    query: Tensor,
    rows: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    ids: Tensor | None,
    value_in_key: bool,
) -> Tensor:
    """Attend through an index or densely, and return `[B, H, T, Dv]`.

    `rows` are the new keys and values; None for a layer that uses the keys of another layer.
    """
    if not isinstance(layer, IndexedLayer):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert rows is not None
        ring = False
        if isinstance(layer, SlidingLayer):
            key, value, mask = layer.seen(*rows, mask)
            rows, ring = (key, value), layer.ring is not None
        more = softcap, bias, sinks
        one = query.shape[2] == 1 and query.dtype == rows[0].dtype == rows[1].dtype
        if one and more == (None, None, None) and (mask is None or ring):
            return _attend_token(query, *rows, mask, scaling)
        return _attend_dense(query, *rows, mask, scaling, *more)
    parsed = MaskInfo() if mask is None else cache.padding.of_mask(mask)
    terms: Any = dict(scale=scaling, softcap=softcap, sink_logits=sinks)
    if rows is None:
        if bias is not None:
            raise UnsupportedError(
                "position_bias: got one of a layer that uses the keys of another layer"
            )
        if parsed.visible is not None:
            raise UnsupportedError(
                "attention_mask: got one that is not causal, in a layer that uses the keys of "
                "another layer; allowed is a causal one"
            )
        plain = partial(layer.attend_shared, query, **terms)
    else:
        options: Any = dict(tokens=cache.tokens, bias=bias, ids=ids, value_in_key=value_in_key)
        options |= terms
        plain = partial(layer.attend, query, *rows, parsed, **options)
    if cache.attend_override is not None:
        return cache.attend_override(plain, layer, query, rows, bias=bias, ids=ids, **terms)
    return plain()


_attend_without_gradient = torch.no_grad()(_attend)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Make the attention mask of a step; transformers calls this.

    Args:
        batch_size: `B`.
        q_length: Number of new tokens, `T`.
        kv_length: Number of tokens that the layer's cache stores after the step, `N`.
        q_offset: Position of the first new token.
        kv_offset: Position of the first of the `N` tokens.
        mask_function: transformers' rule for the tokens that a query attends to.
        attention_mask: `[B, kv_offset + N]` of padding, or None.
        allow_is_causal_skip: False if the mask must not be left out.
        **kwargs: Further arguments of transformers' mask functions.

    Returns:
        For causal attention the padding, bool `[B, N]`, or None without padding. For other
        attention (sliding windows, chunks, or if `allow_is_causal_skip` is False) the 4-D mask that
        sdpa would get. But a single query that attends to all tokens gets None; this depends on
        the contents of its mask, not on the length of the sequence.

    Raises:
        UnsupportedError: The padding mask has fewer columns than there are tokens.
    """
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + kv_length:
        raise UnsupportedError(
            f"attention_mask: got {attention_mask.shape[1]} columns, allowed is one for each of "
            f"the {kv_offset + kv_length} tokens, those in the cache and the new ones"
        )
    causal, size = mask_function is causal_mask_function, kwargs.get("local_size")
    if q_length == 1 and attention_mask is None and size and allow_is_causal_skip and not causal:
        if kv_length <= size and alike(mask_function, sliding_window_causal_mask_function(size)):
            return None
        allow_is_causal_skip = False
    if causal and allow_is_causal_skip:
        if attention_mask is None:
            return None
        return attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and q_length == 1,
        **kwargs,
    )


def alike(one: Any, other: Any) -> bool:
    """Return True if two functions have the same code and the same closed-over values."""
    if one is other or not isinstance(one, FunctionType) or not isinstance(other, FunctionType):
        return bool(one is other or (isinstance(one, int) and one == other))
    if one.__code__ is not other.__code__:
        return False
    cells = ([cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other))
    return _all_alike(*cells)


def _all_alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        _all_alike(one, other) if isinstance(one, tuple) else alike(one, other)
        for one, other in zip(some, others, strict=True)
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


@in_plain_torch
def _attend_token(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attend from one token to all rows with torch's fused kernel.

    The queries of a group become the queries of one head, so that no key is copied.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, Dv]`.
        bias: `[B, 1, 1, N]`, 0 for visible rows and -inf for others; None if all are visible.
        scale: Factor of the logits.

    Returns:
        `[B, H, 1, Dv]`.
    """
    B, H, _, D = query.shape
    grouped = query.reshape(B, key.shape[1], -1, D)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=bias, scale=scale
    )
    return output.reshape(B, H, 1, -1)


@in_plain_torch
def _attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the newest `T` of `N` tokens to all of them, in a layer without an index.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, Dv]`.
        mask: Bool `[B, 1, T, N]`; or the padding `[B, N]` of causal attention; or None for causal
            attention without padding.
        scale: Factor of the logits.
        softcap: Softcap of the logits, or None.
        bias: A term of the logits `[B, H, T, N]`, or None.
        sinks: Logits of learned sinks, `[H]` or `[B, H, T]`, or None.

    Returns:
        `[B, H, T, Dv]`.
    """
    T, N = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, T, QUERIES):
        block = query[:, :, start : start + QUERIES]
        if mask is not None and mask.ndim == 4:
            visible = mask[:, :, start : start + QUERIES, :N]
        else:
            rows = torch.arange(N, device=query.device)
            newest = rows[N - T + start : N - T + start + block.shape[2]]
            visible = (rows <= newest[:, None])[None, None]
            if mask is not None:
                visible = visible & mask[:, None, None, :N]
        if visible.dtype == torch.bool:
            visible = torch.zeros_like(visible, dtype=torch.float32).masked_fill(
                ~visible, float("-inf")
            )
        if bias is not None:
            visible = visible + bias[:, :, start : start + QUERIES, :N].float()
        options: Any = dict(scale=scale, softcap=softcap, return_lse=True)
        output, lse = attend_blocks(block, [(key, value, visible)], **options)
        if sinks is not None:
            own = sinks[:, None] if sinks.ndim == 1 else sinks[..., start : start + QUERIES]
            output = with_sink_logits(output, lse, own)
        parts.append(output)
    return torch.cat(parts, dim=2)


class _NoGradient(torch.autograd.Function):
    """The identity, whose backward pass raises an error because an index has no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "backward: got a call, allowed is inference: an index has no gradient"
        )
