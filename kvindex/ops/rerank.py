"""Rerank: estimate the inner products of queries and candidates, and the errors of the estimates.

Source: ParisKV, section B.2.2, equation (10).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.codes import decode


def estimate(
    queries: Tensor, signs: Tensor, magnitudes: Tensor, weights: Tensor, levels: Tensor
) -> Tensor:
    """Estimate the inner products of queries and encoded keys.

    The coordinates of a key are divided into `W` blocks, and each block has a weight. The estimate
    is the sum over the blocks of `weight · ⟨decoded block of the key, block of the query⟩`.

    Args:
        queries: Rotated queries that are not normalized, float32 `[B, G, g, D]`.
        signs: Codes of `C` candidates, uint8 `[B, G, C, M]`.
        magnitudes: Codes of the candidates, uint8 `[B, G, C, bits, M]`.
        weights: Weights of the candidates, one for each block of `D / W` coordinates, `[B, G, C,
            W]`.
        levels: Levels to which magnitudes were rounded, float32 `[2^bits]`.

    Returns:
        Estimates of `q·k`, float32 `[B, G, g, C]`.

    Source: ParisKV, equation (10).
    """
    directions = decode(signs, magnitudes, levels)  # [B, G, C, D]
    block = directions.shape[-1] // weights.shape[-1]
    keys = directions * weights.float().repeat_interleave(block, dim=-1)
    return queries @ keys.mT


def errors(
    queries: Tensor,
    signs: Tensor,
    magnitudes: Tensor,
    weights: Tensor,
    levels: Tensor,
    tangent: float,
) -> Tensor:
    """Estimate the standard deviation of the error of each result of `estimate`.

    The coordinates are divided into blocks of `m`. Between the decoded block `b` of a key and the
    true block `k_b` is an angle `θ`, in a random direction because of the random rotation. So the
    error of the block has mean 0 and variance `‖k_b‖² tan²θ ‖q_b^⊥‖² / (m - 1)`. Here `q_b^⊥` is
    the component of the query's block that is orthogonal to the key's block
    (docs/pipeline/rerank.md). The function adds up the variances of the blocks.

    Args:
        queries: Rotated queries that are not normalized, float32 `[B, G, g, D]`.
        signs: Codes of `C` candidates, uint8 `[B, G, C, M]`.
        magnitudes: Codes of the candidates, uint8 `[B, G, C, bits, M]`.
        weights: Weights of the candidates, one for each block of `D / W` coordinates, `[B, G, C,
            W]`.
        levels: Levels to which magnitudes were rounded, float32 `[2^bits]`.
        tangent: Mean of `tan² θ` (`codes.tangent`).

    Returns:
        Standard deviations, float32 `[B, G, g, C]`.
    """
    directions = decode(signs, magnitudes, levels)
    block = directions.shape[-1] // weights.shape[-1]
    parts = directions.unfold(-1, block, block)  # [B, G, C, W, block]
    query_parts = queries.unfold(-1, block, block)  # [B, G, g, W, block]
    sizes = parts.square().sum(-1)  # [B, G, C, W]
    along = torch.einsum("bgqwd,bgcwd->bgqcw", query_parts, parts).square() / sizes[:, :, None]
    across = (query_parts.square().sum(-1)[:, :, :, None] - along).clamp_min(0)  # [B, G, g, C, W]
    keys = weights.float().square() * sizes / (1 + tangent)  # ‖k_b‖²
    variance = (keys[:, :, None] * across).sum(-1) * (tangent / (parts.shape[-1] - 1))
    deviations: Tensor = variance.sqrt()
    return deviations
