"""`Report`: states how many rows decode steps have read from a cache, and how much memory the cache
uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean

import torch

from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, Placement, PlacesRows
from kvindex.core.protocol.results import MOST_FOUND
from kvindex.core.ranks import Ranks
from kvindex.layer import AttentionLayer
from kvindex.layer.output_scale import FEWEST
from kvindex.layer.stats import Traffic
from kvindex_adapters.common.parallel import is_sharded, rank
from kvindex_adapters.common.speculation import Acceptance


@dataclass(frozen=True)
class RowsFound:
    """How many rows searches have returned per KV head, if each search chooses their number.

    Args:
        mean: Mean over layers, KV heads and steps.
        p99: 99th percentile.
        by_layer: Mean of each layer that has searched, in the order of the layers.
        ceiling: Fraction of KV heads and steps with the largest number of rows. Their expected
            error may be above the allowed one.
    """

    mean: float
    p99: int
    by_layer: tuple[float, ...]
    ceiling: float = 0.0

    def __str__(self) -> str:
        low, high = min(self.by_layer), max(self.by_layer)
        most = f"; {self.ceiling:.1%} took as many as k allows" if self.ceiling else ""
        return (
            f"searches found {self.mean:.0f} rows per KV head on average ({low:.0f} to {high:.0f} "
            f"by layer), and {self.p99} at the 99th percentile{most}"
        )


@dataclass(frozen=True)
class Report:
    """Rows read, bytes fetched and memory of a cache, over all layers with an index.

    A row is one token's key and value. With several processes, each process reports on its own
    heads. If the processes shard tokens, each process reports the rows and bytes of all processes.
    Memory and placement are always those of one process.

    Args:
        tokens: Length of the sequence.
        layers: Number of layers with an index.
        steps: Number of decode steps that searched an index (in the layer with the most such
            steps).
        rows_read: Rows per KV head that a decode step with a search attended to. Mean over layers
            and steps.
        rows_full: Rows per KV head that full attention would have read in the same steps. Mean over
            layers and steps.
        bytes_fetched: Bytes of rows that searches copied from the stores. Steps with full attention
            are not counted.
        nbytes: Bytes in use by kind: `codes`, `rows`, `window`, and `other` for layers without an
            index.
        plain_nbytes: Bytes that a plain cache, without indexes, would use for the same tokens in
            the same dtype. With processes that shard tokens, this is the whole sequence. 0 without
            tokens and for `attach_batch`.
        indexed: Number of tokens in the index (of the layer with the most such tokens). None for
            `attach_batch`.
        coverage: Estimated fraction of the attention weight of all indexed rows that the retrieved
            rows have. Mean over layers, heads and steps. None if `attach` was called without
            `coverage`.
        dense_below: Sequences with fewer tokens use full attention.
        measuring: Whether decode steps use full attention because `k="auto"` or `error=…` needs the
            outputs of more tokens.
        k: Number of rows that a step retrieves per KV head, or the largest number with `k="auto"`.
        rows_found: How many rows searches have returned with `k="auto"` or `error=…`, otherwise
            None. From one process, if there are several.
        placement: Where rows are stored, and the hit rate of the GPU's row cache. None if all rows
            are in one place without a row cache.
        rank: Rank of this process, or None for the sum over all processes (`over_ranks`).
        ranks: Number of processes.
        sharded: Whether the processes shard tokens instead of heads.
        prefill_fraction: Fraction of the blocks of keys that sparse attention of prompts has read,
            of those that full attention reads. Mean over layers. None if no block was sparse.
        graph: How many decode steps were replays of a CUDA graph, and why others were not. None
            with `attach(token_graph=False)`.
        acceptance: How many drafted tokens were accepted, or None if no call has speculated.
    """

    tokens: int
    layers: int
    steps: int
    rows_read: float
    rows_full: float
    bytes_fetched: int
    nbytes: dict[str, int]
    plain_nbytes: int = 0
    indexed: int | None = None
    coverage: float | None = None
    dense_below: int = 0
    measuring: bool = False
    k: int = 0
    rows_found: RowsFound | None = None
    placement: Placement | None = None
    rank: int | None = 0
    ranks: int = 1
    sharded: bool = False
    prefill_fraction: float | None = None
    graph: str | None = None
    acceptance: Acceptance | None = None

    def over_ranks(self) -> Report:
        """Add up the reports of all ranks of the default process group.

        All ranks must call this method at the same point. Memory and placement are summed. Fetched
        bytes and the bytes of a plain cache are summed if heads are sharded. Rows per step and
        coverage are means. `graph` is taken from rank 0.

        Returns:
            The summed report, equal on all ranks. Without a process group, or for a report that is
            already summed, the report itself.

        Raises:
            RankError: A rank has not called this method within 60 s. If the ranks have not
                communicated before, an error of torch is raised instead.
            ValueError: torchrun has started this process, but there is no process group.
        """
        every: list[Report] = [self] if self.rank is None else Ranks.of().gather_object(self)
        if len(every) == 1:
            return self
        first, coverage = every[0], [one.coverage for one in every if one.coverage is not None]
        fetched = [one.bytes_fetched for one in every]
        plain = [one.plain_nbytes for one in every]
        places = [one.placement for one in every if one.placement is not None]
        return replace(
            first,
            rows_read=fmean(one.rows_read for one in every),
            rows_full=fmean(one.rows_full for one in every),
            bytes_fetched=fetched[0] if self.sharded else sum(fetched),
            nbytes=_summed(one.nbytes for one in every),
            plain_nbytes=plain[0] if self.sharded else sum(plain),
            coverage=fmean(coverage) if coverage else None,
            placement=reduce(add, places) if places else None,
            rank=None,
        )

    @property
    def rows_read_fraction(self) -> float:
        """Rows read, divided by the rows that full attention would have read. 1 before the first
        search."""
        return self.rows_read / self.rows_full if self.rows_full else 1.0

    @property
    def read(self) -> str:
        """One line that says how many rows decode steps have read, or why no step has searched."""
        if self.steps:
            return (
                f"{self.steps} searching steps read {self.rows_read:.0f} of {self.rows_full:.0f} "
                f"rows per KV head ({self.rows_read_fraction:.1%}) and fetched "
                f"{self.bytes_fetched / 2**20:.1f} MiB"
            )
        if self.tokens < self.dense_below:
            return f"shorter than {self.dense_below} tokens: attention was dense"
        if self.tokens and self.indexed == 0:
            return (
                "the indexes are still empty, because all tokens are in sink, local_window or "
                "waiting for update_every: attention was dense"
            )
        if self.measuring:
            return (
                f"k='auto' or error= needs the outputs of {FEWEST} tokens before a step searches, "
                "and fewer have been measured (in a short text, or after loading a cache that was "
                "saved without this option): attention was dense"
            )
        if not self.indexed:
            return "no step has searched"
        return (
            "no step has searched: the cache contains a prompt, or answers whose steps this report "
            "does not count (of a branch that was undone, or before the cache was saved)"
        )

    @property
    def _limit(self) -> str:
        return f"k up to {self.k}" if self.rows_found else f"k {self.k}"

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in self.nbytes.items())
        plain = f" (a plain cache: {self.plain_nbytes / 2**20:.1f} MiB)"
        which = "all" if self.rank is None else f"rank {self.rank} of"
        of_rank = f" of {which} {self.ranks}" if self.ranks > 1 else ""
        return (
            f"{self.tokens} tokens in {self.layers} indexed layers; {self.read}; "
            f"memory{of_rank}: {tiers or 'none'}"
            + (plain if self.plain_nbytes else "")
            + (f"; {self.rows_found}" if self.rows_found else "")
            + (f"; {self._limit}, rows: {self.placement}" if self.placement else "")
            + (
                ""
                if self.prefill_fraction is None
                else f"; prompts read {self.prefill_fraction:.0%} of the blocks of keys"
            )
            + (f"; {self.graph}" if self.graph else "")
            + (f"; {self.acceptance}" if self.acceptance else "")
        )


def sum_up(layers: Sequence[AttentionLayer], indexed: int, other: int | None = None) -> Report:
    """Make the report of a cache from the counters of its layers.

    This only reads counters, so any thread may call it while another thread runs the model.

    Args:
        layers: The layers with an index and with tokens.
        indexed: Number of all layers with an index, including empty ones.
        other: Bytes of the layers without an index, or None if all layers have an index.
    """
    traffic = [layer.traffic for layer in layers]
    place, ranks = rank()
    steps = sum(part.steps for part in traffic)
    covered = steps > 0 and any(layer.coverage is not None for layer in layers)
    nbytes = _summed(layer.nbytes() for layer in layers)
    sparse = [part for layer in layers if (part := layer.prefill_fraction) is not None]
    if other is not None:
        nbytes["other"] = other
    return Report(
        tokens=max((layer.tokens for layer in layers), default=0),
        layers=indexed,
        dense_below=max((layer.dense_below for layer in layers), default=0),
        measuring=any(layer.measuring for layer in layers),
        steps=max((part.steps for part in traffic), default=0),
        rows_read=float(sum(float(part.rows_read) for part in traffic)) / max(steps, 1),
        rows_full=float(sum(float(part.rows_full) for part in traffic)) / max(steps, 1),
        bytes_fetched=int(sum(float(part.bytes_fetched) for part in traffic)),
        nbytes=nbytes,
        plain_nbytes=sum(map(_plain_nbytes, layers)) + (other or 0),
        indexed=max((len(layer.index) for layer in layers), default=0),
        coverage=float(sum(float(part.coverage) for part in traffic)) / steps if covered else None,
        k=max((layer.k for layer in layers), default=0),
        rows_found=rows_found(traffic, max((layer.k for layer in layers), default=0)),
        placement=_together([layer.index for layer in layers]),
        prefill_fraction=fmean(sparse) if sparse else None,
        rank=place,
        ranks=ranks,
        sharded=any(is_sharded(layer.index) for layer in layers),
    )


def rows_found(traffic: Iterable[Traffic], most: int) -> RowsFound | None:
    """Sum up how many rows searches have returned, or return None if this was not counted.

    Numbers above 1,024 are counted as 1,024, so the result is also None if `most` is above.

    Args:
        traffic: The counts of each layer.
        most: Largest number of rows that a search may return.
    """
    counted = [part.found.cpu() for part in traffic if part.found is not None]
    counted = [found for found in counted if found.any()]
    if not counted or most > MOST_FOUND:
        return None
    rows = torch.arange(len(counted[0]))
    total = torch.stack(counted).sum(0)
    reached = (total.cumsum(0) >= 0.99 * total.sum()).int().argmax()
    means = tuple(float(found @ rows) / int(found.sum()) for found in counted)
    searches = int(total.sum())
    ceiling = int(total[most:].sum()) / searches
    return RowsFound(float(total @ rows) / searches, int(reached), means, ceiling)


def _plain_nbytes(layer: AttentionLayer) -> int:
    """Return the bytes of the keys and values of all tokens, in the dtype of the layer.

    In latent attention, values are parts of the keys, so only the keys are counted.
    """
    g = layer.index.geometry
    width = g.head_dim if g.value_in_key else g.head_dim + g.value_dim
    return layer.batch_size * layer.tokens * g.kv_heads * width * g.dtype.itemsize


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up dictionaries that map each kind of memory to a number of bytes."""
    sums: dict[str, int] = {}
    for part in parts:
        for tier, size in part.items():
            sums[tier] = sums.get(tier, 0) + size
    return sums


def _together(indexes: Sequence[KVIndex]) -> Placement | None:
    """Add up how many rows several indexes store in each kind of memory.

    Return None if no index reports this.
    """
    placed = [index for each in indexes if (index := capability(each, PlacesRows)) is not None]
    return reduce(add, [index.placement() for index in placed]) if placed else None
