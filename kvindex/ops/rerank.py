"""Reranking: inner products estimated from 4-bit codes (paper, B.2.2, equation 10)."""

from __future__ import annotations

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
