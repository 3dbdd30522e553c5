"""Inputs of a fused decode step, and entries: one integer for a key's vote and id.

The stages are in `decode_step.py`. Here blocks are tensors. Kernels get the addresses of the blocks
instead, in structs with the same names as the classes here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.ops import attention, codes, group, transform
from kvindex.ops.codes import SUBSPACE
from kvindex.pariskv.block_layout import Layout, SubspaceLayout, flags_of

BINS = 2048
"""Bins of the histogram of listed votes."""

BUCKETS, OCTAVES, BELOW = 256, 16, 28
"""Exponentials are summed as integers, in `BUCKETS` buckets for different magnitudes.

A bucket spans `OCTAVES` powers of two, and its integers have `BELOW` more bits below the first one.
"""

LEAST = -(2**31)
"""Vote of a padded token."""

EMPTY = -(2**63)
"""Entry of an unused place."""

QUERY_LIMIT = 1.8e16
"""A query whose norm reaches this is out of range: `√4096` times `check.LARGEST`."""


@dataclass(frozen=True)
class State:
    """Inputs of a decode step: one layer of `N` tokens in `S` blocks.

    Attributes:
        codes: Blocks of codes, uint8 `[B, S, G, head_bytes]` (`block_layout`).
        rows: Blocks of rows, uint8 `[B, S, G, 256, row_bytes]`.
        valid: Bits of valid tokens, int32 `[B, S, 8]`.
        length: Number of tokens `N`, int64 `[1]`, or `[B]` where sequences differ.
        wanted: Number of candidates `C` of each sequence, int32 `[B]`.
        counted: Number of valid keys of each sequence, int32 `[B]`.
        weight_scale: Unit of votes, float32 `[B, G]`.
        resident: Rows in the sink and the window, `[B, G, W, D + Dv]`.
        resident_mask: Uint8 `[B, W]`, 0 for a row that is hidden.
        resident_count: How many of the `W` rows are used, int64, of the shape of `length`.
        codec: Codec of the rows in blocks: "plain", "int8" or "fp8" (`storage/codecs.py`).
        row_center: Center that was subtracted from rows before they were coded, float32
            `[B, G, D]`, or None for zeros.
        regression: `Aᵀ` of `sign_regression.fit`, float16 `[B, G, D, D]`, or None.
        histogram: Keys per centroid, int64 `[B, G, M, 256]`, only for tiered votes.
        tiers: Bounds of the tiers in keys, int64 `[B, 6]`, only for tiered votes.
    """

    codes: Tensor
    rows: Tensor
    valid: Tensor
    length: Tensor
    wanted: Tensor
    counted: Tensor
    weight_scale: Tensor
    resident: Tensor
    resident_mask: Tensor
    resident_count: Tensor
    codec: str = "plain"
    row_center: Tensor | None = None
    regression: Tensor | None = None
    histogram: Tensor | None = None
    tiers: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.rows.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens `N`."""
        return int(self.length)

    def row(self, b: int) -> State:
        """Return the state of sequence `b` alone, with its own length."""
        shared = [each for each in ("length", "resident_count") if len(vars(self)[each]) == 1]
        own: dict[str, Any] = {
            name: part[b : b + 1]
            for name, part in vars(self).items()
            if isinstance(part, Tensor) and name not in shared
        }
        return replace(self, **own)

    @property
    def target(self) -> Tensor:
        """Number of candidates, at most the number of valid keys, int64 `[B, 1]`."""
        return torch.minimum(self.wanted, self.counted).long()[:, None]

    @property
    def flags(self) -> Tensor:
        """True for valid tokens, bool `[B, N]`."""
        return flags_of(self.valid, self.tokens)


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Constants of a step. Kernels are compiled for most of them.

    Attributes:
        geometry: Sizes of heads and vectors.
        layout: Memory layout of codes.
        seed: Seed of the rotation, as in `ParisKVConfig`.
        query_max: Largest coordinate of a rounded query, as in `ParisKVConfig`.
        centered: True if blocks have centers.
        policy: How the heads of a group combine their scores (`ParisKVConfig.group`).
        sampled: True if candidates and rows are sampled (`kvindex.ops.priority`).
        tempered: True if sampled rows have lower weights (`priority.temper`).
    """

    geometry: Geometry
    layout: Layout
    seed: int = 0
    query_max: int = 21
    centered: bool = True
    policy: str = "mean_share"
    sampled: bool = False
    tempered: bool = False

    @property
    def largest(self) -> int:
        """Largest coordinate of a rounded query for which votes fit in 32 bits."""
        return min(self.query_max, 2**15 // self.geometry.head_dim)

    @cached_property
    def rotation(self) -> Tensor:
        """The rotation `R`, float32 `[D, D]`."""
        return transform.rotation(self.geometry.head_dim, self.seed, self.geometry.device)

    @cached_property
    def levels(self) -> Tensor:
        """Sizes of the magnitude codes, float32 `[2^bits]`."""
        return codes.levels(self._block, self.layout.magnitude_bits, self.geometry.device)

    @cached_property
    def level(self) -> Tensor:
        """`E|u_j|`, the size that a sign alone represents, float32 `[]`."""
        return torch.tensor(codes.lloyd_max(self._block, 0)[0], device=self.geometry.device)

    @cached_property
    def factors(self) -> Tensor:
        """Integer factors of logarithmic weights, int32 `[256]` (`codes.log_factors`)."""
        return codes.log_factors(16, self.geometry.device)

    @property
    def _block(self) -> int:
        """Number of coordinates that share a weight."""
        subspaces = isinstance(self.layout, SubspaceLayout)
        return SUBSPACE if subspaces else self.geometry.head_dim


# Queries


def rotated(queries: Tensor, config: StepConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries `[B, H, D]`, and find those that are out of range.

    Returns:
        Directions float32 `[B, G, g, D]`, zeros for a query out of range, norms float32 `[B, G,
        g]`, and an int32 `[]` that is 1 if any query is out of range.
    """
    folded = group.fold(queries, config.geometry.kv_heads, config.policy)
    finite = folded.double().square().sum(-1).sqrt() < QUERY_LIMIT  # False for NaN, too
    directions, norms = transform.normalize(folded.masked_fill(~finite[..., None], 0))
    return transform.rotate(directions, config.rotation), norms, (~finite.all()).int()


