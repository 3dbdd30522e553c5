"""Coverage: estimate the fraction of attention weight that ranked rows hold, and cut at a target.

The fraction refers to attention over the index's rows alone, although a layer also attends to its
sink and window. With true logits the result is exact. With estimated logits, an error of standard
deviation `σ` makes the mean of `exp` larger by the factor `exp(σ²/2)`, for which the functions
correct (docs/pipeline/rerank.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops.attention import cap

SAMPLE = 512
"""Number of rows that represent all non-candidates (`test_coverage.py` measures the error)."""


def log_weights(
    estimates: Tensor, errors: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Return the logarithm of each row's term in the softmax sum, corrected for estimation errors.

    Args:
        estimates: Estimates of `q·k`, float32, `-inf` where there is no row.
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
        slope = scale * (1 - (logits / softcap).square().clamp_max(1))  # derivative of the cap
    return logits - (slope * errors).square() / 2


def sample(flags: Tensor, count: int) -> Tensor:
    """Flag at most `count` of the True entries, evenly spread.

    Args:
        flags: Bool `[..., N]`.
        count: Number of entries.

    Returns:
        Bool `[..., N]`.
    """
    rank = flags.cumsum(-1)
    total = rank[..., -1:]
    steps = rank * count // total.clamp_min(1)
    before = (rank - 1) * count // total.clamp_min(1)
    return flags & ((steps != before) | (total <= count))


def log_total(known: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Return the logarithm of the softmax sum over all rows.

    Args:
        known: `log_weights` of the candidates, `[B, G, g, C]`; `-inf` where unused.
        rest: `log_weights` of a sample of all other rows, `[B, G, g, S]`; `-inf` where unused.
        left_out: Number of all other rows, int64 `[B, G]`.

    Returns:
        Float32 `[B, G, g]`.
    """
    used = (rest > float("-inf")).sum(-1)
    times = (left_out[..., None] / used.clamp_min(1)).log()
    return torch.logaddexp(known.logsumexp(-1), rest.logsumexp(-1) + times)


def enough(weights: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Find the shortest list of best rows that reaches a coverage for every head of a group.

    Args:
        weights: Attention weights of ranked rows, float32 `[B, G, g, K]`, 0 where unused.
        coverage: Fraction to reach. If all rows together do not reach it, all are needed.

    Returns:
        Flags of the rows that are needed, bool `[B, G, K]`, and their coverage, float32 `[B, G,
        g]`.
    """
    covered = weights.cumsum(-1)
    uncovered = (covered < coverage).any(2)  # [B, G, K]: some head needs more rows after this one
    needed = torch.cat([torch.ones_like(uncovered[..., :1]), uncovered[..., :-1]], dim=-1)
    return needed, (weights * needed[:, :, None]).sum(-1)


def within(hits: Hits, slots: Tensor, known: Tensor, total: Tensor, coverage: float) -> Hits:
    """Drop the hits that are not needed to reach a coverage, and add each head's coverage.

    Args:
        hits: Result of a search.
        slots: Positions of the hits in `known`, int64 `[B, G, K]`, -1 where unused.
        known: Result of `log_weights` for the candidates, `[B, G, g, C]`.
        total: Result of `log_total`, `[B, G, g]`.
        coverage: Fraction to reach.
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
    """Correct a coverage for a learned sink, which takes a part of the attention.

    Args:
        covered: Coverage of the index's rows alone, float32 `[B, H]`.
        lse: Log-sum-exp of the rows that were found, float32 `[B, H]`.
        sink_logits: Logits of the sinks, `[B, H]`.

    Returns:
        Float32 `[B, H]`.
    """
    whole = lse - covered.clamp_min(torch.finfo(covered.dtype).tiny).log()
    sinks = sink_logits.float()
    return (torch.logaddexp(lse, sinks) - torch.logaddexp(whole, sinks)).exp().clamp_max(1)


def check_policy(policy: str) -> None:
    """Check that a group policy has scores for each query head, which coverage needs.

    Raises:
        ValueError: The policy is "mean_query".
    """
    if policy == "mean_query":
        raise ValueError(
            "coverage: got one with group='mean_query', allowed are policies that search for every "
            "query head: the coverage of an averaged query says nothing about theirs"
        )
