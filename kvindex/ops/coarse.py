"""Coarse stage of a search: compute an approximate score of every key (its votes) from its signs.

The coordinates of a key are divided into subspaces of 8 coordinates. The 8 sign bits of a subspace
form the number of one of 256 centroids. For each query and subspace, a table contains a score of
every centroid. `tier_table` computes this table as in the paper, and `dot_table` computes it as
inner products with the signs. The votes of a key are the sum of the scores of its centroids, one
per subspace. All scores are integers, so all implementations compute exactly the same votes.

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
"""Where the tiers of the paper's votes end, as fractions of the `ρn` best keys (`n` keys in total).

The paper has 6 tiers (section 5.4). The values are those of its published code.
"""


def ceil_fraction(count: int, *fractions: float) -> int:
    """Multiply a count by fractions, in exact decimal arithmetic, and round up.

    In binary floating point, `100 * 0.07` is a little above 7, and would be rounded up to 8 instead
    of 7.

    Args:
        count: Number of keys.
        *fractions: Factors, such as 0.07.
    """
    fraction = _product(*fractions)
    return -(-count * fraction.numerator // fraction.denominator)


@lru_cache
def _product(*fractions: float) -> Fraction:
    """Return the product of decimal fractions.

    It is cached, because all searches use the same fractions.
    """
    return prod((Fraction(str(fraction)) for fraction in fractions), start=Fraction(1))


def histogram(signs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Count how many keys have each of the 256 centroids, for every subspace.

    Args:
        signs: Centroid ids of the keys, uint8 `[B, G, N, M]`.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Numbers of keys, int64 `[B, G, M, 256]`.
    """
    B, G, N, M = signs.shape
    counted = torch.ones((B, N), dtype=torch.int64, device=signs.device)
    if valid is not None:
        counted = valid.long()
    bins = torch.zeros((B, G, M, 2**SUBSPACE), dtype=torch.int64, device=signs.device)
    amount = counted[:, None, None, :].expand(B, G, M, N)
    return bins.scatter_add_(-1, signs.long().transpose(2, 3), amount)


def tier_table(queries: Tensor, histogram: Tensor, limits: Tensor) -> Tensor:
    """Compute a score of each centroid by its rank, as in the paper.

    The centroids of a subspace are ranked by their inner product with the query's coordinates in
    this subspace; ties go to the lower id. For each centroid, the function counts the keys that
    belong to centroids of a better rank. The centroid's score is the number of entries in `limits`
    that are larger than this count.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        histogram: Number of keys of each centroid, int64 `[B, G, M, 256]`.
        limits: Numbers of keys that separate the tiers of the paper, int64 `[B, tiers]`.

    Returns:
        Scores of the centroids, uint8 `[B, G, g, M, 256]`.

    Source: ParisKV, section B.2.1.
    """
    parts = queries.reshape(*queries.shape[:-1], -1, SUBSPACE)  # [B, G, g, M, m]
    signs = centroids(queries.device).sign().double()  # ±1; float64 makes sums and ties exact
    similarity = parts.double() @ signs.T  # [B, G, g, M, 256]
    order = similarity.sort(dim=-1, descending=True, stable=True).indices
    counts = histogram[:, :, None].expand_as(order).gather(-1, order)
    better = counts.cumsum(-1) - counts  # keys in strictly better centroids
    points = (better[..., None] < limits[:, None, None, None, None]).sum(-1, dtype=torch.uint8)
    return torch.empty_like(points).scatter_(-1, order, points)


def rounded(queries: Tensor, query_max: int) -> Tensor:
    """Scale each query so that its largest absolute coordinate is `query_max`, and round it.

    Halves are rounded to even. The computation is in float64, so multiplying a query by a power of
    two does not change the result. A query of zeros gives zeros.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        query_max: Largest absolute coordinate of the result, 1 to 127.

    Returns:
        Rounded queries, int8 `[B, G, g, D]`.
    """
    exact = queries.double()
    peak = exact.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, query_max / peak, 0.0)
    return (exact * factor).round().to(torch.int8)


def dot_table(queries: Tensor, query_max: int) -> Tensor:
    """Compute a score of each centroid: the inner product of its signs and the rounded query.

    A centroid is one of the 256 patterns of 8 signs (±1) in a subspace. Its score is the inner
    product of this pattern and the 8 coordinates of the rounded query in the subspace. So the sum
    of the scores over all subspaces is the inner product of the rounded query and all signs of a
    key. Tensor cores can compute this sum directly, without a table.

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        query_max: Largest absolute coordinate of a rounded query, 1 to 127.

    Returns:
        Scores of the centroids, int16 `[B, G, g, M, 256]`.
    """
    parts = rounded(queries, query_max).reshape(*queries.shape[:-1], -1, SUBSPACE)
    # float32 holds these integers, below 2^10, exactly
    return (parts.float() @ centroids(queries.device).sign().T).to(torch.int16)


def dot_offsets(
    offsets: Tensor, queries: Tensor, query_max: int, weight_scale: Tensor, level: float
) -> Tensor:
    """Convert inner products of queries and block centers to the unit of the coarse scores (votes).

    The keys of a block are encoded relative to the block's center `μ`. So the votes of a key `k`
    for a query `q` only estimate `⟨q, k - μ⟩` (docs/pipeline/coarse.md). This function computes
    `⟨q, μ⟩` in the same unit, to be added to the votes of all keys of the block. The result is
    limited to ±2^30, so that no sum overflows.

    Args:
        offsets: Inner products `⟨q, μ⟩` for `S` blocks, float32 `[B, G, g, S]`.
        queries: Rotated queries that are not normalized, float32 `[B, G, g, D]`.
        query_max: Largest absolute coordinate of a rounded query, as for `dot_table`.
        weight_scale: A power of two above all weights, float32 `[B, G]`.
        level: Mean absolute value of a coordinate of a random unit vector, which a sign represents
            (`codes.levels` with 0 bits).

    Returns:
        Votes, int32 `[B, G, g, S]`.
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
    """Compute the coarse score (votes) of every key.

    A key has one centroid in each subspace, and each centroid has a score. The votes of the key are
    the sum of these scores, multiplied by the key's weight if `factors` is given.

    Args:
        signs: Centroid ids of the keys, uint8 `[B, G, N, M]`.
        table: Scores of the centroids, uint8 or int16 `[B, G, g, M, 256]`.
        factors: Integer weights of the keys, int32, or None. `[B, G, N, M]` has a weight for each
            subspace, `[B, G, N, 1]` one weight for the sum over the subspaces.
        offsets: Votes to add to all keys of a block, int32 `[B, G, g, S]`, or None.
        every: Number of keys per block.

    Returns:
        Votes, int32 `[B, G, g, N]`.
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
