"""What a fused decoding step reads, and how its stages write down a key: an entry.

`decode_step.py` has the stages. Here blocks are tensors; kernels get their addresses, in structs
with the same names.
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
"""Of the histogram of a group's list of votes."""

BUCKETS, OCTAVES, BELOW = 256, 16, 28
"""Sums of exponentials as integers: a bucket holds `OCTAVES`, and `BELOW` bits below its first."""

LEAST = -(2**31)
"""The vote of no key."""

EMPTY = -(2**63)
"""The entry of no key."""

QUERY_LIMIT = 1.8e16
"""A query whose norm reaches this is out of range: `√4096` times `check.LARGEST`."""


@dataclass(frozen=True)
class State:
    """What a step reads of a layer of `N` tokens in `S` blocks.

    codes: blocks uint8 `[B, S, G, head_bytes]` (`block_layout`); rows: uint8 `[B, S, G, 256,
    row_bytes]`; valid: bits of tokens, int32 `[B, S, 8]`; length: int64 `[1]`, `N`, or `[B]`, that
    of each row of the batch; wanted, counted: int32 `[B]`, candidates `C` and valid keys;
    weight_scale: float32 `[B, G]`; resident: rows of sink and window `[B, G, W, D + Dv]`;
    resident_mask: uint8 `[B, W]`; resident_count:
    int64 `[1]`, how many of the `W` there are, or `[B]`, as of `length`; codec: of rows in
    blocks, "plain", "int8" or "fp8" (`storage/codecs.py`); row_center: that they are codes from,
    float32 `[B, G, D]`, or None for zeros; regression: `Aᵀ`, of
    `regression.fit`, float16 `[B, G, D, D]`, where signs vote together. Of tiers
    alone: histogram: keys per centroid, int64 `[B, G, M, 256]`; tiers: keys that bound
    each, int64 `[B, 6]`.
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
        """Of a row in a block."""
        return self.rows.shape[-1]

    @property
    def tokens(self) -> int:
        """`N`."""
        return int(self.length)

    def row(self, b: int) -> State:
        """Row `b` of the batch alone, of its own length."""
        shared = [each for each in ("length", "resident_count") if len(vars(self)[each]) == 1]
        own: dict[str, Any] = {
            name: part[b : b + 1]
            for name, part in vars(self).items()
            if isinstance(part, Tensor) and name not in shared
        }
        return replace(self, **own)

    @property
    def target(self) -> Tensor:
        """Candidates that there are to be, int64 `[B, 1]`."""
        return torch.minimum(self.wanted, self.counted).long()[:, None]

    @property
    def flags(self) -> Tensor:
        """Which tokens are valid, bool `[B, N]`."""
        return flags_of(self.valid, self.tokens)


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What no token and no query changes; kernels are compiled for most of it.

    seed, query_max, policy: as `ParisKVConfig` has them; centered: whether blocks hold centers;
    drawn: whether candidates and rows are drawn (`priority`); tempered: with lower weights.
    """

    geometry: Geometry
    layout: Layout
    seed: int = 0
    query_max: int = 21
    centered: bool = True
    policy: str = "mean_share"
    drawn: bool = False
    tempered: bool = False

    @property
    def largest(self) -> int:
        """Coordinate of a rounded query: votes of `D` of them fit 32 bits."""
        return min(self.query_max, 2**15 // self.geometry.head_dim)

    @cached_property
    def rotation(self) -> Tensor:
        """`R`, float32 `[D, D]`."""
        return transform.rotation(self.geometry.head_dim, self.seed, self.geometry.device)

    @cached_property
    def levels(self) -> Tensor:
        """Magnitudes, float32 `[2^bits]`."""
        return codes.levels(self._block, self.layout.magnitude_bits, self.geometry.device)

    @cached_property
    def level(self) -> Tensor:
        """`E|u_j|`, what a sign alone stands for, float32 `[]`."""
        return torch.tensor(codes.lloyd_max(self._block, 0)[0], device=self.geometry.device)

    @cached_property
    def factors(self) -> Tensor:
        """Of `codes.log_factors`, int32 `[256]`."""
        return codes.log_factors(16, self.geometry.device)

    @property
    def _block(self) -> int:
        """Coordinates that share a weight."""
        subspaces = isinstance(self.layout, SubspaceLayout)
        return SUBSPACE if subspaces else self.geometry.head_dim


# Queries


def rotated(queries: Tensor, config: StepConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated directions float32 `[B, G, g, D]`, norms float32 `[B, G, g]`, and `wrong`.

    wrong: int32 `[]`, 1 where a query `[B, H, D]` is out of range; its direction is zeros.
    """
    folded = group.fold(queries, config.geometry.kv_heads, config.policy)
    finite = folded.double().square().sum(-1).sqrt() < QUERY_LIMIT  # of NaN, too
    directions, norms = transform.normalize(folded.masked_fill(~finite[..., None], 0))
    return transform.rotate(directions, config.rotation), norms, (~finite.all()).int()


def up_of(sizes: Tensor) -> Tensor:
    """Powers of two that bring sizes float32 to `[2^13, 2^14)`, where float16 has room."""
    exponent = torch.frexp(sizes.clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones_like(sizes), 14 - exponent.clamp(-106, 104))


def operands_of(queries: Tensor, ups: Tensor) -> Tensor:
    """Queries times `ups` as two float16, a number and what it leaves: `[B, G, g, D, 2]`.

    Matrix units take them as they are; together they have 22 bits.
    """
    whole = queries * ups[..., None]
    high = whole.half()
    return torch.stack([high, (whole - high.float()).half()], dim=-1)


def queries_of(operands: Tensor, ups: Tensor) -> Tensor:
    """What the operands stand for, float32 `[B, G, g, D]`."""
    return operands.float().sum(-1) / ups[..., None]


# Entries: a vote and an id as one int64, the larger the better, equal votes by the lower id. (In
# kernels an unsigned integer: the same but for its highest bit.)


def entry_of(votes: Tensor, ids: Tensor) -> Tensor:
    """Entries of votes int32 and ids; `EMPTY` of the vote `LEAST`."""
    entries = votes.long() << 32 | (0xFFFFFFFF - ids)
    return entries.masked_fill(votes == LEAST, EMPTY)


def vote_of(entries: Tensor) -> Tensor:
    """The votes of entries, int64."""
    return entries >> 32


def id_of(entries: Tensor) -> Tensor:
    """The ids of entries, int64; -1 of `EMPTY`."""
    return torch.where(entries == EMPTY, -1, 0xFFFFFFFF - (entries & 0xFFFFFFFF))


def descending(entries: Tensor, chosen: Tensor) -> Tensor:
    """The chosen entries, the best first, then `EMPTY`, as wide as the longest row needs."""
    ordered = torch.where(chosen, entries, EMPTY).sort(dim=-1, descending=True).values
    return ordered[..., : int(chosen.sum(-1).max())]


# Histograms


def bin_of(votes: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Bins of votes `[..., N]`, `2^shift` of them from `base` on to each; both int32 `[...]`."""
    above = (votes.long() - base[..., None].long()).clamp_min(0)
    return (above >> shift[..., None].long()).clamp_max(BINS - 1)


def cut_of(histogram: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where a count from the last bin down reaches `wanted`: the bin, and how many are above it.

    histogram: `[..., bins]`; wanted: int64 `[...]`. -1 and the total where it never does.
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
    """Sums of the chosen logits' exponentials, int64 `[..., BUCKETS]`, of logits `[..., C]`.

    Integers, so that the order in which they are added leaves no trace. Bucket `i` counts in units
    of `2^(OCTAVES (i - BUCKETS / 2) - BELOW)`.
    """
    octaves = (logits * math.log2(math.e)).nan_to_num(-2040).clamp(-2040, 2040)
    whole = (octaves / OCTAVES).floor()
    values = (torch.exp2(octaves - OCTAVES * whole) * 2**BELOW).long().masked_fill(~chosen, 0)
    places = (whole.long() + BUCKETS // 2).masked_fill(~chosen, 0)
    sums: Tensor = values.new_zeros((*logits.shape[:-1], BUCKETS))
    return sums.scatter_add_(-1, places, values)


# What reranking writes, of either kind of step


@dataclass(frozen=True)
class Reranked:
    """What `rerank` writes, and `rerank_blocks` together with `candidates`.

    candidates: entries of the best `C`, and of all others in the cut's bin, int64 `[B, G, K]`;
    candidate_counts: how many, int32 `[B, G]`; estimates: theirs, float32 `[B, G, K, g]`; buckets:
    sums over entries above the cut's bin, int64 `[B, G, g, BUCKETS]`; edge: entries in the cut's
    bin, int64 `[B, G, E]`; edge_estimates: theirs, float32 `[B, G, E, g]`; edge_counts: how many,
    int32 `[B, G]`; cuts: the bin and how many are above it, int32 `[B, G, 2]`, -1 and 0 where all
    entries are candidates. Where candidates are drawn, cuts hold `priority.thresholds`; buckets
    sum over all of them, each for the others like it (`1 / π`), and none lies on an edge.
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
        """Of entries `[B, G, K]`, the best first, their estimates and their bins."""
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
