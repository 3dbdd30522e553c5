"""What an index learns of its first tokens, once for each row of the batch.

Both functions take what is learnt already and give it back where a row has it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HEADROOM = 5
"""Powers of 2 from the largest norm (rounded down) to the reference: room for norms that drift
(docs/drift.md)."""


def centre(keys: Tensor, valid: Tensor | None, learnt: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`centre`: mean of the valid keys `[B, G, N, D]`, float32 `[B, G, D]`, zeros where there is
    none yet; `seen`: which rows of the batch have one, bool `[B]`.

    valid: bool `[B, N]`, or None for all.
    """
    real = _real(keys[:, 0, :, 0], valid)
    total = (keys.double() * real[:, None, :, None]).sum(2)
    mean = (total / real.sum(1).clamp_min(1)[:, None, None]).float()
    seen = real.any(1)
    if "seen" in learnt:
        before = learnt["seen"]
        mean = torch.where(before[:, None, None], learnt["centre"], mean)
        seen = seen | before
    return {"centre": mean * seen[:, None, None], "seen": seen}


def reference(
    norms: Tensor, valid: Tensor | None, learnt: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`reference`: 16 to 32 times the largest of the norms `[B, G, N]`, a power of 2, float32
    `[B, G]`; 0 where no valid key has a norm yet.

    Of keys as they come: what a centre leaves of a few alike keys says nothing of those to come.
    """
    norms = norms * _real(norms[:, 0], valid)[:, None]
    largest = norms.amax(-1) if norms.numel() else norms.new_zeros(norms.shape[:2])
    found = torch.where(largest > 0, torch.exp2(torch.log2(largest).floor() + HEADROOM), 0.0)
    old = learnt.get("reference", torch.zeros_like(found))
    return {"reference": torch.where(old > 0, old, found)}


def _real(like: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if valid is None else valid
