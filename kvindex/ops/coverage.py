"""Coverage: estimate what fraction of the attention weight the best rows have together.

If the caller of a search gives a target for this fraction, the search returns only as many rows as
are needed to reach it. The fraction refers to the tokens in the index, without the sink and the
window of the layer.

With exact logits the coverage is exact. With estimated logits whose errors have the standard
deviation `σ`, the mean of `exp(logit)` is too large by the factor `exp(σ²/2)`. These functions
correct for that factor (docs/pipeline/rerank.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops.attention import cap

SAMPLE = 512
"""Number of rows whose logits are estimated to represent all rows that are not candidates.

`test_coverage.py` measures the error that this causes."""


def log_weights(
    estimates: Tensor, errors: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Return the logarithm of each row's term `exp(logit)` in the denominator of the softmax.

    The result is corrected for the errors of estimated logits.

    Args:
        estimates: Estimates of `q·k`, float32 of any shape, `-inf` where there is no row.
        errors: Standard deviations of the estimates, of the same shape, or None if the estimates
            are exact.
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.

    Returns:
        Float32, of the same shape.
    """
    logits = cap(estimates, scale, softcap)
    logits = logits.masked_fill(estimates == float("-inf"), float("-inf"))
    if errors is None:
        return logits
    slope = torch.full_like(logits, scale)
    if softcap is not None:
        slope = scale * (1 - (logits / softcap).square().clamp_max(1))  # derivative of the softcap
    return logits - (slope * errors).square() / 2


def sample(flags: Tensor, count: int) -> Tensor:
    """Keep at most `count` of the True entries of a mask, evenly spaced.

    Args:
        flags: Mask, bool `[..., N]`.
        count: Number of entries to keep.

    Returns:
        Mask of the entries that were kept, bool `[..., N]`.
    """
    rank = flags.cumsum(-1)
    total = rank[..., -1:]
    steps = rank * count // total.clamp_min(1)
    before = (rank - 1) * count // total.clamp_min(1)
    return flags & ((steps != before) | (total <= count))


def log_total(known: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Estimate the logarithm of the softmax's denominator over all rows of the index.

    Args:
        known: Result of `log_weights` for the candidates, `[B, G, g, C]`; `-inf` in unused slots.
        rest: Result of `log_weights` for a sample of the rows that are not candidates, `[B, G, g,
            S]`; `-inf` in unused slots.
        left_out: Number of rows that are not candidates, int64 `[B, G]`.

    Returns:
        Float32 `[B, G, g]`.
    """
    used = (rest > float("-inf")).sum(-1)
    times = (left_out[..., None] / used.clamp_min(1)).log()
    return torch.logaddexp(known.logsumexp(-1), rest.logsumexp(-1) + times)


def enough(weights: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Find how many of the best rows are needed so that every query head reaches a coverage.

    Args:
        weights: Attention weights of `K` rows, best first, float32 `[B, G, g, K]`, 0 in unused
            slots.
        coverage: Sum of attention weights to reach. If all rows together do not reach it, all rows
            are needed.

    Returns:
        Mask of the needed rows, bool `[B, G, K]`, and the sum of their attention weights for each
        query head, float32 `[B, G, g]`.
    """
    covered = weights.cumsum(-1)
    uncovered = (covered < coverage).any(2)  # [B, G, K]: some head needs more rows after this one
    needed = torch.cat([torch.ones_like(uncovered[..., :1]), uncovered[..., :-1]], dim=-1)
    return needed, (weights * needed[:, :, None]).sum(-1)


def within(hits: Hits, slots: Tensor, known: Tensor, total: Tensor, coverage: float) -> Hits:
    """Remove the hits of a search that are not needed to reach a coverage.

    Args:
        hits: Result of the search, best rows first.
        slots: Position of each hit among the candidates, int64 `[B, G, K]`, -1 in unused slots.
        known: Result of `log_weights` for the candidates, `[B, G, g, C]`.
        total: Result of `log_total`, `[B, G, g]`.
        coverage: Fraction of the attention weight that the remaining hits must have.

    Returns:
        The remaining hits. Their `coverage` is the estimated coverage for each query head.
    """
    at = slots.clamp_min(0)[:, :, None].expand(-1, -1, known.shape[2], -1)
    weights = (known.gather(-1, at) - total[..., None]).exp().clamp_max(1)
    needed, covered = enough(weights.masked_fill((slots < 0)[:, :, None], 0), coverage)
    return Hits(
        hits.ids.masked_fill(~needed, UNUSED),
        hits.scores.masked_fill(~needed, float("-inf")),
        coverage=covered.clamp_max(1).flatten(1),
    )


def with_sink_logits(covered: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Correct a coverage for a learned sink: a logit in the softmax that belongs to no token.

    Args:
        covered: Coverage without the sink, float32 `[B, H]`.
        lse: Log-sum-exp of the logits of the selected rows, float32 `[B, H]`.
        sink_logits: Logits of the sinks, `[B, H]`.

    Returns:
        Coverage with the sink, float32 `[B, H]`.
    """
    whole = lse - covered.clamp_min(torch.finfo(covered.dtype).tiny).log()
    sinks = sink_logits.float()
    return (torch.logaddexp(lse, sinks) - torch.logaddexp(whole, sinks)).exp().clamp_max(1)


def check_policy(policy: str) -> None:
    """Check that a group policy allows an estimate of coverage.

    A group policy is the rule that combines the query heads that share a KV head. To estimate
    coverage, the policy must compute scores for each query head.

    Raises:
        ValueError: The policy is "mean_query", which averages the queries of a group.
    """
    if policy == "mean_query":
        raise ValueError(
            "coverage: got a number although group='mean_query' averages the queries of several "
            "heads; pass coverage=None or another group policy"
        )
