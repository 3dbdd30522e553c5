"""Sampling: choose the best rows and a random sample of the other rows (docs/decisions/0010)."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny


def sample(logits: Tensor, ids: Tensor, k: int, sampled: int) -> tuple[Tensor, Tensor]:
    """Choose rows to attend to: the best `k - sampled`, and a sample of `sampled` others.

    Each row has a known probability `π` of being chosen. The sample is systematic along the ids, so
    it is spread over the sequence and is the same from run to run.

    Args:
        logits: Logits of `P` ranked rows, float32 `[B, G, P]`, descending, `-inf` where there is
            none.
        ids: Token ids of the rows, int64 `[B, G, P]`.
        k: Total number of rows to choose.
        sampled: How many of these `k` rows are sampled.

    Returns:
        Positions among the `P` rows, int64 `[B, G, k]`, ascending, padded with -1, and log weights
        `-log π`, float32 `[B, G, k]`, padded with `-inf`.

    Source: Horvitz and Thompson, A Generalization of Sampling Without Replacement (1952).
    """
    chances = inclusion(logits, k - sampled, sampled)
    picked = chances >= 1
    picked |= systematic(ids, chances.masked_fill(picked, 0))
    slots = picked.cumsum(-1) - 1
    slots = torch.where(picked & (slots < k), slots, k)
    positions = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    weights = -chances.clamp_min(torch.finfo(chances.dtype).tiny).log()
    return _scattered(positions, slots, k, -1), _scattered(weights, slots, k, float("-inf"))


def inclusion(logits: Tensor, sure: int, sampled: int) -> Tensor:
    """Compute each row's probability of being chosen.

    It is 1 for the `sure` best rows. For the others it is proportional to `exp(logits)`, at most 1,
    and sums to `sampled`.

    Args:
        logits: Float32 `[B, G, P]`, descending, `-inf` where there is no row.
        sure: Rows that are always chosen.
        sampled: Expected number of other rows.

    Returns:
        Float32 `[B, G, P]`.
    """
    rest = logits[..., sure:].double()
    rest = (rest - rest[..., :1].clamp_min(torch.finfo(rest.dtype).min)).exp()  # 0 for no row
    tail = rest.flip(-1).cumsum(-1).flip(-1)
    # probabilities that must be cut to 1 form a prefix; it ends where the remaining rows can sum
    # to the rest of `sampled`
    left = sampled - torch.arange(rest.shape[-1], device=logits.device)
    fits = left * rest <= tail
    capped = ~fits.cummax(-1).values if rest.shape[-1] else fits
    count = capped.sum(-1, keepdim=True)
    total = rest.masked_fill(capped, 0).sum(-1, keepdim=True).clamp_min(TINY)
    chances = torch.where(capped, 1.0, rest * (sampled - count) / total).clamp(0, 1)
    top = (logits[..., :sure] > float("-inf")).double()
    others = chances.masked_fill(rest == 0, 0)
    return torch.cat([top, others], dim=-1).float()


def systematic(ids: Tensor, chances: Tensor) -> Tensor:
    """Sample systematically: choose each row at which the running sum of probabilities passes an
    integer.

    Args:
        ids: Token ids, int64 `[B, G, P]`, along which probabilities are summed.
        chances: Probabilities, float32 `[B, G, P]`.

    Returns:
        Bool `[B, G, P]`.
    """
    order = ids.argsort(dim=-1)
    summed = chances.gather(-1, order).double().cumsum(-1) + 0.5
    before = summed - chances.gather(-1, order).double()
    return torch.zeros_like(chances, dtype=torch.bool).scatter_(
        -1, order, summed.floor() != before.floor()
    )


def _scattered(values: Tensor, slots: Tensor, k: int, empty: float) -> Tensor:
    """Return `values` moved to their slots, `[B, G, k]`; values for the slot `k` are dropped."""
    shape = (*values.shape[:-1], k + 1)
    scattered = torch.full(shape, empty, dtype=values.dtype, device=values.device)
    return scattered.scatter_(-1, slots, values)[..., :k]
