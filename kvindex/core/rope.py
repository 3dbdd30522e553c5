"""Rotary position embedding of keys, for indexes that undo the rotation.

`Geometry.rope` contains `F` inverse frequencies. For `j < F`, the pair of coordinates `j` and `j +
F` of the token at position `t` is rotated by the angle `t · rope[j]`. Other coordinates are not
rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core import check


def checked(rope: Any, head_dim: int, device: torch.device) -> Tensor | None:
    """Return `rope` if it is None or a float tensor of inverse frequencies.

    Raises TypeError or ValueError for any other argument.
    """
    if rope is None:
        return None
    check.tensor("rope", rope, {"F": None}, device=device)
    if not rope.is_floating_point() or not 1 <= len(rope) <= head_dim // 2:
        raise ValueError(
            f"rope: got {len(rope)} numbers of {rope.dtype}, allowed is None or a float tensor of "
            f"1 to head_dim / 2 = {head_dim // 2} inverse frequencies"
        )
    found: Tensor = rope
    return found


def rotate(vectors: Tensor, positions: Tensor, rope: Tensor | None) -> Tensor:
    """Apply the rotary embedding to vectors, float32 `[…, n, D]`.

    positions: integers `[…, n]`; negative positions undo the rotation.
    """
    if rope is None:
        return vectors
    angles = positions[..., None].double() * rope.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    F = len(rope)
    a, b, rest = vectors[..., :F], vectors[..., F : 2 * F], vectors[..., 2 * F :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
