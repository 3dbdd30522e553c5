"""Codes of rotated keys: signs, quantized magnitudes, and weights.

The code of a subspace, which has `m = 8` coordinates, is one byte of sign bits and one byte for
each magnitude bit. The byte of sign bits is also the id of the centroid nearest to the subspace's
coordinates. The coarse stage and the rerank of a search read the same sign bits.

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
"""Range of weights that are stored as logarithms, in factors of 2: from `2^-16` to `2^16`.

The range is the same for all keys, so no scale is stored with the codes.
"""

FACTOR = 2**15 - 1
"""Integer by which the coarse stage represents a weight that equals the weight scale.

With this factor, votes stay below `D * 127 * FACTOR`, which is less than 2^30 for `D` up to 256.
"""

SUBSPACE = 8
"""Number of coordinates per subspace, `m` (paper, section 5.4). Their sign bits fill one byte."""


@lru_cache
def lloyd_max(subspace: int, bits: int) -> tuple[float, ...]:
    """Compute the Lloyd–Max quantization levels of a coordinate of a random unit vector.

    Each of the `2^bits` levels is the mean of the values that are rounded to it, and rounding
    intervals end halfway between levels. Newton's method solves these equations, and Gauss–Legendre
    quadrature computes the probability of each interval.

    The unit vector `u` is uniformly distributed in `m` dimensions. By equation (12), a coordinate
    `u_j` has `u_j² ~ Beta(1/2, (m-1)/2)`. With `|u_j| = sin θ`, the density of `θ` in `[0, π/2]` is
    proportional to `cos^(m-2) θ`.

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.

    Returns:
        The levels of `|u_j|`, ascending.

    Raises:
        ValueError: `subspace` is below 2 or `bits` below 0.

    Source: ParisKV, section A.3, equation (12).
    """
    if subspace < 2 or bits < 0:
        raise ValueError(
            f"subspace: got {subspace}, allowed is at least 2; bits: got {bits}, allowed is at "
            "least 0"
        )
    count, power = 2**bits, subspace - 2
    total = _integral(np.array([0.0]), np.array([np.pi / 2]), power)[0]

    # start with evenly spaced levels, up to three standard deviations of a coordinate
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
    """Approximate the mean of `tan² θ`, for the angle `θ` between a unit vector and its code.

    The unit vector `u` is random in `m` dimensions, and its code `v` is `u` with every coordinate
    rounded to a level of `lloyd_max`. The result is `(1 - A) / A` with `A = E‖v‖²`. The exact mean
    of `tan² θ` differs from the result by +1% to -4% for `m ≥ 64`, and by +7% to -21% for `m = 8`
    (docs/pipeline/rerank.md). `E‖v‖²` also equals `E⟨v, u⟩`, because each level is the mean of the
    values that are rounded to it.

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.
    """
    levels = np.array(lloyd_max(subspace, bits))
    aligned = float(subspace * (_cells(levels, subspace - 2)[1] * levels**2).sum())
    return (1 - aligned) / aligned


def levels(subspace: int, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the quantization levels that `lloyd_max` computes, rounded to float16, so that tensor
    cores can use them.

    Rounding changes a level by at most 2^-12 of its value.

    Args:
        subspace: Dimension `m`, at least 2.
        bits: Bits of a magnitude, at least 0.
        device: Device of the result.

    Returns:
        The levels, float32 `[2^bits]`, ascending.
    """
    rounded = torch.tensor(lloyd_max(subspace, bits), dtype=torch.float64).half()
    return rounded.float().to(device)


