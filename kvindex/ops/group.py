"""Group policies: combine the scores of the query heads that share a KV head.

A search returns one list of rows for each KV head, which all query heads of the KV head use. The
logits of different query heads are not compared directly, because each head has its own scale of
logits. The policies are:

- `mean_share`, `max_share`: rank rows by the mean or the maximum of the heads' attention weights,
  `softmax(scale * estimate)`. Scores are logarithms, so that small weights keep their order.
- `union`: rank the rows for each head, and interleave the heads' lists.
- `mean_query`: average the queries of the heads and search once, as in ParisKV's published code.

With one query head per KV head, every policy ranks rows by the estimates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvindex.ops.attention import cap

POLICIES = ("mean_share", "max_share", "union", "mean_query")


def fold(queries: Tensor, kv_heads: int, policy: str) -> Tensor:
    """Group the queries by KV head, and average them if the policy is "mean_query".

    Args:
        queries: `[B, H, D]`.
        kv_heads: Number of KV heads `G`.
        policy: Group policy.

    Returns:
        Queries, float32 `[B, G, g, D]`: `g` is 1 for "mean_query" and `H / G` for other policies.
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
    """Combine the scores of a KV head's query heads into one score per candidate.

    Args:
        estimates: Estimates of `q·k` for each query head, float32 `[B, G, g, C]`, `-inf` in slots
            without a candidate.
        policy: Group policy.
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.
        sizes: Number of rows that each candidate represents, integers `[B, G, C]`, or None if every
            candidate is one row. If a candidate represents several rows, such as a cluster, its
            score is the score of one of its rows, not the sum over its rows.

    Returns:
        Scores, float32 `[B, G, C]`, `-inf` in slots without a candidate.
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
        # mask unused slots again, because softcap makes -inf finite
        logits = logits.masked_fill(none[:, :, None], float("-inf"))
        if sizes is None:
            weights = torch.log_softmax(logits, dim=-1)
        else:
            total = (logits + sizes[:, :, None].log()).logsumexp(-1, keepdim=True)
            weights = logits - total.masked_fill(total == float("-inf"), 0)
        score = combine(weights, policy)
    return score.masked_fill(none, float("-inf"))


def combine(log_weights: Tensor, policy: str) -> Tensor:
    """Return the logarithm of the mean or the maximum of attention weights over the query heads.

    Args:
        log_weights: Logarithms of the attention weights of each query head, `[B, G, g, C]`.
        policy: "mean_share" for the mean, "max_share" for the maximum.

    Returns:
        Scores `[B, G, C]`.
    """
    if policy == "max_share":
        return log_weights.amax(2)
    return log_weights.logsumexp(2) - math.log(log_weights.shape[2])
