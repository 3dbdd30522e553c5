"""Causal attention of a prompt's queries to chosen blocks of keys."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.ops.attention import NEVER, Block, attend_blocks

BLOCK = 128
"""Number of tokens in a block of queries and in a block of keys."""


@overload
def attend_chosen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend_chosen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend_chosen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend causally from the newest `T` tokens to the blocks of keys that are chosen for them.

    This is the reference implementation: it computes the logits of all keys and masks those that
    are not chosen, for one block of queries at a time. Sums are accumulated in float32.

    Args:
        queries: `[B, H, T, D]`, for the positions `N - T` to `N - 1`. `N - T` must be a multiple
            of 128.
        keys: `[B, G, N, D]`.
        values: `[B, G, N, Dv]`.
        chosen: Bool `[B, H, QB, KB]` with `QB = ceil(T / 128)` and `KB = ceil(N / 128)`: whether a
            block of queries reads a block of keys. Keys after a query are never read.
        scale: Factor of the logits.
        return_lse: Also return the log-sum-exp of the logits.

    Returns:
        Output `[B, H, T, Dv]` in the queries' dtype; with `return_lse` also the log-sum-exp,
        float32 `[B, H, T]`. If no key is chosen for a query, its output is 0 and its log-sum-exp
        `-inf`.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A shape, dtype or device does not fit, or `N - T` is not a multiple of 128.
    """
    first = check_chosen(queries, keys, values, chosen)
    T = queries.shape[2]
    outputs, sums = [], []
    for start in range(0, T, BLOCK):
        some = queries[:, :, start : start + BLOCK]
        end = first + start + some.shape[2]  # the keys of later tokens are never read
        positions = torch.arange(end - some.shape[2], end, device=queries.device)
        rows = torch.arange(end, device=queries.device)
        read = chosen[:, :, start // BLOCK].repeat_interleave(BLOCK, -1)[:, :, None, :end]
        read = read & (rows <= positions[:, None])  # [B, H, at most 128, end]
        bias = torch.zeros(read.shape, device=queries.device).masked_fill(~read, NEVER)
        block: Block = (keys[:, :, :end], values[:, :, :end], bias)
        output, lse = attend_blocks(some, [block], scale=scale, return_lse=True)
        outputs.append(output)
        sums.append(lse)
    output = torch.cat(outputs, 2)
    return (output, torch.cat(sums, 2)) if return_lse else output


def check_chosen(queries: Tensor, keys: Tensor, values: Tensor, chosen: Tensor) -> int:
    """Check the arguments of `attend_chosen`, and return the position of the first query.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A shape, dtype or device does not fit, or `N - T` is not a multiple of 128.
    """
    check.tensor("queries", queries, {"B": None, "H": None, "T": None, "D": None})
    B, H, T, D = queries.shape
    device = queries.device
    check.tensor("keys", keys, {"B": B, "G": None, "N": None, "D": D}, device=device)
    G, N = keys.shape[1:3]
    check.tensor("values", values, {"B": B, "G": G, "N": N, "Dv": None}, device=device)
    if G == 0 or H % G:
        raise ValueError(f"keys: got {G} KV heads, allowed is a divisor of {H} query heads")
    if not 0 < T <= N or (N - T) % BLOCK:
        raise ValueError(
            f"queries: got {T} tokens for {N} keys, allowed is 1 to {N} tokens such that the "
            f"number of earlier keys is a multiple of {BLOCK}"
        )
    shape: dict[str, int | None] = {"B": B, "H": H, "QB": -(-T // BLOCK), "KB": -(-N // BLOCK)}
    check.tensor("chosen", chosen, shape, torch.bool, device)
    return N - T


def attend_chosen_fast(
    queries: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, *, scale: float
) -> Tensor:
    """Compute what `attend_chosen` computes, without the logits of blocks that are not chosen.

    For each query head and block of queries, the chosen blocks before the own block are gathered,
    and torch's fused attention for CPUs reads them without a mask. The own blocks of all queries
    are computed together, with a causal mask. The two results are merged. Gathering for each query
    head is faster than gathering for each KV head, because the blocks that only another query head
    of the KV head has chosen would need a mask.

    On other devices, and for tensors that the fused attention does not support, this calls
    `attend_chosen`.

    Args:
        queries: As in `attend_chosen`.
        keys: As in `attend_chosen`.
        values: As in `attend_chosen`.
        chosen: As in `attend_chosen`.
        scale: Factor of the logits.

    Returns:
        Output `[B, H, T, Dv]` in the queries' dtype. If no key is chosen for a query, its output
        is 0.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A shape, dtype or device does not fit, or `N - T` is not a multiple of 128.
    """
    first = check_chosen(queries, keys, values, chosen)
    if not _fused_serves(queries, keys, values):
        return attend_chosen(queries, keys, values, chosen, scale=scale)
    (B, H, T, D), G = queries.shape, keys.shape[1]
    own, own_lse = _own_blocks(queries, keys[:, :, first:], values[:, :, first:], scale)
    first_block, QB = first // BLOCK, chosen.shape[2]
    reads_own = chosen[:, :, :, first_block:].diagonal(dim1=2, dim2=3)  # [B, H, QB]
    reads_own = reads_own.repeat_interleave(BLOCK, 2)[:, :, :T]
    own_lse = own_lse.masked_fill(~reads_own, NEVER)
    past, past_lse = torch.zeros_like(own), torch.full_like(own_lse, NEVER)
    # whole blocks, as many as are before the last query's own block
    whole = (first_block + QB - 1) * BLOCK
    blocks = [part[:, :, :whole].reshape(B, G, -1, BLOCK, D) for part in (keys, values)]
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(QB):
                ids = chosen[b, h, i, : first_block + i].nonzero()[:, 0]
                if len(ids) == 0:
                    continue
                key, value = (part[b, g].index_select(0, ids).view(1, 1, -1, D) for part in blocks)
                here = b, h, slice(i * BLOCK, (i + 1) * BLOCK)
                output, lse = _fused(queries[here][None, None], key, value, scale, causal=False)
                past[here], past_lse[here] = output[0, 0], lse[0, 0]
    lse = torch.logaddexp(own_lse, past_lse)
    base = lse.masked_fill(lse == NEVER, 0.0)  # -inf - -inf would be NaN
    output = own.float() * torch.exp(own_lse - base)[..., None]
    output += past.float() * torch.exp(past_lse - base)[..., None]
    return output.to(queries.dtype)


def _own_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each block of 128 tokens.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, G, T, D]`, for the same tokens.
        values: `[B, G, T, D]`.
        scale: Factor of the logits.

    Returns:
        Output `[B, H, T, D]` in the queries' dtype, and log-sum-exp `[B, H, T]`.
    """
    (B, H, T, D), G = queries.shape, keys.shape[1]
    output, lse = torch.empty_like(queries), queries.new_empty(B, H, T, dtype=torch.float32)
    for start, end in (0, T - T % BLOCK), (T - T % BLOCK, T):  # whole blocks, and the rest
        n = -(-(end - start) // BLOCK)  # each block becomes a sequence of its own
        if n == 0:
            continue
        query, key, value = (
            part[:, :, start:end].reshape(B, -1, n, (end - start) // n, D).transpose(1, 2)
            for part in (queries, keys, values)
        )
        key, value = (part.repeat_interleave(H // G, 2).flatten(0, 1) for part in (key, value))
        found, sums = _fused(query.flatten(0, 1), key, value, scale, causal=True)
        output[:, :, start:end] = found.view(B, n, H, -1, D).transpose(1, 2).flatten(2, 3)
        lse[:, :, start:end] = sums.view(B, n, H, -1).transpose(1, 2).flatten(2, 3)
    return output, lse


def _fused_serves(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if torch's fused attention for CPUs supports these tensors."""
    parts = queries, keys, values
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return queries.device.type == "cpu" and keys.shape[3] == values.shape[3] and not learns


def _fused(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention outputs `[X, H, T, D]` and log-sum-exps `[X, H, T]`, on a CPU.

    All arguments have the same number of heads.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = (part if part.stride(3) == 1 else part.contiguous() for part in (queries, keys, values))
    output, lse = fused(*parts, is_causal=causal, scale=scale)
    return output, lse