def encode(
    rotated: Tensor, norms: Tensor, levels: Tensor, block: int = SUBSPACE
) -> dict[str, Tensor]:
    """Encode keys as signs, magnitudes and weights.

    The coordinates of a key are divided into blocks. In the formula of the weights, `u_b` is block
    `b` scaled to length 1, `r_b` is its length before scaling, and `v_b` is `u_b` rounded to signs
    and levels.

    Args:
        rotated: Rotated keys of length 1, float32 `[..., D]`.
        norms: Norms `‖k‖` of the keys, float32 `[...]`.
        levels: Levels to which magnitudes are rounded, float32 `[2^bits]`.
        block: Number of coordinates per block, which share one weight: 8 in the paper, at most `D`.

    Returns:
        A dict with three tensors. `signs`, uint8 `[..., M]`: bit `j` of a byte (bit 0 is the
        lowest) is 1 if coordinate `j` is not negative. The byte is also the id of the nearest
        centroid. `magnitudes`, uint8 `[..., bits, M]`: bit `j` of byte `p` is bit `p` of the index
        of the level nearest to coordinate `j` of `u_b`; ties go to the lower level. `weights`,
        float32 `[..., D / block]`: `‖k‖ r_b / ⟨v_b, u_b⟩`, or 0 if `r_b` is 0.

    Source: ParisKV, sections A.2 and A.3, equations (6), (7) and (9).
    """
    parts = rotated.reshape(*rotated.shape[:-1], -1, block)  # [..., D / block, block]
    radii = parts.double().square().sum(-1).sqrt().float()
    directions = parts / radii.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    edges = (levels[1:] + levels[:-1]) / 2
    index = torch.bucketize(directions.abs(), edges)  # a value on an edge gets the lower level
    bytes_of = (*rotated.shape[:-1], -1, SUBSPACE)
    signs = pack(rotated.reshape(bytes_of) >= 0)
    bits = range(len(levels).bit_length() - 1)
    planes = [pack((index >> p & 1 == 1).reshape(bytes_of)) for p in bits]
    decoded = torch.where(parts >= 0, 1.0, -1.0) * levels[index]
    # add in float64, so that the order of addition does not matter
    alpha = (decoded.double() * directions).sum(-1).float()
    weights = torch.where(radii > 0, norms[..., None] * radii / alpha, 0.0)
    empty = signs.new_empty((*signs.shape[:-1], 0, signs.shape[-1]))
    magnitudes = torch.stack(planes, dim=-2) if planes else empty
    return {"signs": signs, "magnitudes": magnitudes, "weights": weights}


def decode(signs: Tensor, magnitudes: Tensor, levels: Tensor) -> Tensor:
    """Return the vectors that codes represent: the level of each coordinate with its sign.

    The vectors are not scaled to length 1, and are not multiplied by the weights that `encode` also
    returns.

    Args:
        signs: Result of `encode`, uint8 `[..., M]`.
        magnitudes: Result of `encode`, uint8 `[..., bits, M]`.
        levels: Levels to which magnitudes were rounded, float32 `[2^bits]`.

    Returns:
        Float32 `[..., D]`.
    """
    index = torch.zeros((*signs.shape, 8), dtype=torch.uint8, device=signs.device)
    for p in range(magnitudes.shape[-2]):
        index += unpack(magnitudes[..., p, :]) * 2**p
    sizes = levels.index_select(0, index.flatten().int()).view(index.shape)
    return (sizes * (unpack(signs).float() * 2 - 1)).flatten(-2)


def centers(keys: Tensor, valid: Tensor | None, every: int) -> Tensor:
    """Compute the mean of the valid keys of each block of tokens.

    Coordinates of the means are limited to ±`transform.LONGEST`.

    Args:
        keys: `[B, G, N, D]`, 0 where `valid` is False. A block begins with the first of these keys.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.
        every: Number of tokens per block.

    Returns:
        Means of the `S` blocks, bfloat16 `[B, G, S, D]`; 0 for a block without a valid key.
    """
    B, G, N, D = keys.shape
    real = torch.ones((B, N), dtype=torch.bool, device=keys.device) if valid is None else valid
    pad, after = torch.nn.functional.pad, -N % every
    total = pad(keys.double(), (0, 0, 0, after)).view(B, G, -1, every, D).sum(3)
    counts = pad(real, (0, after)).view(B, 1, -1, every).sum(3, keepdim=True)
    means: Tensor = total / counts.clamp_min(1)
    return means.clamp(-LONGEST, LONGEST).bfloat16()


def log_codes(weights: Tensor, bits: int) -> Tensor:
    """Round weights to integer codes on a logarithmic scale.

    A weight `w` above 0 gets the code `2^(bits - 1) + log2(w) · 2^bits / OCTAVES`, rounded, and
    limited to 1 and `2^bits - 1`. The weight 0 gets the code 0.

    Args:
        weights: Float32, any shape.
        bits: Bits of a code, 1 to 16.

    Returns:
        Codes, int32 of the same shape.
    """
    codes = torch.log2(weights.double()) * (2**bits / OCTAVES) + 2 ** (bits - 1)
    return torch.where(weights > 0, codes.round().clamp(1, 2**bits - 1), 0).int()


