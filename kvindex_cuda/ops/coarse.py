"""Coarse stage of a search on the device: a histogram of centroids, lookup tables, and approximate
scores of keys (votes). All results equal those of `kvindex.ops.coarse` bit for bit."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kvindex.ops.coarse import TIERS, ceil_fraction, rounded
from kvindex.ops.codes import FACTOR, SUBSPACE
from kvindex_cuda.runtime.arguments import busy, contiguous_rows, of_shape, of_type, strides
from kvindex_cuda.runtime.launch import launch

__all__ = [
    "TIERS",
    "ceil_fraction",
    "dot_offsets",
    "dot_table",
    "histogram",
    "rounded",
    "tier_table",
    "votes",
]

THREADS, ENTRIES = 256, 2**SUBSPACE

LARGEST_M = 160
"""Most subspaces. A table takes 1 KB of shared memory for each, and compute capability 8.0 has 163
KB."""


def histogram(signs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Count the keys of each centroid, that is, of each sign pattern of 8 coordinates (a subspace).

    Args:
        signs: uint8 `[B, G, N, M]`.
        valid: bool `[B, N]`, or None if all keys are valid.

    Returns:
        Number of keys, int64 `[B, G, M, 256]`.
    """
    B, G, N, M = signs.shape
    signs = contiguous_rows(of_type("signs", signs, torch.uint8), 2, gcd(M, 16))
    if valid is not None:
        valid = contiguous_rows(of_shape("valid", of_type("valid", valid, torch.bool), B, N), 1)
    counts = torch.zeros((B, G, M, ENTRIES), dtype=torch.int64, device=signs.device)
    splits = busy(signs.device, B * G, N, 4096) if N else 0
    launch(
        "ops/coarse.cu",
        "histogram",
        (B * G, splits, -(-M // 32)),
        (THREADS,),
        arguments=dict(
            signs=signs,
            valid=valid,
            counts=counts,
            **strides("signs", signs, "batch", "head"),
            **strides("valid", valid, "batch"),
            n=N,
            kv_heads=G,
        ),
        D=M * SUBSPACE,
    )
    return counts


def tier_table(queries: Tensor, histogram: Tensor, limits: Tensor) -> Tensor:
    """Compute the score of each centroid (a sign pattern of 8 coordinates) for tiered votes, which
    are approximate scores of keys.

    In each subspace `b`, the centroids `c` are sorted by their inner product with the query,
    `⟨q̃_b, c⟩`, best first; of equal products, the lower centroid is first. The score of a centroid
    is the number of tiers `t` for which the centroids before it have fewer than `limits[t]` keys in
    total.

    Args:
        queries: Rotated, float32 `[B, G, g, D]`.
        histogram: Number of keys per centroid, int64 `[B, G, M, 256]`.
        limits: int64 `[B, tiers]`.

    Returns:
        uint8 `[B, G, g, M, 256]`.
    """
    B, G, g, M = _checked(queries)
    of_shape("histogram", of_type("histogram", histogram, torch.int64), B, G, M, ENTRIES)
    of_type("limits", limits, torch.int64)
    points = torch.empty((B, G, g, M, ENTRIES), dtype=torch.uint8, device=queries.device)
    launch(
        "ops/coarse.cu",
        "tier_table",
        (B * G * g * M,),
        (THREADS,),
        arguments=dict(
            queries=queries.contiguous(),
            counts=histogram.contiguous(),
            limits=limits.contiguous(),
            points=points,
            heads=g,
            kv_heads=G,
            tiers=limits.shape[-1],
        ),
        D=M * SUBSPACE,
    )
    return points


def dot_table(queries: Tensor, query_max: int) -> Tensor:
    """Compute the inner products of rounded queries with all sign patterns.

    Entry `c` of subspace `b` is `⟨r_b, s_c⟩`, where `r` is the query rounded to integers
    (`kvindex.ops.coarse.rounded`) and `s_c` is sign pattern `c` (coordinates ±1).

    Args:
        queries: Rotated queries, float32 `[B, G, g, D]`.
        query_max: Largest integer of a rounded query.

    Returns:
        int16 `[B, G, g, M, 256]`.
    """
    B, G, g, M = _checked(queries)
    table = torch.empty((B, G, g, M, ENTRIES), dtype=torch.int16, device=queries.device)
    launch(
        "ops/coarse.cu",
        "dot_table",
        (B * G * g, M),
        (THREADS,),
        arguments=dict(queries=queries.contiguous(), table=table, largest=query_max),
        D=M * SUBSPACE,
    )
    return table


def dot_offsets(
    offsets: Tensor, queries: Tensor, query_max: int, weight_scale: Tensor, level: float
) -> Tensor:
    """Convert the products of queries and block centers to offsets, which are added to the votes
    (approximate scores) of a block's keys.

    The vote of a key `k` estimates `⟨q, k - μ⟩`, where `μ` is the center of its block, in a unit
    that depends on the query (docs/pipeline/coarse.md). This function converts `⟨q, μ⟩` to the same
    unit and rounds it to an integer. Results are limited to ±2^30, so that no sum overflows.

    Args:
        offsets: `⟨q, μ⟩` of each block, float32 `[B, G, g, S]`.
        queries: Rotated, with their norms, float32 `[B, G, g, D]`.
        query_max: As for `dot_table`.
        weight_scale: An upper bound of the weights, float32 `[B, G]`.
        level: Mean absolute coordinate of a random unit vector, the level of codes without
            magnitude bits.

    Returns:
        int32 `[B, G, g, S]`.
    """
    B, G, g, M = _checked(queries)
    S = offsets.shape[-1]
    of_shape("offsets", of_type("offsets", offsets, torch.float32), B, G, g, S)
    of_shape("weight_scale", of_type("weight_scale", weight_scale, torch.float32), B, G)
    out = torch.empty(offsets.shape, dtype=torch.int32, device=offsets.device)
    launch(
        "ops/coarse.cu",
        "dot_offsets",
        (B * G * g, busy(offsets.device, B * G * g, S, 1024) if S else 0),
        (THREADS,),
        arguments=dict(
            offsets=offsets.contiguous(),
            queries=queries.contiguous(),
            weight_scale=weight_scale.contiguous(),
            votes=out,
            segments=S,
            heads=g,
            scale=query_max * FACTOR,
            level=level,
        ),
        D=M * SUBSPACE,
    )
    return out


def votes(
    signs: Tensor,
    table: Tensor,
    factors: Tensor | None = None,
    offsets: Tensor | None = None,
    every: int = 1,
) -> Tensor:
    """Compute votes, the approximate scores of keys: look up the table entries of each key, and add
    them up over the subspaces.

    Args:
        signs: uint8 `[B, G, N, M]`.
        table: uint8 or int16 `[B, G, g, M, 256]`.
        factors: int32 `[B, G, N, M]` to multiply each table entry of a key, `[B, G, N, 1]` to
            multiply the sum of a key's entries, or None.
        offsets: int32 `[B, G, g, S]`, or None. Offset `s` is added to the votes of keys `s · every`
            to `(s + 1) · every - 1`.
        every: Number of consecutive keys that have the same offset.

    Returns:
        int32 `[B, G, g, N]`.
    """
    B, G, N, M = signs.shape
    g = table.shape[2]
    if not 1 <= M <= LARGEST_M:
        raise ValueError(f"signs: got M = {M} subspaces, allowed are 1 to {LARGEST_M}")
    signs = contiguous_rows(of_type("signs", signs, torch.uint8), 2, gcd(M, 16))
    of_type("table", table, torch.uint8, torch.int16)
    table = contiguous_rows(of_shape("table", table, B, G, g, M, ENTRIES), 5, 8)
    kind, segments = 0, 0
    if factors is not None:
        kind = 1 if factors.shape[-1] == 1 else 2
        of_type("factors", factors, torch.int32)
        factors = of_shape("factors", factors, B, G, N, M if kind == 2 else 1).contiguous()
    if offsets is not None:
        segments = offsets.shape[-1]
        of_type("offsets", offsets, torch.int32)
        offsets = of_shape("offsets", offsets, B, G, g, segments).contiguous()
        if segments * every < N:
            raise ValueError(
                f"offsets: got {segments} offsets for {every} keys each, but there are {N} keys"
            )
    wide = table.dtype == torch.int16
    words = 2 if wide and M <= 48 else 1  # words of shared memory per entry, 96 KB in total at most
    total = torch.empty((B, G, g, N), dtype=torch.int32, device=signs.device)
    launch(
        "ops/coarse.cu",
        "votes",
        (B * G, busy(signs.device, B * G, N, 4096) if N and g else 0),
        (THREADS,),
        arguments=dict(
            signs=signs,
            table=table,
            factors=factors,
            offsets=offsets,
            votes=total,
            **strides("signs", signs, "batch", "head"),
            n=N,
            heads=g,
            kv_heads=G,
            segments=segments,
            every=every,
        ),
        shared_bytes=words * M * ENTRIES * 4,
        D=M * SUBSPACE,
        WIDE=int(wide),
        FACTORS=kind,
        TABLES=words,
    )
    return total


def _checked(queries: Tensor) -> tuple[int, int, int, int]:
    """Return the sizes `B, G, g, M` of queries `[B, G, g, D]`. Raises ValueError for a wrong dtype
    or dimension."""
    B, G, g, D = of_type("queries", queries, torch.float32).shape
    if D % SUBSPACE:
        raise ValueError(f"queries: got D = {D}, allowed is a multiple of {SUBSPACE}")
    return B, G, g, D // SUBSPACE
