"""Exact softmax attention over the rows it is given: in one piece, block by block, merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from kvindex.core.protocol import Attended

NEVER = float("-inf")

Block: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Rows and their bias: keys `[B, G, R, D]`, values `[B, G, R, Dv]`, and a term of the logits."""


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`scale · logits`, bounded by `softcap · tanh(· / softcap)` where there is a softcap."""
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
    """One query per head over `R` rows per KV head: `[B, H, Dv]` in the queries' dtype.

    queries `[B, H, D]`, keys `[B, G, R, D]`, values `[B, G, R, Dv]`; bias float32, broadcast to
    `[B, H, R]`, is added to the logits and `-inf` hides a row. A query that sees no row gives 0.
    Accumulation is float32. return_lse: give the logarithm of the sum of the logits' exponentials,
    too, float32 `[B, H]`, `-inf` for a query that sees no row: what `merge` needs.
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
    """`T` queries per head over blocks of rows, with a running softmax: `[B, H, T, Dv]`.

    queries `[B, H, T, D]`; each block is keys `[B, G, R, D]`, values `[B, G, R, Dv]` and a bias
    that broadcasts to `[B, H, T, R]`, or None. As if the blocks were one (online softmax:
    Milakov and Gimelshein, 2018), but no more than one block's logits are ever held. return_lse:
    as for `attend`, float32 `[B, H, T]`.
    """
    output, lse = _attended(queries, blocks, scale, softcap)
    return (output, lse) if return_lse else output


def merge(parts: Sequence[Attended]) -> Attended:
    """Attention over the rows of all parts, which share no row, from that over each.

    Exact: outputs weighted by `exp(lse)`; a part that sees no row (`lse` of `-inf`) counts nothing.
    Raises ValueError for no part at all.
    """
    if not parts:
        raise ValueError("parts: got none, allowed is at least one")
    each = torch.stack([part.lse for part in parts])
    lse = each.logsumexp(0)  # -inf where all are
    weights = torch.exp(each - lse.masked_fill(lse == NEVER, 0.0))[..., None]
    outputs = torch.stack([part.output for part in parts])
    output = (outputs.float() * weights).sum(0).to(outputs.dtype)
    found = torch.stack([part.found for part in parts]).sum(0, dtype=torch.int32)
    return Attended(output, lse, found)


def with_sink_logits(output: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Attention with a term more in the softmax's denominator, of no key and of value 0.

    output `[…, Dv]` and its lse float32 `[…]`, of attention without it; sink_logits: its logit `s`,
    which broadcasts to the lse. `output · exp(lse - logaddexp(lse, s))`, in the output's dtype
    (learned sinks: gpt-oss model card, arXiv 2508.10925, section 2.2).
    """
    fraction = torch.sigmoid(lse - sink_logits.float()).masked_fill(lse == NEVER, 0.0)
    return (output.float() * fraction[..., None]).to(output.dtype)


def _attended(
    queries: Tensor, blocks: Iterable[Block], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`attend_blocks` and its logarithms of sums."""
    B, H, T, _ = queries.shape
    peak: Tensor | None = None  # running maximum of the logits, [B, H, T, 1]
    total = output = torch.zeros((), device=queries.device)  # [B, H, T, 1], [B, H, T, Dv]
    for keys, values, bias in blocks:
        G, R = keys.shape[1:3]
        if R == 0:
            continue
        folded = queries.float().reshape(B, G, H // G * T, -1)  # a group reads its keys once
        logits = cap(folded @ keys.float().mT, scale, softcap).view(B, H, T, -1)
        if bias is not None:
            logits = logits + bias
        block_peak = logits.amax(-1, keepdim=True)
        new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
        base = new_peak.masked_fill(new_peak == NEVER, 0.0)  # no row seen: exp(-inf - 0) = 0
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

        mask = causal_lower_right(T, N)  # a kernel's own order, of which no tensor is made
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
    """Whether `_fused` takes these rows; it has no gradient of its second result."""
    parts = queries, keys, values
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    dense = all(part.stride(3) == 1 for part in parts)
    return (
        queries.device.type == "cpu" and dense and keys.shape[3] == values.shape[3] and not learns
    )


def _past_and_own(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`attend_causal` where `N > T`: no mask, which is slow, for rows that all queries see."""
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
    )  # heads of a token side by side, as they are read
    output.permute(0, 2, 3, 1, 4).copy_(merged.view(B, G, H // G, T, D))
    return output.flatten(2, 3).transpose(1, 2)


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention `[X, g, T, D]` and its lse `[X, g, T]` by torch's fused kernel for CPUs.

    queries `[X, g, T, D]`; keys, values `[X, 1, R, D]`, which the heads of a group share.
    """
    keys, values = (rows.expand(-1, queries.shape[1], -1, -1) for rows in (keys, values))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = fused(queries, keys, values, is_causal=causal, scale=scale)
    return output, lse
