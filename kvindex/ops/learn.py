"""What an index learns of tokens as they come, once for each row of the batch.

Both functions take what is learned already and give it back where a row has it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.ops.transform import LONGEST

LEAN = 16
"""Tokens that the segment before counts for in the center of one that has only begun
(docs/decisions/0012-a-center-for-every-segment.md)."""

HEADROOM = 5
"""Powers of 2 from the largest norm (rounded down) to the reference: room for norms that drift
(docs/drift.md)."""

SEEN = 4096
"""Tokens that a weight_scale is of, from the first one with a norm on
(docs/decisions/0021-a-weight_scale-of-the-first-tokens.md)."""


def centers(
    keys: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor], *, start: int, every: int
) -> dict[str, Tensor]:
    """Centers of segments of `every` tokens, bfloat16 `[B, G, S, D]`, once `keys` are appended.

    A segment's center is the mean of its valid keys in the first append that holds one; where that
    append ends inside the segment, the center of the one before counts as `LEAN` keys more.
    `known`: bool `[B, S]`, which segments of a row have one; the others hold zeros, or, where they
    are begun, the one before.

    keys: `[B, G, N, D]`, whose first has the id `start`; valid: bool `[B, N]`, or None for all.
    """
    B, G, N, D = keys.shape
    first, stop = start // every, -(-(start + N) // every)  # segments that the keys are in
    before, after = start - first * every, stop * every - start - N
    pad = torch.nn.functional.pad
    real = pad(_real(keys[:, 0, :, 0], valid), (before, after)).view(B, 1, stop - first, every, 1)
    split = pad(keys.double(), (0, 0, before, after)).view(B, G, stop - first, every, D)
    total, counts = (split * real).sum(3), real.sum(3)  # [B, G, S', D], [B, 1, S', 1]

    found = learned.get("centers", keys.new_zeros((B, G, 0, D), dtype=torch.bfloat16))
    known = learned.get("known", keys.new_zeros((B, 0), dtype=torch.bool))
    missing, here = max(stop - found.shape[2], 0), slice(first, stop)
    found, known = pad(found, (0, 0, 0, missing)), pad(known, (0, missing))
    old, held = found[:, :, here], known[:, None, here, None]
    new = _rounded(total / counts.clamp_min(1))
    found, known = found.clone(), known.clone()
    found[:, :, here] = torch.where(held, old, new)
    known[:, here] |= counts[:, 0, :, 0] > 0
    if after and stop > 1:
        lean = LEAN * known[:, None, stop - 2, None]
        total = total[:, :, -1] + lean * found[:, :, stop - 2]
        new = _rounded(total / (counts[:, :, -1] + lean).clamp_min(1))
        found[:, :, stop - 1] = torch.where(held[:, :, -1], old[:, :, -1], new)
    return {"centers": found, "known": known}


def _rounded(centers: Tensor) -> Tensor:
    return centers.clamp(-LONGEST, LONGEST).bfloat16()


def weight_scale(
    norms: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`weight_scale`: 16 to 32 times the largest first norm `[B, G, N]`, a power of 2, float32
    `[B, G]`; 0 where no valid key has a norm yet.

    The first are those of `SEEN` ids, from that of the first valid key with a norm on, as far as
    they come at once; of keys as they come: what a center leaves of a few alike keys says nothing
    of those to come.
    """
    largest = norms.new_zeros(norms.shape[:2])
    if norms.numel():
        real = _real(norms[:, 0], valid)[:, None] & (norms > 0)
        ids = torch.arange(norms.shape[2], device=norms.device)
        seen = real & (ids < real.int().argmax(-1, keepdim=True) + SEEN)
        largest = torch.where(seen, norms, 0.0).amax(-1)
    found = torch.where(largest > 0, torch.exp2(torch.log2(largest).floor() + HEADROOM), 0.0)
    old = learned.get("weight_scale", torch.zeros_like(found))
    return {"weight_scale": torch.where(old > 0, old, found)}


def _real(like: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if valid is None else valid
