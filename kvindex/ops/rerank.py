"""Rerank: inner products and their errors, estimated from codes (paper, B.2.2, equation 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.codes import decode


def estimate(
    queries: Tensor, signs: Tensor, magnitudes: Tensor, weights: Tensor, levels: Tensor
) -> Tensor:
    """`⟨k, q⟩ ≈ ‖q‖ Σ_b w_b ⟨v_b, q̃_b⟩` (10), float32 `[B, G, g, C]`.

    queries: rotated, with their norms, float32 `[B, G, g, D]`;
    signs uint8 `[B, G, C, M]`, magnitudes uint8 `[B, G, C, bits, M]`, weights `[B, G, C, W]`, one
    for each block of `D / W` coordinates: the codes of `C` keys; levels: float32 `[2^bits]`.
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
    """Standard deviations of `estimate`, float32 `[B, G, g, C]`, from the same arguments.

    A block's code deviates by an angle whose direction a random rotation makes uniform, so that
    the error has mean 0 and variance `‖k_b‖² tan²θ ‖q_b^⊥‖² / (m - 1)`, `q_b^⊥` the query's part
    across the key (docs/pipeline/rerank.md). tangent: the mean of `tan² θ` (`codes.tangent`).
    """
    directions = decode(signs, magnitudes, levels)
    block = directions.shape[-1] // weights.shape[-1]
    parts = directions.unfold(-1, block, block)  # [B, G, C, W, block]
    query_parts = queries.unfold(-1, block, block)  # [B, G, g, W, block]
    sizes = parts.square().sum(-1)  # [B, G, C, W]
    along = torch.einsum("bgqwd,bgcwd->bgqcw", query_parts, parts).square() / sizes[:, :, None]
    across = (query_parts.square().sum(-1)[:, :, :, None] - along).clamp_min(0)  # [B, G, g, C, W]
    keys = weights.float().square() * sizes / (1 + tangent)  # ‖k_b‖² of what is coded
    variance = (keys[:, :, None] * across).sum(-1) * (tangent / (parts.shape[-1] - 1))
    deviations: Tensor = variance.sqrt()
    return deviations
