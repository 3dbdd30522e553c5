"""`Report`: rows read, bytes fetched and memory per tier of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean

from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, Placement, PlacesRows
from kvindex.core.ranks import Ranks
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.parallel import is_sharded, rank


@dataclass(frozen=True)
class Report:
    """Sums and means over the indexed layers of a cache.

    tokens: length of the sequence; layers: layers with an index; steps: queries that
    searched, in the layer with most of them; rows_read, rows_full: rows per searching step and KV
    head that were attended to and that full attention would have read; bytes_fetched: of rows
    that those steps copied out of the stores (steps that attend exactly are not counted);
    nbytes: bytes in use per tier (`codes`, `rows`, `window`; `other` for layers without index);
    coverage: share of the indexes' attention that the rows are believed to hold, mean over layers,
    heads and steps, where `attach` was asked for one; else None; dense_below: below this many
    tokens attention is dense; k: rows per KV head that a step asks for; placement: where the rows
    of all these layers are, and what the cache of rows had, or None where they are in one place
    that nobody caches (`kvindex.core.protocol.Placement`); rank, ranks: which of how many processes
    this is; None: what all of them have together (`over_ranks`). Each has its share of the heads,
    whose bytes fetched are its own, or of the tokens (sharded), where rows and bytes are those of
    all; nbytes and placement are its own in any case; graph: how many single tokens were replays of
    a CUDA graph, and why others were not, or None where `attach` was not asked for one.
    """

    tokens: int
    layers: int
    steps: int
    rows_read: float
    rows_full: float
    bytes_fetched: int
    nbytes: dict[str, int]
    coverage: float | None = None
    dense_below: int = 0
    k: int = 0
    placement: Placement | None = None
    rank: int | None = 0
    ranks: int = 1
    sharded: bool = False
    graph: str | None = None

    def over_ranks(self) -> Report:
        """What the ranks of the default process group report together, the same on each.

        Bytes and rows that are there are summed, rows that a step reads are means, and `graph` is
        rank 0's. A collective: all ranks call it, at the same place. Without a group, or of what is
        summed already: this report. Raises `kvindex.core.ranks.RankError` where a rank does not
        come within 60 s (torch's own error, where the ranks have met for nothing else), and
        ValueError in a process of torchrun that has no group.
        """
        every: list[Report] = [self] if self.rank is None else Ranks.of().gather_object(self)
        if len(every) == 1:
            return self
        first, coverage = every[0], [one.coverage for one in every if one.coverage is not None]
        fetched = [one.bytes_fetched for one in every]
        places = [one.placement for one in every if one.placement is not None]
        return replace(
            first,
            rows_read=fmean(one.rows_read for one in every),
            rows_full=fmean(one.rows_full for one in every),
            bytes_fetched=fetched[0] if self.sharded else sum(fetched),
            nbytes=_summed(one.nbytes for one in every),
            coverage=fmean(coverage) if coverage else None,
            placement=reduce(add, places) if places else None,
            rank=None,
        )

    @property
    def rows_read_fraction(self) -> float:
        """Rows read over rows that full attention would have read; 1 before the first search."""
        return self.rows_read / self.rows_full if self.rows_full else 1.0

    @property
    def read(self) -> str:
        """One line on what the searching steps have read, or why none has searched."""
        if self.steps:
            return (
                f"{self.steps} searching steps read {self.rows_read:.0f} of {self.rows_full:.0f} "
                f"rows per KV head ({self.rows_read_fraction:.1%}) and fetched "
                f"{self.bytes_fetched / 2**20:.1f} MiB"
            )
        if self.tokens < self.dense_below:
            return f"shorter than {self.dense_below} tokens: attention was dense"
        return "no step has searched: attention was dense"

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in self.nbytes.items())
        which = "all" if self.rank is None else f"rank {self.rank} of"
        of_rank = f" of {which} {self.ranks}" if self.ranks > 1 else ""
        return (
            f"{self.tokens} tokens in {self.layers} indexed layers; {self.read}; "
            f"memory{of_rank}: {tiers or 'none'}"
            + (f"; k {self.k}, rows: {self.placement}" if self.placement else "")
            + (f"; {self.graph}" if self.graph else "")
        )


def sum_up(layers: Sequence[AttentionLayer], indexed: int, other: int | None = None) -> Report:
    """Add up the reports of the layers that store tokens.

    This only reads counters, so any thread may call it while another thread runs a step.

    Args:
        layers: The layers with an index that store tokens.
        indexed: Number of layers with an index, with or without tokens.
        other: Bytes of the layers without an index, or None if there are none.
    """
    traffic = [layer.traffic for layer in layers]
    place, ranks = rank()
    steps = sum(part.steps for part in traffic)
    covered = steps > 0 and any(layer.coverage is not None for layer in layers)
    nbytes = _summed(layer.nbytes() for layer in layers)
    if other is not None:
        nbytes["other"] = other
    return Report(
        tokens=max((layer.tokens for layer in layers), default=0),
        layers=indexed,
        dense_below=max((layer.dense_below for layer in layers), default=0),
        steps=max((part.steps for part in traffic), default=0),
        rows_read=float(sum(float(part.rows_read) for part in traffic)) / max(steps, 1),
        rows_full=float(sum(float(part.rows_full) for part in traffic)) / max(steps, 1),
        bytes_fetched=int(sum(float(part.bytes_fetched) for part in traffic)),
        nbytes=nbytes,
        coverage=float(sum(float(part.coverage) for part in traffic)) / steps if covered else None,
        k=max((layer.k for layer in layers), default=0),
        placement=_together([layer.index for layer in layers]),
        rank=place,
        ranks=ranks,
        sharded=any(is_sharded(layer.index) for layer in layers),
    )


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by tier."""
    sums: dict[str, int] = {}
    for part in parts:
        for tier, size in part.items():
            sums[tier] = sums.get(tier, 0) + size
    return sums


def _together(indexes: Sequence[KVIndex]) -> Placement | None:
    """Where the rows of some indexes are, which keep them alike."""
    placed = [index for each in indexes if (index := capability(each, PlacesRows)) is not None]
    return reduce(add, [index.placement() for index in placed]) if placed else None
