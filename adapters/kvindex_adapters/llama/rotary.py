"""Rotary embedding: rotate pairs of coordinates by an angle that grows with the position.

Coordinates `i` and `i + D/2` of a head form a pair.

Source: Su et al., RoFormer (2021).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Inverse frequencies (angle per position, float32 `[D/2]`), and a factor for cosines and sines
    (YaRN)."""

    frequencies: Tensor
    factor: float

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B, 1, T, D]` at positions int64 `[B, T]`."""
        angles = positions[:, None, :, None, None] * self.frequencies
        angles = angles.expand(-1, -1, -1, 2, -1)  # the same angles for both halves of a head
        cos, sin = angles.cos().flatten(-2), angles.sin().flatten(-2)
        if self.factor != 1:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys `[B, heads, T, D]`. `cos` and `sin` come from
    `Rotary.at`."""
    rotated, crossed = heads * cos, heads * sin
    first, second = rotated.chunk(2, dim=-1)
    first -= crossed[..., first.shape[-1] :]
    second += crossed[..., : first.shape[-1]]
    return rotated
