"""Rerank on the device: estimate inner products of keys and queries from codes (ParisKV paper,
B.2.2, equation 10)."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kvindex_cuda.runtime.arguments import CODES, busy, contiguous_rows, of_shape, of_type
from kvindex_cuda.runtime.launch import launch

THREADS = 256

HEADS = 8
"""Number of query heads for which a thread sums at a time. With more, no registers would be left
for the codes."""

LARGEST_D = 768
"""Largest `D` for which the queries of 8 heads, with a sum of squares per block, fit into 48 KB of
shared memory."""


def estimate(
    queries: Tensor, signs: Tensor, magnitudes: Tensor, weights: Tensor, levels: Tensor
) -> Tensor:
    """Estimate inner products of keys and queries from the codes of the keys.

    Equation 10 of ParisKV: `⟨k, q⟩ ≈ ‖q‖ Σ_b w_b ⟨v_b, q̃_b⟩`, a sum over blocks `b` of coordinates.
    The code of a key consists of a weight `w_b` and a direction `v_b` (signs and magnitudes) for
    each block. `q̃` is the query divided by its norm.

    Args:
        queries: Rotated but not normalized, float32 `[B, G, g, D]`.
        signs: Signs of `C` keys, uint8 `[B, G, C, M]`.
        magnitudes: Magnitudes of these keys, uint8 `[B, G, C, bits, M]`.
        weights: Weights of these keys, `[B, G, C, W]`, one for each block of `D / W` coordinates.
        levels: float32 `[2^bits]`.

    Returns:
        float32 `[B, G, g, C]`, summed in float32.
    """
    return _run("estimate", queries, signs, magnitudes, weights, levels)


def errors(
    queries: Tensor,
    signs: Tensor,
    magnitudes: Tensor,
    weights: Tensor,
    levels: Tensor,
    tangent: float,
) -> Tensor:
    """Estimate the standard deviation of the error of each inner product that `estimate` returns.

    The first five arguments are those of `estimate`. The argument `tangent` is the mean of
    `tan² θ`, where `θ` is the angle between a key and its decoded code (`kvindex.ops.codes`).
    Returns float32 `[B, G, g, C]`.
    """
    block = queries.shape[-1] // weights.shape[-1]
    scale = dict(share=1 + tangent, spread=tangent / (block - 1))
    return _run("errors", queries, signs, magnitudes, weights, levels, **scale)


def _run(
    name: str,
    queries: Tensor,
    signs: Tensor,
    magnitudes: Tensor,
    weights: Tensor,
    levels: Tensor,
    **scale: float,
) -> Tensor:
    B, G, g, D = of_type("queries", queries, torch.float32).shape
    C, bits, W = signs.shape[2], magnitudes.shape[3], weights.shape[-1]
    if D % 8 or not 8 <= D <= LARGEST_D:
        raise ValueError(f"queries: got D = {D}, allowed are multiples of 8 up to {LARGEST_D}")
    if bits > 7:
        raise ValueError(f"magnitudes: got {bits} bits, allowed are 0 to 7")
    if W == 0 or D % W:
        raise ValueError(f"weights: got {W} weights per key, allowed is a divisor of D = {D}")
    of_shape("signs", of_type("signs", signs, torch.uint8), B, G, C, D // 8)
    of_type("magnitudes", magnitudes, torch.uint8)
    of_shape("magnitudes", magnitudes, B, G, C, bits, D // 8)
    of_shape("weights", weights, B, G, C, W)
    of_shape("levels", of_type("levels", levels, torch.float32), 2**bits)
    if weights.dtype not in CODES:
        weights = weights.float()
    aligned = gcd(D // 8, 16)
    out = torch.empty((B, G, g, C), device=queries.device)
    heads = min(g, HEADS)
    launch(
        "ops/rerank.cu",
        name,
        (B * G, busy(queries.device, B * G, C, THREADS) if C else 0, -(-g // HEADS)),
        (THREADS,),
        arguments=dict(
            {"estimates" if name == "estimate" else name: out},
            queries=queries.contiguous(),
            signs=contiguous_rows(signs, 4, aligned),
            magnitudes=contiguous_rows(magnitudes, 5, aligned),
            weights=weights.contiguous(),
            levels=levels.contiguous(),
            n=C,
            heads=g,
            **scale,
        ),
        D=D,
        BITS=bits,
        HEADS=heads,
        BLOCK=D // W,
        DTYPE=CODES[weights.dtype],
    )
    return out
