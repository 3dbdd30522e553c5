"""Linear regression of a key's coordinates on its signs, which makes votes more accurate.

Without it (`sign_decoder="mean"`) a vote takes each sign for the mean size of its own coordinate.
That is right if the rotated coordinates are independent. The keys of a model use fewer directions
than they have coordinates, so every sign also predicts other coordinates.

`A s` is the least-squares estimate of a key's coordinates from its signs `s`. For Gaussian
coordinates it is the linear MMSE estimator after quantization (Bussgang, 1952). The inner product
with a query is `⟨q, A s⟩ = ⟨Aᵀ q, s⟩`, so votes use the same sign bits with the query `Aᵀ q`
instead of `q`. Codes do not depend on `A`, so `A` may be fitted again at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops.codes import decode, unpack

KEYS = 4096
"""Largest number of keys that are used for a fit, evenly spread over the tokens."""

PRIOR = 256
"""Weight of the prior in the fit, as a number of keys.

The prior assumes that each sign predicts only its own coordinate.
"""

STEPS = 256
"""Integer that represents the mean size of a coordinate. Sums of integers are exact."""


def fitted_blocks(blocks: int) -> int:
    """Return how many full blocks the fit uses: the largest power of two up to `blocks`.

    The result depends only on the number of tokens, not on how they were appended, and it changes
    rarely.

    Args:
        blocks: Number of full blocks.

    Returns:
        Number of blocks, counted from the first one.
    """
    return 1 << blocks.bit_length() >> 1


def stride(tokens: int) -> int:
    """Return the distance between the tokens that are fitted; a power of two if `tokens` is one.

    Args:
        tokens: Number of tokens in the fitted blocks.

    Returns:
        The stride `n`, at least 1: every `n`-th token is used.
    """
    return max(1, tokens // KEYS)


def identity(batch: int, geometry: Geometry) -> Tensor:
    """Return the regression matrix of an index without full blocks.

    Args:
        batch: Number of sequences `B`.
        geometry: Sizes of heads and vectors.

    Returns:
        Identity matrices, float16 `[B, G, D, D]`.
    """
    eye = torch.eye(geometry.head_dim, dtype=torch.float16, device=geometry.device)
    return eye.repeat(batch, geometry.kv_heads, 1, 1)


def fit(signs: Tensor, magnitudes: Tensor, real: Tensor, levels: Tensor, level: float) -> Tensor:
    """Fit `Aᵀ` by least squares of coordinates on signs.

    The coordinates are decoded from the signs and magnitudes of the codes. Every key has the same
    weight in the fit, whatever its norm.

    Args:
        signs: Uint8 `[B, G, N, M]`.
        magnitudes: Uint8 `[B, G, N, bits, M]`.
        real: Bool `[B, G, N]`, False for keys that do not count.
        levels: Sizes of the magnitude codes, float32 `[2^bits]`.
        level: Size that a sign alone represents.

    Returns:
        `Aᵀ`, float16 `[B, G, D, D]`. Matrix row `j` predicts all coordinates from sign `j`.
    """
    sizes = (levels * (STEPS / level)).round()
    own = (unpack(signs).flatten(-2).float() * 2 - 1) * real[..., None]
    coordinates = decode(signs, magnitudes, sizes) * real[..., None]
    # float32 sums of integers below 2^24 are exact, so they are the same in any order on any device
    moments = (own.mT @ own).double(), (own.mT @ coordinates).double() / STEPS
    prior = PRIOR * torch.eye(own.shape[-1], dtype=torch.float64, device=signs.device)
    factor = torch.linalg.cholesky_ex(moments[0] + prior).L
    # two triangular solves instead of `cholesky_solve`, which synchronizes with a GPU
    half = torch.linalg.solve_triangular(factor, moments[1] + prior, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved.half().contiguous()


def voting(directions: Tensor, matrix: Tensor) -> Tensor:
    """Return the query that votes use with a regression: `Aᵀ q`.

    Args:
        directions: Rotated queries, float32 `[B, G, g, D]`.
        matrix: Result of `fit`, float16 `[B, G, D, D]`.

    Returns:
        Float32 `[B, G, g, D]`.
    """
    return directions @ matrix.mT.float()
