"""Sampling: read the best rows for sure, draw others at random (docs/decisions/0010)."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny


def draw(logits: Tensor, ids: Tensor, k: int, drawn: int) -> tuple[Tensor, Tensor]:
    """Draw rows to read, of `P` with logits float32 `[B, G, P]`, descending, `-inf` for none:
    the best `k - drawn`, and `drawn` of the others, each with a known chance `π`.

    ids: int64 `[B, G, P]`: drawing is systematic along them, so that rows are spread over the
    sequence and the same from run to run. Returns positions among the `P`, int64 `[B, G, k]`,
    ascending, -1 for none, and the rows' log weights `-log π`, float32 `[B, G, k]`, `-inf` for none
    (Horvitz and Thompson, 1952).
    """
    chances = inclusion(logits, k - drawn, drawn)
    picked = chances >= 1
    picked |= systematic(ids, chances.masked_fill(picked, 0))
    slots = picked.cumsum(-1) - 1
    slots = torch.where(picked & (slots < k), slots, k)
    positions = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    weights = -chances.clamp_min(torch.finfo(chances.dtype).tiny).log()
    return _scattered(positions, slots, k, -1), _scattered(weights, slots, k, float("-inf"))


def inclusion(logits: Tensor, sure: int, drawn: int) -> Tensor:
    """Inclusion probabilities, float32 `[B, G, P]`: 1 for the `sure` best, and `drawn` in all for
    the others in proportion to `exp(logits)`, none above 1.

    logits: descending, `-inf` for no row.
    """
    rest = logits[..., sure:].double()
    rest = (rest - rest[..., :1].clamp_min(torch.finfo(rest.dtype).min)).exp()  # no row: 0
    tail = rest.flip(-1).cumsum(-1).flip(-1)
    # chances above 1 belong to a prefix: it ends where the rest can share what is left
    left = drawn - torch.arange(rest.shape[-1], device=logits.device)
    fits = left * rest <= tail
    capped = ~fits.cummax(-1).values if rest.shape[-1] else fits
    count = capped.sum(-1, keepdim=True)
    total = rest.masked_fill(capped, 0).sum(-1, keepdim=True).clamp_min(TINY)
    chances = torch.where(capped, 1.0, rest * (drawn - count) / total).clamp(0, 1)
    top = (logits[..., :sure] > float("-inf")).double()
    others = chances.masked_fill(rest == 0, 0)
    return torch.cat([top, others], dim=-1).float()


def systematic(ids: Tensor, chances: Tensor) -> Tensor:
    """Systematic drawing, bool `[B, G, P]`: along the ids, at every unit of summed chances."""
    order = ids.argsort(dim=-1)
    summed = chances.gather(-1, order).double().cumsum(-1) + 0.5
    before = summed - chances.gather(-1, order).double()
    return torch.zeros_like(chances, dtype=torch.bool).scatter_(
        -1, order, summed.floor() != before.floor()
    )


def _scattered(values: Tensor, slots: Tensor, k: int, empty: float) -> Tensor:
    """`values` scattered to their slots, `[B, G, k]`; the slot `k` is dropped."""
    shape = (*values.shape[:-1], k + 1)
    scattered = torch.full(shape, empty, dtype=values.dtype, device=values.device)
    return scattered.scatter_(-1, slots, values)[..., :k]
