"""Causal attention of a prompt's queries to chosen blocks of keys."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

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

    For each query head and block of queries, the chosen blocks are gathered, and torch's fused
    attention reads them. This is meant for CPUs: on a GPU, the many small calls are slow. Gathering
    for each query head is faster than gathering for each KV head, because blocks that only another
    query head of the KV head has chosen would be computed in vain.

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
    (B, H, T, _), (G, N) = queries.shape, keys.shape[1:3]
    blocks = [torch.split(part, BLOCK, 2) for part in (keys, values)]
    # mask for a block of queries: 0 for `before` earlier keys, and causal for the own block
    before = -(-N // BLOCK) * BLOCK - BLOCK
    own = torch.full((BLOCK, BLOCK), NEVER, dtype=queries.dtype, device=queries.device).triu(1)
    mask = pad(own, (before, 0))
    output = queries.new_zeros(B, H, T, values.shape[3])
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(chosen.shape[2]):
                last = first // BLOCK + i
                ids = chosen[b, h, i, : last + 1].nonzero()[:, 0].tolist()
                if not ids:
                    continue
                query = queries[b, h, i * BLOCK : (i + 1) * BLOCK]
                key, value = (torch.cat([part[j][b, g] for j in ids]) for part in blocks)
                seen = None
                if ids[-1] == last:  # the own block has as many keys as queries
                    t, R = len(query), len(key)
                    skipped = before - (R - t)
                    seen = mask[:t, skipped : skipped + R]
                read = query[None, None], key[None, None], value[None, None]
                found = scaled_dot_product_attention(*read, attn_mask=seen, scale=scale)
                output[b, h, i * BLOCK : (i + 1) * BLOCK] = found[0, 0]
    return output
