"""Coverage: an estimate of the attention that a ranked list of rows holds, and of how many reach
a target. Of true logits it is exact.

Shares are over the rows of the index; a layer attends to its sink and window besides. They come
from estimated logits: noise of standard deviation `σ` makes the mean of `exp` larger by
`exp(σ²/2)`, which is subtracted (docs/pipeline/rerank.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops.attention import cap

SAMPLE = 512
"""Rows that represent all rows beside the candidates (`test_coverage.py` measures the error)."""


def log_weights(
    estimates: Tensor, errors: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Logarithms of the rows' terms in the softmax's sum, float32 as `estimates`.

    estimates: of `q·k`, `-inf` for no row; errors: their standard deviations, None where exact.
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
    """Flag at most `count` of the True entries, evenly spread: bool as `flags` `[..., N]`."""
    rank = flags.cumsum(-1)
    total = rank[..., -1:]
    steps = rank * count // total.clamp_min(1)
    before = (rank - 1) * count // total.clamp_min(1)
    return flags & ((steps != before) | (total <= count))


def log_total(known: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Logarithm of the softmax's sum, float32 `[B, G, g]`.

    known: `log_weights` of the candidates `[B, G, g, C]`; rest: of a sample of all others
    `[B, G, g, S]`; both `-inf` where a slot is unused; left_out: int64 `[B, G]`, the number of
    all others.
    """
    used = (rest > float("-inf")).sum(-1)
    times = (left_out[..., None] / used.clamp_min(1)).log()
    return torch.logaddexp(known.logsumexp(-1), rest.logsumexp(-1) + times)


def enough(weights: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Slots that are needed, bool `[B, G, K]`, and their coverage, float32 `[B, G, g]`.

    weights: of ranked rows, float32 `[B, G, g, K]`, 0 where a slot is unused. The shortest prefix
    that reaches `coverage` for every head of the group, or all rows.
    """
    covered = weights.cumsum(-1)
    uncovered = (covered < coverage).any(2)  # [B, G, K]: some head wants more after this slot
    needed = torch.cat([torch.ones_like(uncovered[..., :1]), uncovered[..., :-1]], dim=-1)
    return needed, (weights * needed[:, :, None]).sum(-1)


def within(hits: Hits, slots: Tensor, known: Tensor, total: Tensor, coverage: float) -> Hits:
    """Cut `hits` after the rows that reach `coverage`, and add the coverage of each head.

    slots: positions of the hits in `known`, int64 `[B, G, K]`, -1 where unused; known, total: as
    `log_weights` and `log_total` give them.
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
    """Coverage that counts what a learned sink takes of the attention, float32 `[B, H]`.

    covered: of the index's attention alone; lse: of the rows that hold it; sink_logits: logits of
    the sinks; all `[B, H]`.
    """
    whole = lse - covered.clamp_min(torch.finfo(covered.dtype).tiny).log()
    sinks = sink_logits.float()
    return (torch.logaddexp(lse, sinks) - torch.logaddexp(whole, sinks)).exp().clamp_max(1)


def check_policy(policy: str) -> None:
    """Raises ValueError for a policy without scores per query head."""
    if policy == "mean_query":
        raise ValueError(
            "coverage: got one with group='mean_query', allowed are policies that search for every "
            "query head: the share of an averaged query says nothing of theirs"
        )
