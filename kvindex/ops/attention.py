"""Exact softmax attention to given keys and values, and the merge of several attention results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from kvindex.core.protocol import Attended

NEVER = float("-inf")

HOPPER = (9, 0)
"""First compute capability on which cuDNN's attention is much faster than FlashAttention 2 (about
640 and 350 TFLOP/s with D = 128 on an H200; docs/lab/prompts.md)."""

PIECE = 1024
"""Smallest number of keys for which cuDNN computes the attention of a chunk of a prompt."""

Block: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Keys `[B, G, R, D]`, values `[B, G, R, Dv]`, and a bias to add to the logits, or None."""


def cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Multiply inner products by `scale`, and bound the result with a softcap.

    Args:
        logits: Inner products of queries and keys, any shape.
        scale: Factor, such as `D^-1/2`.
        softcap: Bound: the result is `softcap * tanh(scale * logits / softcap)`. None: no bound.
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
        softcap: Bound of the logits (`cap`), or None.
        bias: Added to the logits, float32, broadcast to `[B, H, R]`; `-inf` masks a row out.
        return_lse: Also return the log-sum-exp of the logits, which `merge` needs.

    Returns:
        Output `[B, H, Dv]` in the queries' dtype; with `return_lse` also the log-sum-exp, float32
        `[B, H]`. If all rows of a query are masked out, its output is 0 and its log-sum-exp `-inf`.
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

    The result is the attention to the rows of all blocks together, but only one block's logits are
    in memory at a time.

    Args:
        queries: `[B, H, T, D]`.
        blocks: For each block: keys `[B, G, R, D]`, values `[B, G, R, Dv]`, and a bias that
            broadcasts to `[B, H, T, R]`, or None.
        scale: Factor of the logits.
        softcap: Bound of the logits (`cap`), or None.
        return_lse: Also return the log-sum-exp of the logits.

    Returns:
        Output `[B, H, T, Dv]`; with `return_lse` also the log-sum-exp, float32 `[B, H, T]`.

    Raises:
        ValueError: The blocks have no rows.

    Source: Milakov and Gimelshein, Online Normalizer Calculation for Softmax (2018).
    """
    output, lse = _attended(queries, blocks, scale, softcap)
    return (output, lse) if return_lse else output


def merge(parts: Sequence[Attended]) -> Attended:
    """Merge attention to several sets of rows into attention to all of these rows.

    The result is exact: it is the mean of the outputs, weighted by `exp(lse)`. An output with an
    `lse` of `-inf`, from an empty set of rows, has no effect.

    Args:
        parts: The attention to each set of rows. The sets must not overlap.

    Raises:
        ValueError: `parts` is empty.
    """
    if not parts:
        raise ValueError("parts: got an empty list, allowed is at least one attention result")
    each = torch.stack([part.lse for part in parts])
    lse = each.logsumexp(0)  # -inf for a query that attends to no row at all
    weights = torch.exp(each - lse.masked_fill(lse == NEVER, 0.0))[..., None]
    outputs = torch.stack([part.output for part in parts])
    output = (outputs.float() * weights).sum(0).to(outputs.dtype)
    found = torch.stack([part.found for part in parts]).sum(0, dtype=torch.int32)
    return Attended(output, lse, found)


def with_sink_logits(output: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Add a learned sink: a logit in the softmax's denominator that has no key and no value.

    The result is `output * exp(lse - logaddexp(lse, s))` for a sink with the logit `s`.

    Args:
        output: Attention output without the sink, `[..., Dv]`.
        lse: Log-sum-exp of the logits without the sink, float32 `[...]`.
        sink_logits: Logits of the sinks, broadcast to `lse`.

    Returns:
        Attention output with the sink, `[..., Dv]`, in the dtype of `output`.

    Source: gpt-oss model card, arXiv 2508.10925, section 2.2.
    """
    fraction = torch.sigmoid(lse - sink_logits.float()).masked_fill(lse == NEVER, 0.0)
    return (output.float() * fraction[..., None]).to(output.dtype)


def _attended(
    queries: Tensor, blocks: Iterable[Block], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention over several blocks of rows, and return the output and the log-sum-exp."""
    B, H, T, _ = queries.shape
    peak: Tensor | None = None  # running maximum of the logits, [B, H, T, 1]
    total = output = torch.zeros((), device=queries.device)  # [B, H, T, 1], [B, H, T, Dv]
    for keys, values, bias in blocks:
        G, R = keys.shape[1:3]
        if R == 0:
            continue
        # combine the queries of the heads that share a KV head into one matrix, so that the keys
        # of the KV head are read once
        folded = queries.float().reshape(B, G, H // G * T, -1)
        logits = cap(folded @ keys.float().mT, scale, softcap).view(B, H, T, -1)
        if bias is not None:
            logits = logits + bias
        block_peak = logits.amax(-1, keepdim=True)
        new_peak = block_peak if peak is None else torch.maximum(peak, block_peak)
        # if all rows are masked out, the maximum is -inf: subtract 0 instead, because -inf - -inf
        # is NaN
        base = new_peak.masked_fill(new_peak == NEVER, 0.0)
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
    """Attend causally from the newest `T` tokens to all `N` tokens, with torch's fused attention.

    There is no argument for a softcap, because torch's kernel does not support it.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, G, N, D]`.
        values: `[B, G, N, Dv]`.
        scale: Factor of the logits.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Attention outputs `[B, H, T, Dv]`. The output of padding before the first valid token has no
        meaning.
    """
    T, N = queries.shape[2], keys.shape[2]
    if valid is None and 1 < T < N and _serves(queries, keys, values):
        if queries.is_cuda:
            return _by_pieces(queries, keys, values, scale)
        return _past_and_own(queries, keys, values, scale)
    mask: Tensor | None = None
    if valid is None and N > T > 1 and queries.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # imports triton

        mask = causal_lower_right(T, N)  # computed inside the kernel, without a tensor
    elif valid is not None or (N > T > 1):
        rows = torch.arange(N, device=queries.device)
        mask = (rows <= torch.arange(N - T, N, device=queries.device)[:, None])[None, None]
        if valid is not None:
            # let a query before the first valid token attend to padding, because a softmax over no
            # rows is NaN
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
    """Return True if a kernel of torch that also returns the log-sum-exp supports these tensors.

    They must be contiguous in the last dimension, and must not need gradients. Keys and values must
    have the same last dimension. On a GPU, see `_cudnn_serves`.
    """
    parts = queries, keys, values
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    dense = all(part.stride(3) == 1 for part in parts)
    if learns or not dense or keys.shape[3] != values.shape[3]:
        return False
    if queries.device.type == "cpu":
        return True
    return queries.device.type == "cuda" and _cudnn_serves(queries, keys, values)


def _cudnn_serves(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if cuDNN can compute the attention, and is faster than torch's default kernel.

    cuDNN prepares each new combination of shapes and strides for about 60 ms. Therefore it computes
    only chunks of a multiple of `PIECE` queries, whose keys `_by_pieces` divides into few sizes.
    """
    if queries.shape[2] % PIECE or torch.cuda.get_device_capability(queries.device) < HOPPER:
        return False
    cuda = torch.backends.cuda
    given = queries, keys, values, None, 0.0, False, True
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(*given))


