"""Rerank: estimate inner products, and the errors of these estimates, from codes.

Source: ParisKV, section B.2.2, equation (10).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.codes import decode


def estimate(
    queries: Tensor, signs: Tensor, magnitudes: Tensor, weights: Tensor, levels: Tensor
) -> Tensor:
    """Estimate `⟨k, q⟩ ≈ ‖q‖ Σ_b w_b ⟨v_b, q̃_b⟩` for candidates.

    Args:
        queries: Rotated queries with their norms, float32 `[B, G, g, D]`.
        signs: Uint8 `[B, G, C, M]`.
        magnitudes: Uint8 `[B, G, C, bits, M]`.
        weights: `[B, G, C, W]`, one for each block of `D / W` coordinates.
        levels: Sizes of the magnitude codes, float32 `[2^bits]`.

    Returns:
        Float32 `[B, G, g, C]`.

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
    """Estimate the standard deviations of the results of `estimate`.

    A block's code differs from the key by an angle `θ` in a uniformly random direction, because of
    the random rotation. So the error has mean 0 and variance `‖k_b‖² tan²θ ‖q_b^⊥‖² / (m - 1)`,
    where `q_b^⊥` is the part of the query that is orthogonal to the key (docs/pipeline/rerank.md).

    Args:
        queries: Rotated queries with their norms, float32 `[B, G, g, D]`.
        signs: Uint8 `[B, G, C, M]`.
        magnitudes: Uint8 `[B, G, C, bits, M]`.
        weights: `[B, G, C, W]`, one for each block of `D / W` coordinates.
        levels: Sizes of the magnitude codes, float32 `[2^bits]`.
        tangent: Mean of `tan² θ` (`codes.tangent`).

    Returns:
        Float32 `[B, G, g, C]`.
    """
    directions = decode(signs, magnitudes, levels)
    block = directions.shape[-1] // weights.shape[-1]
    parts = directions.unfold(-1, block, block)  # [B, G, C, W, block]
    query_parts = queries.unfold(-1, block, block)  # [B, G, g, W, block]
    sizes = parts.square().sum(-1)  # [B, G, C, W]
    along = torch.einsum("bgqwd,bgcwd->bgqcw", query_parts, parts).square() / sizes[:, :, None]
    across = (query_parts.square().sum(-1)[:, :, :, None] - along).clamp_min(0)  # [B, G, g, C, W]
    keys = weights.float().square() * sizes / (1 + tangent)  # ‖k_b‖² of the encoded keys
    variance = (keys[:, :, None] * across).sum(-1) * (tangent / (parts.shape[-1] - 1))
    deviations: Tensor = variance.sqrt()
    return deviations
