"""Inputs of the fused decode step, and helpers that several of its stages share.

`decode_step.py` has the stages. Kernels have structs with the same names as the classes here. The
classes contain blocks as tensors, and the structs contain the addresses of the blocks.
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
"""Number of bins in the histogram of votes."""

BUCKETS, OCTAVES, BELOW = 256, 16, 28
"""Constants of `buckets_of`, which sums exponentials as integers.

There are `BUCKETS` buckets for numbers of different size. A bucket is for the numbers between two
powers of two that differ by a factor `2^OCTAVES`. The unit of its integers is the smaller of these
powers divided by `2^BELOW`.
"""

LEAST = -(2**31)
"""Vote of a padded token."""

EMPTY = -(2**63)
"""Entry (vote and token id) that marks an unused place of a list."""

QUERY_LIMIT = 1.8e16
"""Queries with a norm of at least this value are out of range: `√4096` times `check.LARGEST`."""


@dataclass(frozen=True)
class State:
    """Inputs of a decode step: the codes and rows of one layer, `N` tokens in `S` blocks.

    Attributes:
        codes: Blocks of codes, uint8 `[B, S, G, head_bytes]` (`block_layout`).
        rows: Blocks of rows (keys and values), uint8 `[B, S, G, 256, row_bytes]`.
        valid: Mask of valid tokens as bits, int32 `[B, S, 8]` (`block_layout.words_of`).
        length: Number of tokens `N`, int64 `[1]`, or `[B]` if sequences have different lengths.
        wanted: Number of candidates `C` of each sequence, int32 `[B]`.
        counted: Number of valid keys of each sequence, int32 `[B]`.
        weight_scale: Power of two above all weights of a KV head, float32 `[B, G]`.
        resident: Rows in the sink and the local window, `[B, G, W, D + Dv]`.
        resident_mask: Uint8 `[B, W]`, 0 for a resident row that attention ignores.
        resident_count: Number of resident rows in use, at most `W`, int64 `[1]` or `[B]` as
            `length`.
        codec: Codec of the rows in blocks: "plain", "int8" or "fp8" (`storage/codecs.py`).
        row_center: Vector that was subtracted from the keys of rows before the codec compressed
            them, float32 `[B, G, D]`, or None if none was.
        regression: Matrix `Aᵀ` of `sign_regression.fit`, float16 `[B, G, D, D]`, or None.
        histogram: Number of keys per centroid, int64 `[B, G, M, 256]`; None unless votes are
            tiered.
        tiers: Cumulative number of keys up to each tier, int64 `[B, 6]`; None unless votes are
            tiered.
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
        """Bytes of one row: a token's key and value for one KV head, as the codec stores them."""
        return self.rows.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens `N`."""
        return int(self.length)

    def row(self, b: int) -> State:
        """Return the inputs of sequence `b` alone, as a batch of one sequence."""
        shared = [each for each in ("length", "resident_count") if len(vars(self)[each]) == 1]
        own: dict[str, Any] = {
            name: part[b : b + 1]
            for name, part in vars(self).items()
            if isinstance(part, Tensor) and name not in shared
        }
        return replace(self, **own)

    @property
    def target(self) -> Tensor:
        """Number of candidates: `wanted`, but at most the number of valid keys, int64 `[B, 1]`."""
        return torch.minimum(self.wanted, self.counted).long()[:, None]

    @property
    def flags(self) -> Tensor:
        """True for valid tokens, bool `[B, N]`."""
        return flags_of(self.valid, self.tokens)


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Constants of a decode step. Kernels are compiled for most of these values.

    Attributes:
        geometry: Sizes of heads and vectors.
        layout: Memory layout of codes.
        seed: The option `seed`, from which the rotation and the samples are generated.
        query_max: The option `query_max`: largest coordinate of a query rounded to integers.
        centered: True if the mean key of a block is subtracted from its keys.
        policy: The option `group`: how the query heads of a group combine their scores.
        sampled: True if candidates and rows are sampled (`kvindex.ops.priority`).
        tempered: True if the log weights of sampled rows are reduced (`priority.temper`).
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
        """Largest coordinate of a query rounded to integers.

        It is `query_max`, or less if votes would not fit in 32 bits.
        """
        return min(self.query_max, 2**15 // self.geometry.head_dim)

    @cached_property
    def rotation(self) -> Tensor:
        """Rotation matrix of keys and queries, float32 `[D, D]`."""
        return transform.rotation(self.geometry.head_dim, self.seed, self.geometry.device)

    @cached_property
    def levels(self) -> Tensor:
        """Absolute value of a coordinate for each magnitude code, float32 `[2^bits]`."""
        return codes.levels(self._block, self.layout.magnitude_bits, self.geometry.device)

    @cached_property
    def level(self) -> Tensor:
        """Mean absolute value of a coordinate of which only the sign is known, float32 `[]`."""
        return torch.tensor(codes.lloyd_max(self._block, 0)[0], device=self.geometry.device)

    @cached_property
    def factors(self) -> Tensor:
        """The integer that multiplies a key's vote, for each of the 256 codes of a weight, int32
        `[256]`.
        """
        return codes.log_factors(16, self.geometry.device)

    @property
    def _block(self) -> int:
        """Number of coordinates of a key that share a weight."""
        subspaces = isinstance(self.layout, SubspaceLayout)
        return SUBSPACE if subspaces else self.geometry.head_dim


# Queries


def rotated(queries: Tensor, config: StepConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize and rotate queries `[B, H, D]`, and check their range.

    A query is out of range if it is not finite or if its norm reaches `QUERY_LIMIT`.

    Returns:
        Rotated unit vectors float32 `[B, G, g, D]`, zeros for a query out of range; norms of the
        queries float32 `[B, G, g]`; and an int32 `[]` that is 1 if any query is out of range.
    """
    folded = group.fold(queries, config.geometry.kv_heads, config.policy)
    finite = folded.double().square().sum(-1).sqrt() < QUERY_LIMIT  # False for NaN, too
    directions, norms = transform.normalize(folded.masked_fill(~finite[..., None], 0))
    return transform.rotate(directions, config.rotation), norms, (~finite.all()).int()


