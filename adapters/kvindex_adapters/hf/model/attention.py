"""The attention function and the mask function that `attach` registers with transformers as
`kvindex`."""

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
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.latent import absorbed, is_latent, projected
from kvindex_adapters.hf.unsupported import (
    attends_across_layers,
    check_attention,
    layer_number,
    sink_logits_of,
)

NAME = "kvindex"
"""Value of `_attn_implementation` in the configuration of an attached model."""

QUERIES = 1024
"""Number of queries that full attention processes at a time, to limit memory. Results do not depend
on it."""


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
    """Compute the attention of one layer. transformers calls this function.

    Args:
        module: The attention module.
        query: `[B, H, T, D]`, after the rotary embedding.
        key: For a layer with an index, the new keys `[B, G, T, D]`. For other layers, all keys `[B,
            G, N, D]`.
        value: The values of the same tokens, `[B, G, T, Dv]` or `[B, G, N, Dv]`.
        attention_mask: The result of `mask`, or a mask that the model itself has made.
        scaling: Factor by which `q·k` is multiplied. None means `D**-0.5`.
        dropout: Dropout probability, which must be 0.
        softcap: Soft cap of the attention logits, or None.
        **kwargs: Further arguments of the model's attention call.

    Returns:
        The output `[B, T, H, Dv]`, and None instead of attention weights.

    Raises:
        UnsupportedError: The attention has terms that an index cannot compute, or no `update` of
            the cache preceded the call.
    """
    name, attachment = type(module).__name__, attached.get(module)
    pending: Any = None if attachment is None else attachment.take_pending()
    shares_keys = attachment is not None and pending is None
    if attachment is not None and shares_keys:
        pending = attachment.shared(layer_number(module))
    plain = softcap is None and attention_mask is None
    if pending is None and plain and attends_across_layers(module):
        check_attention(name, module, 1, dropout, kwargs)
        return _attend_all(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if pending is None:
        raise UnsupportedError(
            f"{name}: got a call of the attention function without a preceding update() of the "
            f"cache; pass the cache of attach() as {CACHE}"
        )
    (cache, layer, states), ids = pending, None
    latent = isinstance(layer, IndexedLayer) and not shares_keys and is_latent(module)
    # Some models with latent attention pass keys and values to `update`, not latents. Then `key` is
    # the tensor that `update` received, and is not converted to latents.
    latent = latent and states[0] is not key
    if isinstance(layer, ChosenLayer):
        chosen = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
        heads, known = 1 if latent else key.shape[1], layer.get_seq_length()
        ids = chosen_ids(module, heads, known, attention_mask, *chosen)
        attention_mask = None  # the chosen tokens already exclude masked tokens
    tokens = query.shape[2]
    if tokens > 1:  # with past tokens or a mask, `is_causal` has no effect
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
        apply: Callable[..., Tensor] = _NoGradient.apply  # torch does not annotate the type
        output = apply(output, query)
    return output, None


@in_plain_torch
def _attend_all(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Compute attention without a mask. Return `[B, H, T, Dv]`."""
    output: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scale
    )
    return output


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
    """Compute attention with an index, or full attention. Return `[B, H, T, Dv]`.

    `rows` are the new keys and values, or None for a layer that uses the keys of another layer.
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
                "position_bias: got a bias in a layer that uses the keys of another layer; allowed "
                "is None"
            )
        if parsed.visible is not None:
            raise UnsupportedError(
                "attention_mask: got a mask that is not causal, in a layer that uses the keys of "
                "another layer; allowed is a causal mask"
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
    """Make the attention mask of a forward pass. transformers calls this function.

    Args:
        batch_size: Number of sequences, `B`.
        q_length: Number of new tokens, `T`.
        kv_length: Number of tokens in the layer's cache after the forward pass, `N`.
        q_offset: Position of the first new token.
        kv_offset: Position of the first of the `N` tokens.
        mask_function: The function of transformers that says which tokens a query attends to.
        attention_mask: Padding mask `[B, kv_offset + N]`, or None.
        allow_is_causal_skip: False if the result must be a mask, even for causal attention.
        **kwargs: Further arguments of transformers' mask functions.

    Returns:
        For causal attention, the padding mask, bool `[B, N]`, or None without padding. For other
        attention (sliding windows, chunks, or `allow_is_causal_skip=False`), the 4-D mask that sdpa
        would get; but None for a single query that attends to all tokens.

    Raises:
        UnsupportedError: The padding mask has fewer columns than there are tokens.
    """
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    if attention_mask is not None and attention_mask.shape[1] < kv_offset + kv_length:
        raise UnsupportedError(
            f"attention_mask: got {attention_mask.shape[1]} columns, allowed are "
            f"{kv_offset + kv_length}, one for each token in the cache and each new token"
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
    """Return True if two functions have the same code and equal closure variables."""
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
    """Compute full attention of one token per sequence with torch's fused kernel.

    The query heads of a KV head are passed as several queries of one head, so that keys need not be
    repeated.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, Dv]`.
        bias: `[B, 1, 1, N]`, 0 for visible tokens and -inf for hidden tokens. None if all are
            visible.
        scale: Factor by which `q·k` is multiplied.

    Returns:
        Output `[B, H, 1, Dv]`.
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
    """Compute full attention of the newest `T` of `N` tokens, in a layer without an index.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, G, N, D]`.
        value: `[B, G, N, Dv]`.
        mask: A bool mask `[B, 1, T, N]`. Or a padding mask `[B, N]` for causal attention. Or None
            for causal attention without padding.
        scale: Factor by which `q·k` is multiplied.
        softcap: Soft cap of the attention logits, or None.
        bias: Bias of the attention logits, `[B, H, T, N]`, or None.
        sinks: Logits of learned sinks, `[H]` or `[B, H, T]`, or None.

    Returns:
        Output `[B, H, T, Dv]`.
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
    """The identity function, with a backward pass that raises an error, because an index has no
    gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "backward: got a call, but an index has no gradient; use attach() only for inference"
        )
