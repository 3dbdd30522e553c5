"""How many rows are enough: the share of attention that a ranked list of rows holds.

Shares are over the rows of the index; a layer attends to its sink and window besides. They rest
on estimated logits: noise of standard deviation `σ` makes the mean of `exp` larger by
`exp(σ²/2)`, which is taken off (docs/pipeline/rerank.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex.ops.attention import cap

SAMPLE = 512
"""Rows of the rest that stand for all of it (`test_coverage.py` measures what that costs)."""


def log_weights(
    estimates: Tensor, errors: Tensor | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Logarithms of what the rows add to the softmax's sum, float32 as `estimates`.

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
    """At most `count` of the True entries, evenly spread over them: bool as `flags` `[..., N]`."""
    rank = flags.cumsum(-1)
    total = rank[..., -1:]
    steps = rank * count // total.clamp_min(1)
    before = (rank - 1) * count // total.clamp_min(1)
    return flags & ((steps != before) | (total <= count))


def log_total(known: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Logarithm of the softmax's sum, float32 `[B, G, g]`.

    known: `log_weights` of the candidates `[B, G, g, C]`; rest: of a sample of all others
    `[B, G, g, S]`; both `-inf` where a slot is unused; left_out: int64 `[B, G]`, how many the
    others are.
    """
    used = (rest > float("-inf")).sum(-1)
    times = (left_out[..., None] / used.clamp_min(1)).log()
    return torch.logaddexp(known.logsumexp(-1), rest.logsumexp(-1) + times)


def enough(shares: Tensor, coverage: float) -> tuple[Tensor, Tensor]:
    """Slots that are needed, bool `[B, G, K]`, and the share they hold, float32 `[B, G, g]`.

    shares: of ranked rows, float32 `[B, G, g, K]`, 0 where a slot is unused. The shortest prefix
    that holds `coverage` for every head of the group, or all rows.
    """
    held = shares.cumsum(-1)
    short = (held < coverage).any(2)  # [B, G, K]: some head wants more after this slot
    needed = torch.cat([torch.ones_like(short[..., :1]), short[..., :-1]], dim=-1)
    return needed, (shares * needed[:, :, None]).sum(-1)


def within(hits: Hits, slots: Tensor, known: Tensor, total: Tensor, coverage: float) -> Hits:
    """`hits`, cut after the rows that are enough, with the share that each head finds in them.

    slots: where the hits are in `known`, int64 `[B, G, K]`, -1 where unused; known, total: as
    `log_weights` and `log_total` give them.
    """
    at = slots.clamp_min(0)[:, :, None].expand(-1, -1, known.shape[2], -1)
    shares = (known.gather(-1, at) - total[..., None]).exp().clamp_max(1)
    needed, held = enough(shares.masked_fill((slots < 0)[:, :, None], 0), coverage)
    return Hits(
        hits.ids.masked_fill(~needed, UNUSED),
        hits.scores.masked_fill(~needed, float("-inf")),
        coverage=held.clamp_max(1).flatten(1),
    )


def check_policy(policy: str) -> None:
    """Raises ValueError for a policy that knows no query heads."""
    if policy == "mean_query":
        raise ValueError(
            "coverage: got one with group='mean_query', allowed are policies that search for every "
            "query head: the share of an averaged query says nothing of theirs"
        )