def up_of(sizes: Tensor) -> Tensor:
    """Return powers of two that scale sizes float32 into `[2^13, 2^14)`, the range of float16."""
    exponent = torch.frexp(sizes.clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones_like(sizes), 14 - exponent.clamp(-106, 104))


def operands_of(queries: Tensor, ups: Tensor) -> Tensor:
    """Split queries times `ups` into two float16 numbers, `[B, G, g, D, 2]`.

    The second number is the rounding error of the first. Together they have a precision of 22 bits,
    and tensor cores can multiply them without conversion.
    """
    whole = queries * ups[..., None]
    high = whole.half()
    return torch.stack([high, (whole - high.float()).half()], dim=-1)


def queries_of(operands: Tensor, ups: Tensor) -> Tensor:
    """Return the queries that operands represent, float32 `[B, G, g, D]`."""
    return operands.float().sum(-1) / ups[..., None]


# An entry is a vote and an id in one int64. A better key has a larger entry; of keys with equal
# votes, the one with the lower id has the larger entry. Kernels store an entry as an unsigned
# integer whose highest bit is inverted.


def entry_of(votes: Tensor, ids: Tensor) -> Tensor:
    """Return the entries of votes int32 and ids; `EMPTY` for the vote `LEAST`."""
    entries = votes.long() << 32 | (0xFFFFFFFF - ids)
    return entries.masked_fill(votes == LEAST, EMPTY)


def vote_of(entries: Tensor) -> Tensor:
    """Return the votes of entries, int64."""
    return entries >> 32


def id_of(entries: Tensor) -> Tensor:
    """Return the ids of entries, int64; -1 for `EMPTY`."""
    return torch.where(entries == EMPTY, -1, 0xFFFFFFFF - (entries & 0xFFFFFFFF))


