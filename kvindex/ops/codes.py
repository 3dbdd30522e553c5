"""Sign and magnitude codes of rotated keys.

A subspace of `m = 8` coordinates has one byte of sign bits, which is also the id of its nearest
centroid, and one byte for each magnitude bit. Both stages of a search read the same sign bits.

Source: ParisKV, sections A.2 and A.3, equations (5) to (9) and (12).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvindex.ops.transform import LONGEST

TINY = torch.finfo(torch.float64).tiny

OCTAVES = 32
"""Range of logarithmic weights in octaves: from `2^-16` to `2^16`.

The range is the same for all keys, so no scale is stored with the codes.
"""

FACTOR = 2**15 - 1
"""Integer that the coarse stage uses for a weight equal to the weight scale.

Votes stay below `D · 127 · FACTOR`, which is less than 2^30 for `D` up to 256.
"""

SUBSPACE = 8
"""Coordinates per subspace, `m` (paper, section 5.4). Their sign bits fill one byte."""


@lru_cache
def lloyd_max(subspace: int, bits: int) -> tuple[float, ...]:
    """Compute the `2^bits` Lloyd–Max levels of `|u_j|` for a random direction in `m` dimensions.

    By equation (12), `u_j² ~ Beta(1/2, (m-1)/2)`. With `u = sin θ`, the density over
    `θ ∈ [0, π/2]` is proportional to `cos^(m-2) θ`. Each level is the mean of its cell, and cells
    end halfway between levels. These equations are solved by Newton's method; Gauss–Legendre
    quadrature gives the probability of each cell.

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.

    Returns:
        The levels, ascending.

    Raises:
        ValueError: `subspace` is below 2 or `bits` below 0.

    Source: ParisKV, section A.3, equation (12).
    """
    if subspace < 2 or bits < 0:
        raise ValueError(
            f"subspace, bits: got {subspace}, {bits}, allowed are at least 2 and at least 0"
        )
    count, power = 2**bits, subspace - 2
    total = _integral(np.array([0.0]), np.array([np.pi / 2]), power)[0]

    # start from evenly spaced levels up to three standard deviations of u_j
    levels = (np.arange(count) + 0.5) / count * min(1.0, 3 / np.sqrt(subspace))
    for _ in range(100):
        edges, mass, mean = _cells(levels, power)
        density = (1 - edges[1:-1] ** 2) ** ((power - 1) / 2) / total
        right = density * (edges[1:-1] - mean[:-1]) / mass[:-1] / 2  # d mean_i / d level_(i+1)
        left = density * (mean[1:] - edges[1:-1]) / mass[1:] / 2  # d mean_(i+1) / d level_i
        diagonal = np.concatenate([right, [0.0]]) + np.concatenate([[0.0], left]) - 1
        step = _tridiagonal(left, diagonal, right, levels - mean)
        damping = 1.0
        while np.any(np.diff(np.concatenate([[0.0], levels + damping * step, [1.0]])) <= 0):
            damping /= 2
        levels = levels + damping * step
        if np.abs(step).max() < 1e-14:
            break
    return tuple(float(level) for level in levels)


@lru_cache
def tangent(subspace: int, bits: int) -> float:
    """Return the mean of `tan² θ`, where `θ` is the angle between a direction and its code.

    It is computed as `(1 - A) / A` with `A = E‖v‖² = m Σ p_i ℓ_i²`. Each level is the mean of its
    cell, so `E⟨v, u⟩ = E‖v‖²`. The true mean of `‖v‖²/⟨v, u⟩² - 1` is close: 1% above to 4% below
    this value for `m ≥ 64`, 7% above to 21% below it for `m = 8` (docs/pipeline/rerank.md).

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.
    """
    levels = np.array(lloyd_max(subspace, bits))
    aligned = float(subspace * (_cells(levels, subspace - 2)[1] * levels**2).sum())
    return (1 - aligned) / aligned


def levels(subspace: int, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the levels of `lloyd_max`, rounded to float16 so that matrix units can use them.

    Rounding changes a level by at most 2^-12 of its size.

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.
        device: Device of the result.

    Returns:
        Float32 `[2^bits]`, ascending.
    """
    rounded = torch.tensor(lloyd_max(subspace, bits), dtype=torch.float64).half()
    return rounded.float().to(device)


