"""Exact softmax attention over given rows: in one call, block by block, or merged from parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from kvindex.core.protocol import Attended

NEVER = float("-inf")

Block: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Keys `[B, G, R, D]`, values `[B, G, R, Dv]` and a bias of the logits, or None."""


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scale logits, and bound them by a softcap if there is one.

    Args:
        logits: Inner products, any shape.
        scale: Factor of the logits.
        softcap: Bound: the result is `softcap · tanh(scale · logits / softcap)`. None for no bound.
    """
    logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@overload
def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with one query per head to `R` rows per KV head. Sums are accumulated in float32.

    Args:
        queries: `[B, H, D]`.
        keys: `[B, G, R, D]`.
        values: `[B, G, R, Dv]`.
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.
        bias: Added to the logits, float32, broadcast to `[B, H, R]`; `-inf` hides a row.
        return_lse: Return the log-sum-exp of the logits, too, which `merge` needs.

    Returns:
        Output `[B, H, Dv]` in the queries' dtype, 0 for a query that sees no row. With `return_lse`
        also the log-sum-exp, float32 `[B, H]`, `-inf` for a query that sees no row.
    """
    block = (keys, values, None if bias is None else bias[:, :, None])
    output, lse = _attended(queries[:, :, None], [block], scale, softcap)
    return (output[:, :, 0], lse[:, :, 0]) if return_lse else output[:, :, 0]