def up_of(sizes: Tensor) -> Tensor:
    """Return powers of two that scale positive float32 numbers to `[2^13, 2^14)`.

    Numbers of this size fit in float16.
    """
    exponent = torch.frexp(sizes.clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones_like(sizes), 14 - exponent.clamp(-106, 104))


def operands_of(queries: Tensor, ups: Tensor) -> Tensor:
    """Split each coordinate of `queries * ups` into two float16 summands, `[B, G, g, D, 2]`.

    The second number is the rounding error of the first. Their sum has a precision of 22 bits, and
    tensor cores can multiply both numbers without conversion.
    """
    whole = queries * ups[..., None]
    high = whole.half()
    return torch.stack([high, (whole - high.float()).half()], dim=-1)


def queries_of(operands: Tensor, ups: Tensor) -> Tensor:
    """Recover the queries, float32 `[B, G, g, D]`, from the float16 summands of `operands_of`."""
    return operands.float().sum(-1) / ups[..., None]


# An entry combines a key's vote and its token id in one int64. A larger vote gives a larger entry.
# Of keys with equal votes, the one with the lower id has the larger entry. Kernels store an entry
# as an unsigned integer whose highest bit is inverted.


def entry_of(votes: Tensor, ids: Tensor) -> Tensor:
    """Combine each vote (int32) with a token id into one int64 number, called an entry.

    The vote `LEAST` of padded tokens gives `EMPTY`.
    """
    entries = votes.long() << 32 | (0xFFFFFFFF - ids)
    return entries.masked_fill(votes == LEAST, EMPTY)


