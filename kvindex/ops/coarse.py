"""Coarse stage: votes of keys, as the paper's tiered votes or as inner products with signs.

For each subspace, a table made for the query assigns points to all 256 centroids. The vote of a key
is the sum, over subspaces, of the points of its centroids. Votes are integers, so every
implementation computes the same votes from the same tables, bit by bit.

Source: ParisKV, section B.2.1 (tiered votes).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kvindex.ops.codes import FACTOR, SUBSPACE, TINY, centroids

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
"""Fractions of the `ρn` best keys at which the tiers end.

The values are those of the published code; the paper has 6 tiers (section 5.4).
"""


def ceil_fraction(count: int, *shares: float) -> int:
    """Return `⌈count · fraction · …⌉`, with each fraction taken as a decimal number.

    In binary floating point 100 · 0.07 is a little above 7, so its ceiling would be 8.

    Args:
        count: Number of keys.
        *shares: Fractions that are multiplied with the count.
    """
    share = _product(*shares)
    return -(-count * share.numerator // share.denominator)


@lru_cache
def _product(*fractions: float) -> Fraction:
    """Return the product of fractions as decimals, cached because every search has the same few."""
    return prod((Fraction(str(fraction)) for fraction in fractions), start=Fraction(1))


def histogram(signs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Count the keys of each centroid.

    Args:
        signs: Centroid ids, uint8 `[B, G, N, M]`.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Int64 `[B, G, M, 256]`.
    """
    B, G, N, M = signs.shape
    counted = torch.ones((B, N), dtype=torch.int64, device=signs.device)
    if valid is not None:
        counted = valid.long()
    bins = torch.zeros((B, G, M, 2**SUBSPACE), dtype=torch.int64, device=signs.device)
    amount = counted[:, None, None, :].expand(B, G, M, N)
    return bins.scatter_add_(-1, signs.long().transpose(2, 3), amount)


def tier_table(queries: Tensor, histogram: Tensor, limits: Tensor) -> Tensor:
    """Give points to each centroid by the paper's tiers.

    In each subspace the centroids are sorted by `⟨q̃_b, c⟩`, best first, equal ones by the lower id.
    A centroid earns one point for each tier `t` for which fewer than `limits[t]` keys belong to
    better centroids.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        histogram: Keys per centroid, int64 `[B, G, M, 256]`.
        limits: Bounds of the tiers in keys, int64 `[B, tiers]`.

    Returns:
        Uint8 `[B, G, g, M, 256]`.

    Source: ParisKV, section B.2.1.
    """
    parts = queries.reshape(*queries.shape[:-1], -1, SUBSPACE)  # [B, G, g, M, m]
    signs = centroids(queries.device).sign().double()  # ±1, in float64: sums and ties are exact
    similarity = parts.double() @ signs.T  # [B, G, g, M, 256]
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    counts = histogram[:, :, None].expand_as(order).gather(-1, order)
    better = counts.cumsum(-1) - counts  # keys in strictly better centroids
    points = (better[..., None] < limits[:, None, None, None, None]).sum(-1, dtype=torch.uint8)
    return torch.empty_like(points).scatter_(-1, order, points)


def rounded(queries: Tensor, query_max: int) -> Tensor:
    """Round queries to integers, so that each query's largest coordinate is `query_max`.

    Halves are rounded to even. The product is computed in float64, so scaling a query by a power of
    two changes nothing. A zero query gives zeros.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        query_max: Largest coordinate, 1 to 127.

    Returns:
        Int8 `[B, G, g, D]`.
    """
    exact = queries.double()
    peak = exact.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, query_max / peak, 0.0)
    return (exact * factor).round().to(torch.int8)


def dot_table(queries: Tensor, query_max: int) -> Tensor:
    """Compute inner products of rounded queries with all sign patterns.

    Entry `c` of subspace `b` is `⟨r_b, s_c⟩`, with `r` from `rounded` and `s_c = ±1`. A sum over
    subspaces is one inner product of signs with small integers, which matrix units can compute.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        query_max: Largest coordinate of a rounded query, 1 to 127.

    Returns:
        Int16 `[B, G, g, M, 256]`.
    """
    parts = rounded(queries, query_max).reshape(*queries.shape[:-1], -1, SUBSPACE)
    # float32 holds these integers, below 2^10, exactly
    return (parts.float() @ centroids(queries.device).sign().T).to(torch.int16)


def dot_offsets(
    offsets: Tensor, queries: Tensor, query_max: int, weight_scale: Tensor, level: float
) -> Tensor:
    """Convert `⟨q, μ⟩` to the vote that a block's center `μ` adds to each key of the block.

    A key's vote represents `level · w_b ⟨q̃_b, s_c⟩`, summed over subspaces. This is the regression
    of `⟨q, k - μ⟩` on the signs (docs/pipeline/coarse.md). The inner product that one vote
    represents follows from `rounded` and `codes.log_factors`. Offsets are bounded by ±2^30, so that
    no sum overflows.

    Args:
        offsets: Inner products `⟨q, μ⟩`, float32 `[B, G, g, S]`.
        queries: Rotated queries with their norms, float32 `[B, G, g, D]`.
        query_max: Largest coordinate of a rounded query, as for the table.
        weight_scale: A power of two above all weights, float32 `[B, G]`.
        level: `E|u_j|`, the size that a sign alone represents (the level for 0 magnitude bits).

    Returns:
        Int32 `[B, G, g, S]`.
    """
    peak = queries.double().abs().amax(-1, keepdim=True)  # [B, G, g, 1]
    unit = peak * level * weight_scale[..., None, None].double() / (query_max * FACTOR)
    ratio = torch.where(unit > 0, offsets.double() / unit.clamp_min(TINY), 0.0)
    return ratio.round().clamp(-(2**30), 2**30).int()


def votes(
    signs: Tensor,
    table: Tensor,
    factors: Tensor | None = None,
    offsets: Tensor | None = None,
    every: int = 1,
) -> Tensor:
    """Add up each key's table entries over the subspaces.

    Args:
        signs: Centroid ids, uint8 `[B, G, N, M]`.
        table: Points of centroids, uint8 or int16 `[B, G, g, M, 256]`.
        factors: Int32 `[B, G, N, M]` to multiply each entry of a key, `[B, G, N, 1]` to multiply
            the sum of its entries, or None.
        offsets: Int32 `[B, G, g, S]`, or None. `offsets[..., s]` is added to the votes of keys from
            `s · every` to `(s + 1) · every - 1`.
        every: Keys per offset.

    Returns:
        Int32 `[B, G, g, N]`.
    """
    B, G, N, M = signs.shape
    split = factors is not None and factors.shape[-1] > 1
    total = torch.zeros((B, G, table.shape[2], N), dtype=torch.int32, device=signs.device)
    for b in range(M):
        ids = signs[..., b].long()[:, :, None].expand_as(total)
        entries = table[..., b, :].gather(-1, ids)
        total += entries * factors[:, :, None, :, b] if split and factors is not None else entries
    if factors is not None and not split:
        total *= factors[:, :, None, :, 0]
    if offsets is not None:
        total += offsets.repeat_interleave(every, dim=-1)[..., :N]
    return total