def _past_and_own(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute the causal attention of `T` new tokens to `N > T` tokens, without an explicit mask.

    All queries attend to the first `N - T` tokens without a mask. The attention of the newest `T`
    tokens to each other needs a square causal mask, for which torch has a fast path. The two
    results are merged.
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
    # store the heads of a token one after the other in memory, because callers read them in this
    # order
    output = queries.new_empty(B, T, G, H // G, D)
    output.permute(0, 2, 3, 1, 4).copy_(merged.view(B, G, H // G, T, D))
    return output.flatten(2, 3).transpose(1, 2)


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention and log-sum-exp with torch's fused kernel for CPUs.

    Args:
        queries: `[X, g, T, D]` for `X` KV heads with `g` query heads each.
        keys: `[X, 1, R, D]`, shared by the query heads of a KV head.
        values: `[X, 1, R, D]`.
        scale: Factor of the logits.
        causal: Whether to use a causal mask.

    Returns:
        Output `[X, g, T, D]` and log-sum-exp `[X, g, T]`.
    """
    keys, values = (rows.expand(-1, queries.shape[1], -1, -1) for rows in (keys, values))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = fused(queries, keys, values, is_causal=causal, scale=scale)
    return output, lse


def _by_pieces(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute the causal attention of `T` new tokens to `N > T` tokens with cuDNN, on a GPU.

    The keys before the new tokens are divided into pieces, whose sizes are powers of two. The
    results of the pieces, and of the new tokens among themselves, are merged by their log-sum-exp.
    """
    (B, H, T, D), N = queries.shape, keys.shape[2]
    output = queries.new_empty(B, T, H, D).transpose(1, 2)
    each = (torch.split(part, 1) for part in (queries, output, keys, values))
    for query, to, key, value in zip(*each, strict=True):
        own = slice(N - T, N)
        among, lse = _cudnn(query, key[:, :, own], value[:, :, own], scale, causal=True)
        merged = among.float()
        for start, stop in _pieces(N - T):
            rows = key[:, :, start:stop], value[:, :, start:stop]
            part, part_lse = (_flash if stop - start < PIECE else _cudnn)(query, *rows, scale)
            merged.lerp_(part.float(), torch.sigmoid(part_lse - lse)[..., None])
            lse = torch.logaddexp(lse, part_lse)
        to.copy_(merged)
    return output


def _pieces(rows: int) -> Iterator[tuple[int, int]]:
    """Divide rows into pieces: powers of two, the largest first, and a rest below `PIECE`."""
    start = 0
    while rows - start >= PIECE:
        stop = start + (1 << (rows - start).bit_length() - 1)
        yield start, stop
        start = stop
    if start < rows:
        yield start, rows


def _cudnn(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute attention and log-sum-exp of one sequence with cuDNN.

    Args:
        queries: `[1, H, T, D]`.
        keys: `[1, G, R, D]`.
        values: `[1, G, R, D]`.
        scale: Factor of the logits.
        causal: Whether to use a causal mask. `T` must then be equal to `R`.

    Returns:
        Output `[1, H, T, D]` and log-sum-exp, float32 `[1, H, T]`.
    """
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    rows = (_token_major(part) for part in (queries, keys, values))
    output, lse = cudnn(*rows, None, True, 0.0, causal, False, scale=scale)[:2]
    return output, lse.view(queries.shape[:3])


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the same with torch's FlashAttention, which prepares nothing for a new shape."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output, lse = flash(queries, keys, values, 0.0, False, False, scale=scale)[:2]
    return output, lse


def _token_major(part: Tensor) -> Tensor:
    """Return `[1, heads, T, D]` with strides that depend only on the shape.

    The heads of a token are stored one after the other. The tensor is copied if its strides differ.
    """
    _, heads, tokens, width = part.shape
    strides = heads * tokens * width, width, heads * width, 1
    if part.stride()[1:] == strides[1:]:
        return part.as_strided(part.shape, strides, part.storage_offset())
    return part.transpose(1, 2).contiguous().transpose(1, 2)
