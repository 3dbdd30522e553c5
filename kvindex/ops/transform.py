"""Normalize keys and queries, and rotate them with a randomized Hadamard transform.

Source: ParisKV, section A.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 2.0**60
"""Bound on norms, so that the product of two norms stays far below the largest float32."""


def rotation(head_dim: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Build the random rotation of keys and queries, `R = (Q ⊗ H) diag(s) / √D`.

    `R` is orthogonal. No entry is 0 or exceeds `√(2/D)`, so every coordinate of the result depends
    on all coordinates of the input. `s` are random signs. With `D = p * 2^a` for an odd `p`, `H` is
    Sylvester's Hadamard matrix of order `2^a`, and `Q` is the Hartley matrix of order `p`, with the
    entries `cos(2πij/p) + sin(2πij/p)`.

    Args:
        head_dim: Dimension `D` of keys and queries.
        seed: Seed of the random signs. They are generated on the CPU, and are the same on every
            device.
        device: Device of the result.

    Returns:
        The matrix `R`, float32 `[D, D]`.

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
    """Return vectors scaled to length 1, and their norms.

    Squares are added up in float64, which does not overflow for any finite float32 numbers.

    Args:
        vectors: Floating point, `[..., D]`.

    Returns:
        Vectors of length 1, float32 `[..., D]`, and norms, float32 `[...]`, at most `LONGEST`. A
        zero vector stays 0 and has norm 0.
    """
    exact = vectors.double()
    norms = exact.square().sum(-1).sqrt()
    directions = exact / norms.clamp_min(torch.finfo(torch.float64).tiny)[..., None]
    return directions.float(), norms.clamp_max(LONGEST).float()


def rotate(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Rotate vectors: multiply each with the matrix `R`.

    Args:
        vectors: Floating point, `[..., D]`.
        matrix: Result of `rotation`, float32 `[D, D]`.

    Returns:
        Rotated vectors, float32 `[..., D]`.
    """
    return vectors.float() @ matrix.T
