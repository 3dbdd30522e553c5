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
    """Inputs of a decode step: the codes and rows of one layer, for `N` tokens in `S` blocks.

    Attributes:
        codes: Blocks of codes, uint8 `[B, S, G, head_bytes]` (`block_layout`).
        rows: Blocks of rows (keys and values), uint8 `[B, S, G, 256, row_bytes]`.
        valid: Mask of valid tokens as bits, int32 `[B, S, 8]` (`block_layout.words_of`).
        length: Number of tokens `N`, int64 `[1]`, or `[B]` if sequences have different lengths.
        wanted: Number of candidates `C` of each sequence, int32 `[B]`.
        counted: Number of valid keys of each sequence, int32 `[B]`.
        weight_scale: Power of two above all weights of a KV head, float32 `[B, G]`.
        resident: Rows (keys and values) of the sink and the local window, `[B, G, W, D + Dv]`.
        resident_mask: Uint8 `[B, W]`, 0 for a resident row that attention ignores.
        resident_count: Number of resident rows in use, at most `W`, int64 `[1]` or `[B]` as
            `length`.
        codec: Codec of the rows in blocks: "plain", "int8" or "fp8" (`storage/codecs.py`).
        row_center: Vector that was subtracted from the keys of rows before the codec compressed
            them, float32 `[B, G, D]`, or None if none was.
        regression: Matrix `Aᵀ` of `sign_regression.fit`, float16 `[B, G, D, D]`, or None.
        histogram: Number of keys per centroid, int64 `[B, G, M, 256]`; None unless the option
            `coarse` is "tiered_votes".
        tiers: Cumulative number of keys up to each tier (`ParisKVConfig.tier_bounds`), int64
            `[B, 6]`; None unless the option `coarse` is "tiered_votes".
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
        """Number of candidates of each sequence, int64 `[B, 1]`: `wanted`, but at most the number
        of valid keys.
        """
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
        policy: The option `group`: how the scores of the query heads of a KV head are combined.
        sampled: True if candidates and rows are sampled (`kvindex.ops.priority`).
        tempered: True if the log weights of sampled rows are multiplied by `priority.temper(k)`,
            which is below 1.
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

        It is `query_max`, or less if coarse scores (votes) would not fit in 32 bits.
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
        """Mean absolute value of a coordinate, float32 `[]`.

        The coarse stage of a search reads only the signs of a key's coordinates, and uses this
        number as the absolute value of every coordinate.
        """
        return torch.tensor(codes.lloyd_max(self._block, 0)[0], device=self.geometry.device)

    @cached_property
    def factors(self) -> Tensor:
        """Table of integers that represent the weights of keys, int32 `[256]`.

        The code of a key contains the logarithm of its weight, as a number of 16 bits. The upper 8
        bits determine an entry of this table (`codes.factors`). The entry is proportional to the
        weight. The coarse score (vote) of the key is multiplied by it.
        """
        return codes.log_factors(16, self.geometry.device)

    @property
    def _block(self) -> int:
        """Number of coordinates of a key for which its code stores one common weight."""
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

    Scaled numbers fit in float16.
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
    """Compute the inverse of `operands_of`: add its float16 summands, and divide by `ups`.

    Returns the queries, float32 `[B, G, g, D]`.
    """
    return operands.float().sum(-1) / ups[..., None]


# An entry combines the coarse score (vote) and the token id of a key in one int64. A larger vote
# gives a larger entry. Of keys with equal votes, the one with the lower id has the larger entry.
# Kernels store an entry as an unsigned integer whose highest bit is inverted.


def entry_of(votes: Tensor, ids: Tensor) -> Tensor:
    """Combine each coarse score (vote, int32) with a token id into one int64, called an entry.

    The vote `LEAST` of padded tokens gives `EMPTY`.
    """
    entries = votes.long() << 32 | (0xFFFFFFFF - ids)
    return entries.masked_fill(votes == LEAST, EMPTY)


def vote_of(entries: Tensor) -> Tensor:
    """Extract the coarse scores (votes), int64, from entries (results of `entry_of`)."""
    return entries >> 32


def id_of(entries: Tensor) -> Tensor:
    """Extract the token ids, int64, from entries (results of `entry_of`).

    The result is -1 for `EMPTY`.
    """
    return torch.where(entries == EMPTY, -1, 0xFFFFFFFF - (entries & 0xFFFFFFFF))


def descending(entries: Tensor, chosen: Tensor) -> Tensor:
    """Sort the entries where `chosen` is True, best first, and drop all other entries.

    An entry is a coarse score and a token id in one int64. Entries are sorted along the last
    dimension. Where fewer entries are chosen than elsewhere, `EMPTY` fills the rest.
    """
    ordered = torch.where(chosen, entries, EMPTY).sort(dim=-1, descending=True).values
    return ordered[..., : int(chosen.sum(-1).max())]


# Histograms


def bin_of(votes: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Return the histogram bin to which each coarse score (vote) of a key belongs.

    The histogram has `BINS` bins of equal width. Scores outside of all bins belong to the first or
    the last bin.

    Args:
        votes: Integer scores of keys, `[..., N]`.
        base: Lowest score in the first bin, int32 `[...]`.
        shift: Base-2 logarithm of the width of a bin, int32 `[...]`.
    """
    above = (votes.long() - base[..., None].long()).clamp_min(0)
    return (above >> shift[..., None].long()).clamp_max(BINS - 1)