def descending(entries: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen entries, best first, padded with `EMPTY` to the longest list's length."""
    ordered = torch.where(chosen, entries, EMPTY).sort(dim=-1, descending=True).values
    return ordered[..., : int(chosen.sum(-1).max())]


# Histograms


def bin_of(votes: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Return the histogram bins of votes `[..., N]`.

    A bin is `2^shift` votes wide, and the first bin begins at the vote `base`. Both `shift` and
    `base` are int32 `[...]`.
    """
    above = (votes.long() - base[..., None].long()).clamp_min(0)
    return (above >> shift[..., None].long()).clamp_max(BINS - 1)


def cut_of(histogram: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bin at which the count of votes, from the last bin downwards, reaches `wanted`.

    Args:
        histogram: Counts, `[..., bins]`.
        wanted: Int64 `[...]`.

    Returns:
        The bin and the number of votes in higher bins; -1 and the total where the count never
        reaches `wanted`.
    """
    counts = histogram.long().flip(-1)
    up_to = counts.cumsum(-1)
    reached = (up_to >= wanted[..., None]) & (wanted[..., None] > 0)
    first = reached.int().argmax(-1)
    above = (up_to - counts).gather(-1, first[..., None])[..., 0]
    some = reached.any(-1)
    last = counts.shape[-1] - 1
    return torch.where(some, last - first, -1), torch.where(some, above, up_to[..., -1])


def buckets_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """Sum the exponentials of the chosen logits `[..., C]`, int64 `[..., BUCKETS]`.

    The sums are of integers, so they do not depend on the order of addition. Bucket `i` counts in
    units of `2^(OCTAVES (i - BUCKETS / 2) - BELOW)`.
    """
    octaves = (logits * math.log2(math.e)).nan_to_num(-2040).clamp(-2040, 2040)
    whole = (octaves / OCTAVES).floor()
    values = (torch.exp2(octaves - OCTAVES * whole) * 2**BELOW).long().masked_fill(~chosen, 0)
    places = (whole.long() + BUCKETS // 2).masked_fill(~chosen, 0)
    sums: Tensor = values.new_zeros((*logits.shape[:-1], BUCKETS))
    return sums.scatter_add_(-1, places, values)


# Results of the rerank, for sign votes and for tiered votes


@dataclass(frozen=True)
class Reranked:
    """Results of `rerank`, or of `tiered_votes.candidates` and `rerank_blocks` together.

    The cut is the histogram bin that contains the `C`-th best vote. The entries in that bin are the
    edge entries. With sampling, `cuts` contains the thresholds of priorities, `buckets` contains
    sums over all candidates with weight `1 / π`, and there are no edge entries.

    Attributes:
        candidates: Entries of the best `C` keys and of all others in the cut's bin, int64 `[B, G,
            K]`.
        candidate_counts: Number of candidates, int32 `[B, G]`.
        estimates: Estimates of `q·k` for the candidates, float32 `[B, G, K, g]`.
        buckets: Sums of exponentials over entries above the cut's bin, int64 `[B, G, g, BUCKETS]`.
        edge: Entries in the cut's bin, int64 `[B, G, E]`.
        edge_estimates: Estimates of `q·k` for the edge entries, float32 `[B, G, E, g]`.
        edge_counts: Number of edge entries, int32 `[B, G]`.
        cuts: The cut's bin and the number of entries above it, int32 `[B, G, 2]`; -1 and 0 where
            all entries are candidates.
    """

    candidates: Tensor
    candidate_counts: Tensor
    estimates: Tensor
    buckets: Tensor
    edge: Tensor
    edge_estimates: Tensor
    edge_counts: Tensor
    cuts: Tensor

    @staticmethod
    def of(
        candidates: Tensor, estimates: Tensor, bins: Tensor, cuts: Tensor, config: StepConfig
    ) -> Reranked:
        """Build the results from sorted entries `[B, G, K]`, their estimates and their bins."""
        g, real = config.geometry, candidates != EMPTY
        estimates = estimates.masked_fill(~real[..., None], attention.NEVER)
        logits = attention.cap(estimates, g.scale, g.softcap).mT
        on_edge = real & (bins == cuts[..., :1])
        edge = descending(candidates, on_edge)
        places = (~on_edge).int().argsort(dim=-1, stable=True)[..., : edge.shape[-1]]
        spread = places[..., None].expand(*places.shape, estimates.shape[-1])
        none = (edge == EMPTY)[..., None]
        above = (real & ~on_edge)[:, :, None].expand_as(logits)
        return Reranked(
            candidates=candidates,
            candidate_counts=real.sum(-1, dtype=torch.int32),
            estimates=estimates,
            buckets=buckets_of(logits, above),
            edge=edge,
            edge_estimates=estimates.gather(2, spread).masked_fill(none, attention.NEVER),
            edge_counts=on_edge.sum(-1, dtype=torch.int32),
            cuts=cuts,
        )