def log_weights(codes: Tensor, bits: int) -> Tensor:
    """Return the weights that the codes from `log_codes` represent.

    Args:
        codes: Integers, any shape.
        bits: Bits of a code, 1 to 16.

    Returns:
        Float32, of the same shape.
    """
    weights = torch.exp2((codes - 2 ** (bits - 1)).float() / (2**bits / OCTAVES))
    return weights.masked_fill(codes == 0, 0)


def weight_scale(largest: Tensor) -> Tensor:
    """Return the weight scale: a power of two that is larger than all weights of a set of keys.

    The weight scale is the smallest power of two that is larger than every weight whose code is
    `largest` or lower.

    Args:
        largest: The largest code of 8 bits, or the upper byte of the largest code of 16 bits;
            integers of any shape.

    Returns:
        Float32, of the same shape.
    """
    octave = torch.div(largest.int() * OCTAVES, 256, rounding_mode="floor")
    one = torch.ones(octave.shape, device=largest.device)
    return torch.ldexp(one, octave + 1 - OCTAVES // 2)


def log_factors(bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a table with the weight of each code, as an integer for the coarse stage of a search.

    The coarse stage multiplies the score of a key by the key's weight. It uses integers in place of
    weights, so that results are exact. The integers are proportional to the weights; a weight equal
    to the weight scale (`weight_scale`) would have the integer `FACTOR`.

    Args:
        bits: 8 if weights are stored as codes of 8 bits. 16 if the coarse stage reads only the
            upper byte of codes of 16 bits; a byte then represents the middle of its 256 codes.
        device: Device of the result.

    Returns:
        Int32 `[256]`, ascending. Entry 255 belongs to the largest code below the weight scale,
        entry 254 to the code before it, and so on.
    """
    steps = torch.arange(-256, 0, device=device).double() + (0.5 if bits == 16 else 0.0)
    factors = torch.exp2(steps * OCTAVES / 256) * FACTOR
    return factors.round().int()


def factors(weights: Tensor, weight_scale: Tensor, table: Tensor) -> Tensor:
    """Return the integer by which the coarse stage multiplies the score of each key.

    The integer represents the weight of the key (see `log_factors`).

    Args:
        weights: Codes of 8 bits, or upper bytes of codes of 16 bits, uint8 `[B, G, N, W]`.
        weight_scale: A power of two above all weights, float32 `[B, G]`.
        table: Result of `log_factors`, int32 `[256]`.

    Returns:
        Factors, int32 `[B, G, N, W]`.
    """
    exponent = torch.frexp(weight_scale).exponent - 1
    shift = (OCTAVES // 2 - exponent) * (256 // OCTAVES)
    return table[weights.long() + shift[..., None, None]]


def centroids(device: torch.device | str = "cpu") -> Tensor:
    """Return the 256 centroids of a subspace: all sign patterns, as unit vectors.

    Args:
        device: Device of the result.

    Returns:
        Float32 `[256, 8]` with entries `±1/√8`. In matrix row `i`, entry `j` is positive if bit `j`
        of `i` is 1.

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
    bits = (table & 1).to(torch.uint8)  # on a CPU, this table is 3 times as fast as shifts
    return bits.index_select(0, packed.flatten().int()).view(*packed.shape, 8)


def _cells(levels: np.ndarray, power: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute which numbers in [0, 1] a quantizer rounds to each of `levels`.

    The numbers are distributed as `sin θ`, where the angle `θ` has a density proportional to
    `cos^power θ`.

    Returns:
        The boundaries of the intervals, `[n + 1]` for `n` levels. The probability of each
        interval, `[n]`. The mean of the numbers in each interval, `[n]`.
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
    """Solve `T x = right` for a tridiagonal matrix `T` by Gaussian elimination without pivoting.

    Pivoting is not needed, because an entry of the main diagonal is about as large as its two
    neighbors together. `np.linalg.solve` is avoided: its threads took over a minute for 128 levels
    when 15 processes shared 16 cores.

    Args:
        below: Diagonal below the main one, `[n - 1]`.
        diagonal: Main diagonal, `[n]`.
        above: Diagonal above the main one, `[n - 1]`.
        right: Right-hand side, `[n]`.
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
    """Return the integral of `cos^power θ` over each interval `[start, stop]`."""
    nodes, weights = _nodes()
    middle, half = (start + stop) / 2, (stop - start) / 2
    theta = middle[:, None] + half[:, None] * nodes
    integral: np.ndarray = half * (np.cos(theta) ** power * weights).sum(-1)
    return integral
