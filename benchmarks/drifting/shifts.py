"""Keys moved away from those that were learned from, by known amounts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def mean_shift(keys: Tensor, learned: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Keys `[G, N, D]` moved along one direction, by `size` mean norms of a learned deviation."""
    norms = (learned - learned.mean(1, keepdim=True)).norm(dim=-1).mean(1)
    direction = torch.randn(len(keys), 1, keys.shape[2], generator=draw).to(keys)
    return keys + size * norms[:, None, None] * torch.nn.functional.normalize(direction, dim=-1)


def covariance_shift(keys: Tensor, learned: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Deviations with each coordinate scaled by `exp(size · z)`, `z` normal."""
    middle = learned.mean(1, keepdim=True)
    scales = torch.exp(size * torch.randn(len(keys), 1, keys.shape[2], generator=draw))
    return middle + (keys - middle) * scales.to(keys)


def tail_shift(keys: Tensor, learned: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Deviations times `√(3/χ²₃)^size`: at 1, normal ones become Student's t of 3 degrees."""
    middle = learned.mean(1, keepdim=True)
    squares = torch.randn(*keys.shape[:2], 3, generator=draw).square().sum(-1, keepdim=True)
    return middle + (keys - middle) * (3 / squares).pow(size / 2).to(keys)


SHIFTS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...], str]] = {
    "mean": (mean_shift, (0.0, 1.0, 2.0, 4.0), "mean: shift, in norms of a key's deviation"),
    "covariance": (
        covariance_shift,
        (0.0, 0.5, 1.0, 2.0),
        "covariance: σ of the log of the scales",
    ),
    "tails": (tail_shift, (0.0, 0.5, 1.0, 2.0), "tails: power of √(3/χ²₃), 1 = Student's t₃"),
}
