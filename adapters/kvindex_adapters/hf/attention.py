"""The attention and mask functions that transformers calls by the name `kvindex`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvindex.core.guard import in_plain_torch
from kvindex.ops.attention import attend_blocks
from kvindex_adapters.hf.attachment import attached
from kvindex_adapters.hf.cache_layer import IndexedLayer
from kvindex_adapters.hf.unsupported import UnsupportedError, check_attention

NAME = "kvindex"
"""Name of the attention implementation in a model's configuration."""

QUERIES = 1024
"""Queries of a dense layer per block: bounds the memory of logits, not the result."""


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
    """Attention of query `[B, H, T, D]`: (output `[B, T, H, Dv]`, no weights).

    Raises UnsupportedError for a call that cannot be served.
    """
    name, attachment = type(module).__name__, attached.get(module)
    pending = None if attachment is None else attachment.take_pending()
    if pending is None:
        raise UnsupportedError(
            f"{name}: got a call of attention without an update of the cache before it; allowed "
            "is one call for each update of the cache that attach() gave"
        )
    cache, layer = pending
    check_attention(name, module, query.shape[2], dropout, kwargs)
    gradients = torch.is_grad_enabled()
    attend, bias = _attend_without_gradient if gradients else _attend, kwargs.get("position_bias")
    output = attend(cache, layer, query, key, value, attention_mask, scaling, softcap, bias)
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
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention `[B, H, T, Dv]` by an index or densely."""
    if not isinstance(layer, IndexedLayer):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _attend_dense(query, key, value, mask, scaling, softcap, bias)
    if mask is not None and mask.ndim != 2:
        raise UnsupportedError(
            f"attention_mask: got one of shape {list(mask.shape)} in a full-attention layer, "
            "allowed is causal attention with left padding [B, N]"
        )
    padding = None if mask is None else mask.bool()
    options = dict(scale=scaling, softcap=softcap, tokens=cache.tokens, bias=bias)
    if cache.attends is not None:
        return cache.attends(layer, query, key, value, **options)
    return layer.attend(query, key, value, padding, **options)


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
    """The mask of a step: padding bool `[B, N]` for causal attention, or None without padding.

    Whatever is not plain causal attention (sliding windows, chunks, what `allow_is_causal_skip`
    rules out) gets the 4-D mask that sdpa would get, except that a single query that sees
    everything gets none.
    """
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    if mask_function is causal_mask_function and allow_is_causal_skip:
        if attention_mask is None:
            return None
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        return torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
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


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


@in_plain_torch
def _attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of the newest `T` of `N` tokens over all of them, for a layer without an index.

    mask: bool `[B, 1, T, N]`; `[B, N]`, padding beside causal order; or None for causal order.
    bias: a term of the logits `[B, H, T, N]`, or None.
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
        parts.append(attend_blocks(block, [(key, value, visible)], scale=scale, softcap=softcap))
    return torch.cat(parts, dim=2)


class _NoGradient(torch.autograd.Function):
    """Identity whose backward pass raises: rows in an index have no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "backward: got a call, allowed is inference: an index has no gradient"
        )