def encode(
    rotated: Tensor, norms: Tensor, levels: Tensor, block: int = SUBSPACE
) -> dict[str, Tensor]:
    """Encode rotated directions as signs, magnitudes and weights.

    Args:
        rotated: Directions, float32 `[..., D]`.
        norms: Norms of the keys, float32 `[...]`.
        levels: Sizes of the magnitude codes, float32 `[2^bits]`.
        block: Coordinates that share one weight: a subspace in the paper, up to all `D`.

    Returns:
        `signs` uint8 `[..., M]`: bit `j` is 1 where coordinate `j` ≥ 0, least significant bit
        first. The byte is also the id of the nearest centroid (6).
        `magnitudes` uint8 `[..., bits, M]`: bit `j` of byte `p` is bit `p` of the index of the
        level nearest to `|u_j|`, or of the lower level at a tie. `u` is the direction of the
        coordinate's block.
        `weights` float32 `[..., D / block]`: `w_b = ‖k‖ r_b / α_b` with `α_b = ⟨v_b, u_b⟩` (7, 9);
        0 where `r_b` is 0.

    Source: ParisKV, sections A.2 and A.3, equations (6), (7) and (9).
    """
    parts = rotated.reshape(*rotated.shape[:-1], -1, block)  # [..., D / block, block]
    radii = parts.double().square().sum(-1).sqrt().float()
    directions = parts / radii.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    edges = (levels[1:] + levels[:-1]) / 2
    index = torch.bucketize(directions.abs(), edges)  # a size equal to an edge gets the lower level
    bytes_of = (*rotated.shape[:-1], -1, SUBSPACE)
    signs = pack(rotated.reshape(bytes_of) >= 0)
    bits = range(len(levels).bit_length() - 1)
    planes = [pack((index >> p & 1 == 1).reshape(bytes_of)) for p in bits]
    decoded = torch.where(parts >= 0, 1.0, -1.0) * levels[index]
    alpha = (decoded.double() * directions).sum(-1).float()  # the same in any order of addition
    weights = torch.where(radii > 0, norms[..., None] * radii / alpha, 0.0)
    empty = signs.new_empty((*signs.shape[:-1], 0, signs.shape[-1]))
    magnitudes = torch.stack(planes, dim=-2) if planes else empty
    return {"signs": signs, "magnitudes": magnitudes, "weights": weights}


def decode(signs: Tensor, magnitudes: Tensor, levels: Tensor) -> Tensor:
    """Return the quantized directions `v`, without normalizing them to length 1.

    Args:
        signs: Uint8 `[..., M]`.
        magnitudes: Uint8 `[..., bits, M]`.
        levels: Sizes of the magnitude codes, float32 `[2^bits]`.

    Returns:
        Float32 `[..., D]`.
    """
    index = torch.zeros((*signs.shape, 8), dtype=torch.uint8, device=signs.device)
    for p in range(magnitudes.shape[-2]):
        index += unpack(magnitudes[..., p, :]) * 2**p
    sizes = levels.index_select(0, index.flatten().int()).view(index.shape)
    return (sizes * (unpack(signs).float() * 2 - 1)).flatten(-2)


def centers(keys: Tensor, valid: Tensor | None, every: int) -> Tensor:
    """Compute the mean of the valid keys of each block, within ±`transform.LONGEST`.

    Args:
        keys: `[B, G, N, D]`, zero where `valid` is False. The first key is the first of a block.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.
        every: Tokens per block.

    Returns:
        Bfloat16 `[B, G, S, D]`, one for each block; zero for a block without a valid key.
    """
    B, G, N, D = keys.shape
    real = torch.ones((B, N), dtype=torch.bool, device=keys.device) if valid is None else valid
    pad, after = torch.nn.functional.pad, -N % every
    total = pad(keys.double(), (0, 0, 0, after)).view(B, G, -1, every, D).sum(3)
    counts = pad(real, (0, after)).view(B, 1, -1, every).sum(3, keepdim=True)
    means: Tensor = total / counts.clamp_min(1)
    return means.clamp(-LONGEST, LONGEST).bfloat16()


def log_codes(weights: Tensor, bits: int) -> Tensor:
    """Round weights to integers on a logarithmic scale.

    A weight that is twice as large has a code that is `2^bits / OCTAVES` larger. The code
    `2^(bits - 1)` represents the weight 1, and the code 0 the weight 0. Weights outside the range
    get the first or the last code.

    Args:
        weights: Float32, any shape.
        bits: Bits of a code, 1 to 16.

    Returns:
        Int32, of the same shape.
    """
    codes = torch.log2(weights.double()) * (2**bits / OCTAVES) + 2 ** (bits - 1)
    return torch.where(weights > 0, codes.round().clamp(1, 2**bits - 1), 0).int()


def log_weights(codes: Tensor, bits: int) -> Tensor:
    """Return the weights that codes of `log_codes` represent.

    Args:
        codes: Integers, any shape.
        bits: Bits of a code, 1 to 16.

    Returns:
        Float32, of the same shape.
    """
    weights = torch.exp2((codes - 2 ** (bits - 1)).float() / (2**bits / OCTAVES))
    return weights.masked_fill(codes == 0, 0)