def cut_of(histogram: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Find the histogram bin that contains the `wanted`-th largest of all numbers.

    Args:
        histogram: How many numbers each bin contains, `[..., bins]`.
        wanted: Rank of the number to find, counted from 1 for the largest, int64 `[...]`.

    Returns:
        The bin, and how many numbers all higher bins contain. If the histogram contains fewer than
        `wanted` numbers: -1, and how many numbers it contains.
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
    """Add up the exponentials of the chosen logits `[..., C]` as integers, in `BUCKETS` sums.

    Integer sums do not depend on the order of addition. Each sum (bucket) is for exponentials of
    one order of magnitude. The integers in bucket `i` have the unit
    `2^(OCTAVES (i - BUCKETS / 2) - BELOW)`.

    Returns:
        The sums, int64 `[..., BUCKETS]`.
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

    Without sampling, the candidates are the `C` keys with the best coarse scores (votes). A
    histogram counts the votes, and the bin that contains the `C`-th best vote is the threshold bin.
    The rerank processes all keys in this bin, so it may process more than `C` keys. A later stage
    drops the surplus keys.

    If candidates are sampled at random, there is no threshold bin. In this case, `cuts` contains
    thresholds of the keys' priorities, and `buckets` contains sums over all candidates. In these
    sums, each candidate is weighted by one over its sampling probability.

    Attributes:
        candidates: Entries (vote and token id) of all keys in the threshold bin and in higher bins,
            int64 `[B, G, K]`.
        candidate_counts: Number of candidates, int32 `[B, G]`.
        estimates: Estimates of `q·k` for the candidates, float32 `[B, G, K, g]`.
        buckets: Sums of exponentials over the keys in bins above the threshold bin, int64 `[B, G,
            g, BUCKETS]` (`buckets_of`).
        edge: Entries of the keys in the threshold bin, int64 `[B, G, E]`.
        edge_estimates: Estimates of `q·k` for these keys, float32 `[B, G, E, g]`.
        edge_counts: Number of keys in the threshold bin, int32 `[B, G]`.
        cuts: Number of the threshold bin, and number of keys in higher bins, int32 `[B, G, 2]`; -1
            and 0 if all keys of the candidate list are candidates.
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
        """Create a `Reranked` from sorted candidates, their estimates and their histogram bins."""
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
