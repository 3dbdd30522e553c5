"""Coarse stage: multi-tier collision voting on centroid ids (paper, B.2.1), or signed dots.

A key collects points in every subspace from a table of 256 entries, one per centroid, which the
query sets. Votes are integers: given the same tables, every implementation agrees to the
bit.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kvindex.ops.codes import FACTOR, SUBSPACE, TINY, centroids

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
"""Fractions of the `ρn` best keys that bound the tiers (as published; 6 tiers: section 5.4)."""


def ceil_share(count: int, *shares: float) -> int:
    """`⌈count · share · …⌉` with each share read as the decimal that it is written as.

    In binary floating point 100 · .07 is a little above 7 and its ceiling is 8.
    """
    share = _product(*shares)
    return -(-count * share.numerator // share.denominator)


@lru_cache
def _product(*fractions: float) -> Fraction:
    """The product of shares as decimals; cached, as every search has the same few."""
    return prod((Fraction(str(fraction)) for fraction in fractions), start=Fraction(1))


def histogram(signs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Keys per centroid, int64 `[B, G, M, 256]`.

    signs: uint8 `[B, G, N, M]`; valid: bool `[B, N]`, or None for all.
    """
    B, G, N, M = signs.shape
    counted = torch.ones((B, N), dtype=torch.int64, device=signs.device)
    if valid is not None:
        counted = valid.long()
    bins = torch.zeros((B, G, M, 2**SUBSPACE), dtype=torch.int64, device=signs.device)
    amount = counted[:, None, None, :].expand(B, G, M, N)
    return bins.scatter_add_(-1, signs.long().transpose(2, 3), amount)


def tier_table(queries: Tensor, histogram: Tensor, limits: Tensor) -> Tensor:
    """Points that each centroid earns, uint8 `[B, G, g, M, 256]`.

    In each subspace the centroids are ordered by `⟨q̃_b, c⟩`, best first, equal ones by the lower
    id. A centroid earns one point for each tier `t` with fewer than `limits[t]` keys in better
    centroids.

    queries: rotated, float32 `[B, G, g, D]`; histogram: int64 `[B, G, M, 256]`;
    limits: int64 `[B, tiers]`.
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
    """Queries as integers, int8 `[B, G, g, D]`: each query's largest coordinate is `query_max`.

    Rounded half to even. Multiplied in float64, so that scaling a query by a power of two changes
    nothing. A zero query gives zeros.

    queries: rotated, float32 `[B, G, g, D]`; query_max: 1 to 127.
    """
    exact = queries.double()
    peak = exact.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, query_max / peak, 0.0)
    return (exact * factor).round().to(torch.int8)


def dot_table(queries: Tensor, query_max: int) -> Tensor:
    """Inner products of rounded queries with the sign patterns, int16 `[B, G, g, M, 256]`.

    Entry `c` of subspace `b` is `⟨r_b, s_c⟩` with `r` from `rounded` and `s_c = ±1`, so that a sum
    over subspaces is one inner product of signs with small integers: what matrix units compute.

    queries, query_max: as for `rounded`.
    """
    parts = rounded(queries, query_max).reshape(*queries.shape[:-1], -1, SUBSPACE)
    # float32 holds these integers, below 2^10, exactly
    return (parts.float() @ centroids(queries.device).sign().T).to(torch.int16)


def dot_offsets(
    offsets: Tensor, queries: Tensor, query_max: int, weight_scale: Tensor, level: float
) -> Tensor:
    """Votes that `⟨q, μ⟩` of a block's center adds to each of its keys, int32 `[B, G, g, S]`.

    A vote with factors represents `level · w_b ⟨q̃_b, s_c⟩` summed over subspaces, the regression
    of `⟨q, k - μ⟩` on the signs (docs/pipeline/coarse.md), on the scale of `rounded` and of
    `codes.log_factors`. Bounded by ±2^30, so that no sum overflows.

    offsets: float32 `[B, G, g, S]`; queries: rotated, with their norms, float32 `[B, G, g, D]`;
    query_max: as for the table; weight_scale: above the weights, float32 `[B, G]`; level: `E|u_j|`,
    the one level of 0 magnitude bits.
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
    """Table entries of each key summed over subspaces, int32 `[B, G, g, N]`.

    signs: uint8 `[B, G, N, M]`; table: uint8 or int16 `[B, G, g, M, 256]`; factors: int32
    `[B, G, N, M]` for the entries of a key, or `[B, G, N, 1]` for their sum, or None; offsets:
    int32 `[B, G, g, S]`, added to the votes of each `every` keys, or None.
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
