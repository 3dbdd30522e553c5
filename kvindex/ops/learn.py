"""Centers of keys and the scale of weights, learned once from the first tokens of each row.

Both functions take what is learned so far and return it where a row has it already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.ops.transform import LONGEST

LEAN = 16
"""Tokens that the preceding segment counts for in the center of one that has only begun
(docs/decisions/0012-a-center-for-every-segment.md)."""

HEADROOM = 5
"""Powers of 2 from the largest norm (rounded down) to the weight scale: room for norms that drift
(docs/drift.md)."""

SEEN = 4096
"""Tokens that set the weight scale, from the first one with a norm on
(docs/decisions/0021)."""


def centers(
    keys: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor], *, start: int, every: int
) -> dict[str, Tensor]:
    """Centers of segments of `every` tokens, bfloat16 `[B, G, S, D]`, once `keys` are appended.

    A segment's center is the mean of its valid keys in the first append that contains one; where
    that append ends inside the segment, the preceding center counts as `LEAN` keys more. `known`:
    bool `[B, S]`, which segments of a row have a center; the others are zero or, where they are
    begun, the preceding one.

    keys: `[B, G, N, D]`, whose first has the id `start`; valid: bool `[B, N]`, or None for all.
    """
    B, G, N, D = keys.shape
    first, stop = start // every, -(-(start + N) // every)  # segments that the keys are in
    before, after = start - first * every, stop * every - start - N
    pad = torch.nn.functional.pad
    real = pad(_real(keys[:, 0, :, 0], valid), (before, after)).view(B, 1, stop - first, every, 1)
    split = pad(keys.double(), (0, 0, before, after)).view(B, G, stop - first, every, D)
    total, counts = (split * real).sum(3), real.sum(3)  # [B, G, S', D], [B, 1, S', 1]

    means = learned.get("centers", keys.new_zeros((B, G, 0, D), dtype=torch.bfloat16))
    known = learned.get("known", keys.new_zeros((B, 0), dtype=torch.bool))
    missing, segments = max(stop - means.shape[2], 0), slice(first, stop)
    means, known = pad(means, (0, 0, 0, missing)), pad(known, (0, missing))
    old, fixed = means[:, :, segments], known[:, None, segments, None]
    new = _rounded(total / counts.clamp_min(1))
    means, known = means.clone(), known.clone()
    means[:, :, segments] = torch.where(fixed, old, new)
    known[:, segments] |= counts[:, 0, :, 0] > 0
    if after and stop > 1:
        weight = LEAN * known[:, None, stop - 2, None]
        total = total[:, :, -1] + weight * means[:, :, stop - 2]
        new = _rounded(total / (counts[:, :, -1] + weight).clamp_min(1))
        means[:, :, stop - 1] = torch.where(fixed[:, :, -1], old[:, :, -1], new)
    return {"centers": means, "known": known}


def _rounded(centers: Tensor) -> Tensor:
    return centers.clamp(-LONGEST, LONGEST).bfloat16()


def weight_scale(
    norms: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`weight_scale`: 16 to 32 times the largest first norm `[B, G, N]`, a power of 2, float32
    `[B, G]`; 0 where no valid key has a norm yet.

    The first norms are those of `SEEN` ids from the first valid key with a norm on, within one
    append. They are of keys before a center is subtracted: what it leaves of a few alike keys does
    not predict the norms of later ones.
    """
    largest = norms.new_zeros(norms.shape[:2])
    if norms.numel():
        real = _real(norms[:, 0], valid)[:, None] & (norms > 0)
        ids = torch.arange(norms.shape[2], device=norms.device)
        first = real & (ids < real.int().argmax(-1, keepdim=True) + SEEN)
        largest = torch.where(first, norms, 0.0).amax(-1)
    scale = torch.where(largest > 0, torch.exp2(torch.log2(largest).floor() + HEADROOM), 0.0)
    learned_scale = learned.get("weight_scale", torch.zeros_like(scale))
    return {"weight_scale": torch.where(learned_scale > 0, learned_scale, scale)}


def _real(like: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if valid is None else valid
