"""Linear regression of a key's coordinates on its sign bits, for more accurate coarse scores.

The coarse score of a key (its vote) estimates `q·k` from the signs of the key's coordinates.
Without the regression (`sign_decoder="mean"`), each coordinate is replaced by its sign times the
mean absolute value. That is the best estimate if the rotated coordinates are independent. The
coordinates of a model's keys are correlated, so a sign also predicts other coordinates.

The regression estimates a key's coordinates as `A s` from its signs `s`, by least squares. For
Gaussian coordinates it is the linear MMSE estimator after quantization (Bussgang, 1952). The inner
product with a query is `⟨q, A s⟩ = ⟨Aᵀ q, s⟩`. So votes are computed from the same sign bits, with
the query `Aᵀ q` instead of `q`. The codes of keys do not depend on `A`, so `A` can be fitted again
at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops.codes import decode, unpack

KEYS = 4096
"""Largest number of keys that are used for a fit, evenly spread over the tokens."""

PRIOR = 256
"""Weight of the prior (regularization) in the fit, as a number of keys.

The prior assumes that a sign predicts only the coordinate that it belongs to.
"""

STEPS = 256
"""Integer that represents the mean size of a coordinate. Sums of integers are exact."""


def fitted_blocks(blocks: int) -> int:
    """Return the number of blocks that the regression is fitted to.

    The fit uses the first blocks. Their number is the largest power of two that is not above
    `blocks`. So it changes rarely, and does not depend on how many appends filled the blocks.

    Args:
        blocks: Number of full blocks.
    """
    return 1 << blocks.bit_length() >> 1


def stride(tokens: int) -> int:
    """Return the stride `n`, at least 1: the regression is fitted to every `n`-th token.

    Args:
        tokens: Number of tokens in the fitted blocks. If it is a power of two, so is the stride.
    """
    return max(1, tokens // KEYS)


def identity(batch: int, geometry: Geometry) -> Tensor:
    """Return identity matrices, in place of regression matrices, for an index without full blocks.

    Args:
        batch: Number of sequences `B`.
        geometry: Sizes of heads and vectors.

    Returns:
        Identity matrices, float16 `[B, G, D, D]`.
    """
    eye = torch.eye(geometry.head_dim, dtype=torch.float16, device=geometry.device)
    return eye.repeat(batch, geometry.kv_heads, 1, 1)


def fit(signs: Tensor, magnitudes: Tensor, real: Tensor, levels: Tensor, level: float) -> Tensor:
    """Fit the matrix `Aᵀ` that predicts a key's coordinates from its signs, by least squares.

    The coordinates are decoded from the signs and magnitudes of the codes, without the keys' norms,
    so every key has the same weight in the fit.

    Args:
        signs: Sign bits, uint8 `[B, G, N, M]`.
        magnitudes: Magnitude codes, uint8 `[B, G, N, bits, M]`.
        real: Bool `[B, G, N]`, False for keys that the fit ignores.
        levels: Absolute value of a coordinate for each magnitude code, float32 `[2^bits]`.
        level: Mean absolute value of a coordinate, which is used where only the sign is read.

    Returns:
        `Aᵀ`, float16 `[B, G, D, D]`. Matrix row `j` predicts all coordinates from sign `j`.
    """
    sizes = (levels * (STEPS / level)).round()
    own = (unpack(signs).flatten(-2).float() * 2 - 1) * real[..., None]
    coordinates = decode(signs, magnitudes, sizes) * real[..., None]
    # sums of integers, all below 2^24: float32 results are exact, and the same on all devices
    moments = (own.mT @ own).double(), (own.mT @ coordinates).double() / STEPS
    prior = PRIOR * torch.eye(own.shape[-1], dtype=torch.float64, device=signs.device)
    factor = torch.linalg.cholesky_ex(moments[0] + prior).L
    # two triangular solves, because `cholesky_solve` makes the CPU wait for the GPU
    half = torch.linalg.solve_triangular(factor, moments[1] + prior, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved.half().contiguous()


def voting(directions: Tensor, matrix: Tensor) -> Tensor:
    """Compute `Aᵀ q`, the query for coarse scores (votes) if there is a regression of keys on
    their signs.

    Args:
        directions: Rotated queries, float32 `[B, G, g, D]`.
        matrix: The matrix `Aᵀ` that `fit` returns, float16 `[B, G, D, D]`.

    Returns:
        Float32 `[B, G, g, D]`.
    """
    return directions @ matrix.mT.float()