@overload
def attend_blocks(
    queries: Tensor,
    blocks: Iterable[Block],
    *,
    scale: float,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend_blocks(
    queries: Tensor,
    blocks: Iterable[Block],
    *,
    scale: float,
    softcap: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend_blocks(
    queries: Tensor,
    blocks: Iterable[Block],
    *,
    scale: float,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with `T` queries per head to blocks of rows, with a running softmax.

    The result is the same as for one block with all rows, but only one block's logits are in memory
    at a time.

    Args:
        queries: `[B, H, T, D]`.
        blocks: Keys `[B, G, R, D]`, values `[B, G, R, Dv]`, and a bias that broadcasts to `[B, H,
            T, R]` or None.
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.
        return_lse: Return the log-sum-exp of the logits, too.

    Returns:
        Output `[B, H, T, Dv]`. With `return_lse` also the log-sum-exp, float32 `[B, H, T]`.

    Raises:
        ValueError: The blocks have no rows.

    Source: Milakov and Gimelshein, Online Normalizer Calculation for Softmax (2018).
    """
    output, lse = _attended(queries, blocks, scale, softcap)
    return (output, lse) if return_lse else output


def merge(parts: Sequence[Attended]) -> Attended:
    """Merge attention over several sets of rows into attention over all of them.

    The result is exact: outputs are weighted by `exp(lse)`. A part that sees no row (`lse` of
    `-inf`) has no effect.

    Args:
        parts: Attention over each set of rows. No row is in two sets.

    Raises:
        ValueError: There is no part.
    """
    if not parts:
        raise ValueError("parts: got none, allowed is at least one")
    each = torch.stack([part.lse for part in parts])
    lse = each.logsumexp(0)  # -inf where no part sees a row
    weights = torch.exp(each - lse.masked_fill(lse == NEVER, 0.0))[..., None]
    outputs = torch.stack([part.output for part in parts])
    output = (outputs.float() * weights).sum(0).to(outputs.dtype)
    found = torch.stack([part.found for part in parts]).sum(0, dtype=torch.int32)
    return Attended(output, lse, found)


def with_sink_logits(output: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Add a learned sink to attention: a logit in the softmax's denominator without key and value.

    The result is `output · exp(lse - logaddexp(lse, s))` for a sink with the logit `s`.

    Args:
        output: Attention without the sink, `[…, Dv]`.
        lse: Its log-sum-exp, float32 `[…]`.
        sink_logits: Logits of the sinks, broadcast to `lse`.

    Returns:
        `[…, Dv]` in the output's dtype.

    Source: gpt-oss model card, arXiv 2508.10925, section 2.2.
    """
    fraction = torch.sigmoid(lse - sink_logits.float()).masked_fill(lse == NEVER, 0.0)
    return (output.float() * fraction[..., None]).to(output.dtype)


def _attended(
    queries: Tensor, blocks: Iterable[Block], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the results of `attend_blocks`: output and log-sum-exp."""
    B, H, T, _ = queries.shape
    peak: Tensor | None = None  # running maximum of the logits, [B, H, T, 1]
    total = output = torch.zeros((), device=queries.device)  # [B, H, T, 1], [B, H, T, Dv]
    for keys, values, bias in blocks:
        G, R = keys.shape[1:3]
        if R == 0:
            continue
        folded = queries.float().reshape(B, G, H // G * T, -1)  # reads each group's keys once
        logits = cap(folded @ keys.float().mT, scale, softcap).view(B, H, T, -1)
        if bias is not None:
            logits = logits + bias
        block_peak = logits.amax(-1, keepdim=True)
        new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
        base = new_peak.masked_fill(new_peak == NEVER, 0.0)  # if no row is seen, exp(-inf - 0) = 0
        weights = torch.exp(logits - base)
        part = weights.view(B, G, H // G * T, -1) @ values.float()
        part, weight = part.view(B, H, T, -1), weights.sum(-1, keepdim=True)
        if peak is None:
            output, total = part, weight
        else:
            shrink = torch.exp(peak - base)
            output, total = output * shrink + part, total * shrink + weight
        peak = new_peak
    if peak is None:
        raise ValueError("blocks: got no rows at all, allowed is at least one row")
    output = (output / total.masked_fill(total == 0, 1.0)).to(queries.dtype)
    return output, (peak + total.log())[..., 0]


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, valid: Tensor | None = None
) -> Tensor:
    """Attend causally from the newest `T` tokens to all `N` rows, by torch's fused kernel.

    The kernel does not support a softcap.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, G, N, D]`.
        values: `[B, G, N, Dv]`.
        scale: Factor of the logits.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Attention outputs `[B, H, T, Dv]`. The output of a query before the first valid token has no
        meaning.
    """
    T, N = queries.shape[2], keys.shape[2]
    if valid is None and 1 < T < N and _serves(queries, keys, values):
        return _past_and_own(queries, keys, values, scale)
    mask: Tensor | None = None
    if valid is None and N > T > 1 and queries.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # imports triton

        mask = causal_lower_right(T, N)  # the kernel computes this mask, no tensor is built
    elif valid is not None or (N > T > 1):
        rows = torch.arange(N, device=queries.device)
        mask = (rows <= torch.arange(N - T, N, device=queries.device)[:, None])[None, None]
        if valid is not None:
            # queries that see no valid token attend to padding, because softmax needs an entry
            sees_none = valid.cumsum(1)[:, None, N - T :, None] == 0
            mask = mask & (valid[:, None, None] | sees_none)
    return torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and T > 1,
        scale=scale,
        enable_gqa=True,
    )


def _serves(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if `_fused` supports these tensors. Its log-sum-exp has no gradient."""
    parts = queries, keys, values
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    dense = all(part.stride(3) == 1 for part in parts)
    return (
        queries.device.type == "cpu" and dense and keys.shape[3] == values.shape[3] and not learns
    )


def _past_and_own(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute `attend_causal` for `N > T` in two parts, so that torch needs no explicit mask.

    All queries attend to the first `N - T` rows without a mask. The newest `T` rows need a square
    causal mask, for which torch has a fast path.
    """
    (B, H, T, D), (_, G, N, _) = queries.shape, keys.shape
    queries = queries.reshape(B * G, H // G, T, D)
    keys, values = keys.reshape(B * G, 1, N, D), values.reshape(B * G, 1, N, D)
    past = keys[:, :, : N - T], values[:, :, : N - T]
    own = keys[:, :, N - T :], values[:, :, N - T :]
    before, before_lse = _fused(queries, *past, scale, causal=False)
    among, among_lse = _fused(queries, *own, scale, causal=True)
    fraction = torch.sigmoid(among_lse - before_lse)[..., None]
    merged = torch.lerp(before.to(fraction.dtype), among.to(fraction.dtype), fraction)
    output = queries.new_empty(
        B, T, G, H // G, D
    )  # the heads of a token are adjacent, the order in which callers read them
    output.permute(0, 2, 3, 1, 4).copy_(merged.view(B, G, H // G, T, D))
    return output.flatten(2, 3).transpose(1, 2)


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention `[X, g, T, D]` and its lse `[X, g, T]` with torch's fused kernel for CPUs.

    Queries are `[X, g, T, D]`, keys and values `[X, 1, R, D]`; the heads of a group share them.
    """
    keys, values = (rows.expand(-1, queries.shape[1], -1, -1) for rows in (keys, values))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = fused(queries, keys, values, is_causal=causal, scale=scale)
    return output, lse