def weight_scale(largest: Tensor) -> Tensor:
    """Return the smallest power of two above all weights whose code is at most `largest`.

    Args:
        largest: Integers: the largest 8-bit code, or upper byte of a 16-bit code.

    Returns:
        Float32, of the same shape.
    """
    octave = torch.div(largest.int() * OCTAVES, 256, rounding_mode="floor")
    one = torch.ones(octave.shape, device=largest.device)
    return torch.ldexp(one, octave + 1 - OCTAVES // 2)


def log_factors(bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return integers up to `FACTOR` that are proportional to weights below the weight scale.

    Args:
        bits: 8 if the weights are codes of 8 bits. 16 if they are upper bytes of 16-bit codes; each
            then counts as the middle of the 256 codes with this upper byte.
        device: Device of the result.

    Returns:
        Int32 `[256]`, in ascending order: entry 255 is for the largest code below the weight scale.
    """
    steps = torch.arange(-256, 0, device=device).double() + (0.5 if bits == 16 else 0.0)
    factors = torch.exp2(steps * OCTAVES / 256) * FACTOR
    return factors.round().int()


def factors(weights: Tensor, weight_scale: Tensor, table: Tensor) -> Tensor:
    """Look up the integer factor of each weight in a table of `log_factors`.

    Args:
        weights: Upper bytes of logarithmic weights, uint8 `[B, G, N, W]`.
        weight_scale: A power of two above all weights, float32 `[B, G]`.
        table: Result of `log_factors`, int32 `[256]`.

    Returns:
        Int32 `[B, G, N, W]`.
    """
    exponent = torch.frexp(weight_scale).exponent - 1
    shift = (OCTAVES // 2 - exponent) * (256 // OCTAVES)
    return table[weights.long() + shift[..., None, None]]


def centroids(device: torch.device | str = "cpu") -> Tensor:
    """Return all sign patterns `Ω`, the centroids of a subspace.

    Args:
        device: Device of the result.

    Returns:
        Float32 `[256, m]` with entries `±1/√m`. Row `i` has the signs of the bits of `i`.

    Source: ParisKV, equation (5).
    """
    ids = torch.arange(2**SUBSPACE, dtype=torch.uint8, device=device)
    return (unpack(ids).float() * 2 - 1) / math.sqrt(SUBSPACE)


def pack(bits: Tensor) -> Tensor:
    """Pack bits into bytes, least significant bit first.

    Args:
        bits: Bool `[..., 8]`.

    Returns:
        Uint8 `[...]`.
    """
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (bits * powers).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes into bits, least significant bit first.

    Args:
        packed: Uint8 `[...]`.

    Returns:
        Uint8 `[..., 8]`, 0 or 1.
    """
    every = torch.arange(256, device=packed.device)
    table = every[:, None] >> every[:8]
    bits = (table & 1).to(torch.uint8)  # a look-up is 3 times as fast on a CPU as shifting
    return bits.index_select(0, packed.flatten().int()).view(*packed.shape, 8)


def _cells(levels: np.ndarray, power: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return edges, masses and means of the levels' cells for the density `cos^power θ`.

    Levels are values of `u = sin θ`.
    """
    total = _integral(np.array([0.0]), np.array([np.pi / 2]), power)[0]
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    theta = np.arcsin(edges)
    mass = _integral(theta[:-1], theta[1:], power) / total
    moment = -np.diff(np.cos(theta) ** (power + 1)) / (power + 1) / total
    return edges, mass, moment / mass


def _tridiagonal(
    below: np.ndarray, diagonal: np.ndarray, above: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Solve `T x = right` for a tridiagonal `T` by elimination without pivots.

    The diagonals of `T` are `[n - 1]`, `[n]` and `[n - 1]`. Here the main diagonal is about as
    large as its two neighbors together, so elimination is stable. `np.linalg.solve` is not used
    because its threads took over a minute for 128 levels where 15 processes shared 16 cores.
    """
    pivot, x = diagonal.copy(), right.copy()
    for i in range(1, len(x)):
        factor = below[i - 1] / pivot[i - 1]
        pivot[i] -= factor * above[i - 1]
        x[i] -= factor * x[i - 1]
    x[-1] /= pivot[-1]
    for i in reversed(range(len(x) - 1)):
        x[i] = (x[i] - above[i] * x[i + 1]) / pivot[i]
    return x


@lru_cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Return 32 nodes and weights of Gauss–Legendre quadrature on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(32)
    return nodes, weights


def _integral(start: np.ndarray, stop: np.ndarray, power: int) -> np.ndarray:
    """Return `∫ cos^power θ dθ` over each interval `[start, stop]`."""
    nodes, weights = _nodes()
    middle, half = (start + stop) / 2, (stop - start) / 2
    theta = middle[:, None] + half[:, None] * nodes
    integral: np.ndarray = half * (np.cos(theta) ** power * weights).sum(-1)
    return integral
