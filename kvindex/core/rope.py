"""The rotary embedding of keys, for indexes that undo it.

`Geometry.rope` contains its inverse frequencies, float `[F]`. Coordinates `j` and `j + F` of the
token at position `t` are rotated by the angle `t · rope[j]`, for `j < F`. Other coordinates are not
rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core import check


def checked(rope: Any, head_dim: int, device: torch.device) -> Tensor | None:
    """Check that `rope` is None or inverse frequencies, and return it.

    Raises TypeError or ValueError.
    """
    if rope is None:
        return None
    check.tensor("rope", rope, {"F": None}, device=device)
    if not rope.is_floating_point() or not 1 <= len(rope) <= head_dim // 2:
        raise ValueError(
            f"rope: got {rope.dtype} of {len(rope)} entries, allowed is None or 1 to "
            f"head_dim / 2 = {head_dim // 2} inverse frequencies"
        )
    found: Tensor = rope
    return found


def rotate(vectors: Tensor, positions: Tensor, rope: Tensor | None) -> Tensor:
    """Rotate vectors, float32 `[…, n, D]`, by the angles of positions, integers `[…, n]`.

    Negative positions undo the rotation.
    """
    if rope is None:
        return vectors
    angles = positions[..., None].double() * rope.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    F = len(rope)
    a, b, rest = vectors[..., :F], vectors[..., F : 2 * F], vectors[..., 2 * F :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
