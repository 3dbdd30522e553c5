"""Normalize and rotate vectors: `k̃ = R k/‖k‖` with a randomized Hadamard transform `R`.

Source: ParisKV, section A.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 2.0**60
"""Bound on norms, so that the product of two stays far below the largest float32."""


def rotation(head_dim: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Build the orthogonal matrix `R = (Q ⊗ H) diag(s) / √D`.

    With `D = p · 2^a` and odd `p`, `H` is Sylvester's Hadamard matrix of order `2^a` and `Q` is the
    Hartley matrix of order `p`: `Q[i, j] = cos(2πij/p) + sin(2πij/p)`, orthogonal up to the factor
    `√p`. No entry exceeds `√(2/D)`, so one round mixes all `D` coordinates for every `p`.

    Args:
        head_dim: Dimension `D` of keys and queries.
        seed: Seed of the random signs `s`. They are generated on the CPU and are the same on every
            device.
        device: Device of the result.

    Returns:
        `R`, float32 `[D, D]`.

    Source: ParisKV, section A.1.
    """
    power = head_dim & -head_dim
    odd = head_dim // power
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < power:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), hadamard)
    angle = torch.arange(odd, dtype=torch.float64) * (2 * math.pi / odd)
    angle = angle[:, None] * torch.arange(odd)
    hartley = angle.cos() + angle.sin()
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim,), generator=generator).double() * 2 - 1
    matrix = torch.kron(hartley, hadamard) * signs / math.sqrt(head_dim)
    return matrix.float().to(device)


def normalize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Split vectors into directions and norms.

    Norms are summed in float64, which no finite float32 overflows.

    Args:
        vectors: Floating point, `[..., D]`.

    Returns:
        Directions float32 `[..., D]` and norms float32 `[...]`, at most `LONGEST`. A zero vector
        has norm 0 and direction 0.
    """
    exact = vectors.double()
    norms = exact.square().sum(-1).sqrt()
    directions = exact / norms.clamp_min(torch.finfo(torch.float64).tiny)[..., None]
    return directions.float(), norms.clamp_max(LONGEST).float()


def rotate(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Multiply each vector with a rotation.

    Args:
        vectors: Floating point, `[..., D]`.
        matrix: The rotation `R`, float32 `[D, D]`.

    Returns:
        `R x`, float32 `[..., D]`.
    """
    return vectors.float() @ matrix.T
