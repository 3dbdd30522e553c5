"""What signs say of coordinates: a linear regression, fitted to the keys.

A vote takes a sign for the mean size of its own coordinate, and for nothing else: right of keys
whose rotated coordinates are independent. Keys of a model lie near fewer directions than they have
coordinates, so that each sign tells of all. `A s` is the least-squares estimator of a key's
coordinates from its signs (of Gaussian ones the linear MMSE estimator after quantization; Bussgang,
1952), and an inner product with it is `⟨q, A s⟩ = ⟨Aᵀ q, s⟩`: votes read the same bits with another
query. Codes do not depend on it, so it may be fitted again at any time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops.codes import decode, unpack

KEYS = 4096
"""At most so many keys are fitted to, evenly spread."""

PRIOR = 256
"""Keys that the prior counts for: that signs tell of their own coordinate alone."""

STEPS = 256
"""Integers up to this many times the mean size stand for coordinates, so that sums are exact."""


def fitted_blocks(blocks: int) -> int:
    """To how many of `blocks` full blocks it is fitted, the first ones: up to a power of two.

    So that it does not matter how they came, and that few tokens more do not change it.
    """
    return 1 << blocks.bit_length() >> 1


def stride(tokens: int) -> int:
    """Every so many of `tokens` keys is fitted to, a power of two if `tokens` is one."""
    return max(1, tokens // KEYS)


def identity(batch: int, geometry: Geometry) -> Tensor:
    """The matrix of no key, float16 `[B, G, D, D]`."""
    eye = torch.eye(geometry.head_dim, dtype=torch.float16, device=geometry.device)
    return eye.repeat(batch, geometry.kv_heads, 1, 1)


def fit(signs: Tensor, magnitudes: Tensor, real: Tensor, levels: Tensor, level: float) -> Tensor:
    """`Aᵀ`, float16 `[B, G, D, D]`: least squares of coordinates on signs.

    Row `j` is what sign `j` says of all coordinates, as matrix units read it.

    Keys count alike, whatever their norms. What they are is read from their codes: signs uint8
    `[B, G, N, M]`, magnitudes uint8 `[B, G, N, bits, M]`, levels float32 `[2^bits]`; real: which
    keys count, bool `[B, G, N]`; level: what a sign alone stands for.
    """
    sizes = (levels * (STEPS / level)).round()
    own = (unpack(signs).flatten(-2).float() * 2 - 1) * real[..., None]
    coordinates = decode(signs, magnitudes, sizes) * real[..., None]
    # sums of integers below 2^24: in any order and on any device the same
    moments = (own.mT @ own).double(), (own.mT @ coordinates).double() / STEPS
    prior = PRIOR * torch.eye(own.shape[-1], dtype=torch.float64, device=signs.device)
    factor = torch.linalg.cholesky_ex(moments[0] + prior).L
    # two solutions in place of `cholesky_solve`, which waits for a GPU
    half = torch.linalg.solve_triangular(factor, moments[1] + prior, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved.half().contiguous()


def voting(directions: Tensor, matrix: Tensor) -> Tensor:
    """What votes take for rotated directions float32 `[B, G, g, D]`: `Aᵀ q`, of the same shape.

    matrix: of `fit`, float16 `[B, G, D, D]`.
    """
    return directions @ matrix.mT.float()
