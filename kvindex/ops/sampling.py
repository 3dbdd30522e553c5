"""Sampling: select the rows (keys and values) with the largest logits, and a random sample of the
other rows.

docs/decisions/0010 explains why the other rows are sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny


def sample(logits: Tensor, ids: Tensor, k: int, sampled: int) -> tuple[Tensor, Tensor]:
    """Select `k` of `P` rows: the best `k - sampled`, and a sample of `sampled` other rows.

    Each row is selected with a known probability `π`. The sampling is systematic (`systematic`) in
    the order of token ids, so the sample is spread over the sequence, and is the same in every run.

    Args:
        logits: Logits of `P` rows, best first, float32 `[B, G, P]`, `-inf` in unused slots.
        ids: Token ids of the rows, int64 `[B, G, P]`.
        k: Total number of rows to select.
        sampled: How many of the `k` rows are sampled.

    Returns:
        Positions of the selected rows among the `P` rows, int64 `[B, G, k]`, ascending, then -1;
        and their log weights `-log π`, float32 `[B, G, k]`, then `-inf`.

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
    """Compute the probability with which each row is selected.

    The probability of the `sure` best rows is 1. The probabilities of the other rows are
    proportional to `exp(logits)`, limited to 1, and add up to `sampled`.

    Args:
        logits: Logits of the rows, best first, float32 `[B, G, P]`, `-inf` in unused slots.
        sure: Number of rows that are always selected.
        sampled: Expected number of other rows that are selected.

    Returns:
        Probabilities, float32 `[B, G, P]`.
    """
    rest = logits[..., sure:].double()
    rest = (rest - rest[..., :1].clamp_min(torch.finfo(rest.dtype).min)).exp()  # 0 in unused slots
    tail = rest.flip(-1).cumsum(-1).flip(-1)
    # The probabilities of rows must be proportional to `exp(logits)`, and add up to `sampled`. A
    # row that would get a probability above 1 gets exactly 1. The probabilities of the other rows
    # are then raised, so that the sum is `sampled` again. Rows are sorted, so the rows with
    # probability 1 come first.
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
    """Sample rows systematically, according to the probability of each row.

    The probabilities are added up in the order of token ids. The sum starts at 0.5. Each time the
    sum reaches or passes an integer, the row whose probability was added last is selected.

    Args:
        ids: Token ids of the rows, int64 `[B, G, P]`.
        chances: Probabilities of the rows, float32 `[B, G, P]`.

    Returns:
        Mask of the selected rows, bool `[B, G, P]`.
    """
    order = ids.argsort(dim=-1)
    summed = chances.gather(-1, order).double().cumsum(-1) + 0.5
    before = summed - chances.gather(-1, order).double()
    return torch.zeros_like(chances, dtype=torch.bool).scatter_(
        -1, order, summed.floor() != before.floor()
    )


def _scattered(values: Tensor, slots: Tensor, k: int, empty: float) -> Tensor:
    """Write each of `values` to its position in `slots`, in a tensor `[B, G, k]` filled with
    `empty`.

    Values at position `k` are dropped.
    """
    shape = (*values.shape[:-1], k + 1)
    scattered = torch.full(shape, empty, dtype=values.dtype, device=values.device)
    return scattered.scatter_(-1, slots, values)[..., :k]