def vote_of(entries: Tensor) -> Tensor:
    """Extract the votes, int64, from entries (a vote and a token id each)."""
    return entries >> 32


def id_of(entries: Tensor) -> Tensor:
    """Extract the token ids, int64, from entries (a vote and a token id each); -1 for `EMPTY`."""
    return torch.where(entries == EMPTY, -1, 0xFFFFFFFF - (entries & 0xFFFFFFFF))


def descending(entries: Tensor, chosen: Tensor) -> Tensor:
    """Sort the entries where `chosen` is True, best first, and drop all others.

    Lists of different lengths are padded with `EMPTY` to the longest.
    """
    ordered = torch.where(chosen, entries, EMPTY).sort(dim=-1, descending=True).values
    return ordered[..., : int(chosen.sum(-1).max())]


# Histograms


def bin_of(votes: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Return the bin of each vote `[..., N]` in a histogram of `BINS` bins.

    A bin covers `2^shift` consecutive votes, and the first bin begins at the vote `base`. Both
    `shift` and `base` are int32 `[...]`.
    """
    above = (votes.long() - base[..., None].long()).clamp_min(0)
    return (above >> shift[..., None].long()).clamp_max(BINS - 1)


def cut_of(histogram: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bin that contains the `wanted`-th largest vote.

    Args:
        histogram: Number of votes in each bin, `[..., bins]`.
        wanted: Rank of the vote, counted from 1 for the largest, int64 `[...]`.

    Returns:
        The bin and the number of votes in all higher bins. If the histogram has fewer than `wanted`
        votes, -1 and the number of all votes.
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
    """Sum the exponentials of the chosen logits `[..., C]` as integers, int64 `[..., BUCKETS]`.

    Integer sums do not depend on the order of addition. Exponentials of different size go to
    different buckets: the unit of bucket `i` is `2^(OCTAVES (i - BUCKETS / 2) - BELOW)`.
    """
    octaves = (logits * math.log2(math.e)).nan_to_num(-2040).clamp(-2040, 2040)
    whole = (octaves / OCTAVES).floor()
    values = (torch.exp2(octaves - OCTAVES * whole) * 2**BELOW).long().masked_fill(~chosen, 0)
    places = (whole.long() + BUCKETS // 2).masked_fill(~chosen, 0)
    sums: Tensor = values.new_zeros((*logits.shape[:-1], BUCKETS))
    return sums.scatter_add_(-1, places, values)


# Results of the rerank, which are the same for `coarse="sign_votes"` and `coarse="tiered_votes"`


@dataclass(frozen=True)
class Reranked:
    """Results of the rerank: candidates and their estimated inner products with the query.

    The cut bin is the bin of the histogram that contains the `C`-th best vote, where `C` is the
    number of candidates. All keys in that bin are reranked, and a later stage drops the surplus.
    With sampling there is no cut bin: `cuts` contains the thresholds of priorities, and `buckets`
    contains sums over all candidates, each weighted by one over its sampling probability.

    Attributes:
        candidates: Entries of all keys in the cut bin and in higher bins, int64 `[B, G, K]`.
        candidate_counts: Number of candidates, int32 `[B, G]`.
        estimates: Estimates of `q·k` for the candidates, float32 `[B, G, K, g]`.
        buckets: Sums of exponentials over the keys in bins above the cut bin, int64 `[B, G, g,
            BUCKETS]` (`buckets_of`).
        edge: Entries of the keys in the cut bin, int64 `[B, G, E]`.
        edge_estimates: Estimates of `q·k` for the keys in the cut bin, float32 `[B, G, E, g]`.
        edge_counts: Number of keys in the cut bin, int32 `[B, G]`.
        cuts: Number of the cut bin, and number of keys in higher bins, int32 `[B, G, 2]`; -1 and 0
            if all listed keys are candidates.
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
        """Build the results from sorted candidates, their estimates and their histogram bins."""
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
