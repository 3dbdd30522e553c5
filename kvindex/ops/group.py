"""Group policy: how the query heads that share a KV head agree on one list of rows.

Raw scores of different heads are never compared, because each head has its own scale of logits.

- `mean_share`, `max_share`: mean or maximum over the heads of softmax(scale · estimate). Scores are
  logarithms, so that small weights keep their order.
- `union`: the heads' ranked lists are interleaved.
- `mean_query`: the raw queries are averaged and searched once, as in ParisKV's published code.

For a group of one head every policy ranks by the estimates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.ops.attention import cap

POLICIES = ("mean_share", "max_share", "union", "mean_query")


def fold(queries: Tensor, kv_heads: int, policy: str) -> Tensor:
    """Group the queries by KV head.

    Args:
        queries: `[B, H, D]`.
        kv_heads: Number of KV heads `G`.
        policy: Group policy.

    Returns:
        Float32 `[B, G, g, D]`, where `g` is 1 for "mean_query" and `H / G` for other policies.
    """
    folded = queries.float().reshape(len(queries), kv_heads, -1, queries.shape[-1])
    return folded.mean(2, keepdim=True) if policy == "mean_query" else folded


def agree(
    estimates: Tensor,
    policy: str,
    *,
    scale: float,
    softcap: float | None,
    sizes: Tensor | None = None,
) -> Tensor:
    """Compute one score of each row for the whole group.

    Args:
        estimates: Estimates of `q·k` for each head, float32 `[B, G, g, C]`; `-inf` for all heads
            where there is no candidate.
        policy: Group policy.
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.
        sizes: Number of rows that each candidate represents, integers `[B, G, C]`, or None if each
            represents one row. With sizes, the result is the score of one of a candidate's rows.

    Returns:
        Float32 `[B, G, C]`, `-inf` where there is no candidate.
    """
    heads = estimates.shape[2]
    if heads == 1:
        return estimates[:, :, 0]
    none = estimates[:, :, 0] == float("-inf")
    if policy == "union":
        order = estimates.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        position = rank * heads + torch.arange(heads, device=order.device)[:, None]
        score = -position.amin(2).float()  # position in the interleaved list, exact up to 2^24
    else:
        logits = cap(estimates, scale, softcap)
        logits = logits.masked_fill(none[:, :, None], float("-inf"))  # a softcap makes -inf finite
        if sizes is None:
            weights = torch.log_softmax(logits, dim=-1)
        else:
            total = (logits + sizes[:, :, None].log()).logsumexp(-1, keepdim=True)
            weights = logits - total.masked_fill(total == float("-inf"), 0)
        score = combine(weights, policy)
    return score.masked_fill(none, float("-inf"))


def combine(log_weights: Tensor, policy: str) -> Tensor:
    """Combine the log attention weights of a group's heads by "mean_share" or "max_share".

    Args:
        log_weights: Logarithms of each head's softmax, `[B, G, g, C]`.
        policy: "mean_share" or "max_share".

    Returns:
        Scores `[B, G, C]`.
    """
    if policy == "max_share":
        return log_weights.amax(2)
    return log_weights.logsumexp(2) - math.log(log_weights.shape[2])
