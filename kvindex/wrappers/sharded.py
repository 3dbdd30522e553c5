"""Sharded: each process stores and searches some of the tokens (sequence parallelism).

Each process (rank) attends to the rows that it stores, and the outputs are merged exactly by their
log-sum-exp. So the ranks need no common list of rows, and a decode step needs one all-gather.
docs/distributed.md lists the costs.

Source: Milakov and Gimelshein, Online Normalizer Calculation for Softmax (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    UNUSED,
    AppendsAsync,
    Attended,
    Attends,
    CapturesStep,
    CountsTokens,
    ExpandsBatch,
    Hits,
    KVIndex,
    ReportsCoverage,
    ReportsRecipe,
    Rows,
    RunsOps,
    SearchesShard,
    WeighsRows,
)
from kvindex.core.ranks import TIMEOUT_S, Ranks
from kvindex.core.resident import ResidentRows
from kvindex.core.version import __version__
from kvindex.ops import group as groups
from kvindex.storage.recipe import class_name
from kvindex.wrappers.sharded_base import ShardedTokens

ROWS = ("own", "best")
NEVER = float("-inf")


class Sharded(ShardedTokens):
    """Distributes tokens over the ranks of a process group, `block` tokens to each rank in turn.

    Token ids are positions in the whole sequence. All ranks must make the same calls with the same
    tensors, and they get the same results. Only `nbytes`, `placement` and `state_dict` describe the
    wrapped index of this rank alone. An index that learns parameters learns them from the tokens of
    its rank.

    A search selects `k` rows from the tokens of all ranks, in one of three ways:

    - If the wrapped index samples rows, each of `W` ranks samples `k / W` rows.
    - Otherwise, if the wrapped index offers `SearchesShard`, the search returns the same rows as a
      search in a single process.
    - Otherwise each rank proposes `k` rows, and the search returns the best of these by exact
      scores (group policy "mean_share").

    Args:
        inner: Empty index for this rank's tokens.
        block: Number of consecutive tokens that one rank stores. The next rank stores the next
            `block` tokens.
        rows: Which rows a decode step attends to. "own": each rank attends to `k` rows of its own
            tokens (the best, or a sample), and the outputs are merged. "best": all ranks together
            attend to the `k` rows that `search` returns.
        timeout_s: Seconds after which the other ranks raise an error if a rank does not answer.
        group: Process group of `torch.distributed`. None: the default group, or only this process
            if there is no default group.

    Raises:
        ValueError: An option is out of range, or `inner` is not empty. All ranks raise the error if
            their versions, indexes or options differ.
    """

    own = frozenset({Attends, CountsTokens, ReportsCoverage})
    lacks = frozenset({AppendsAsync, ExpandsBatch})

    def __init__(
        self,
        inner: KVIndex,
        *,
        block: int = 256,
        rows: str = "own",
        timeout_s: float = TIMEOUT_S,
        group: Any = None,
    ) -> None:
        self.block = check.at_least("block", block, 1)
        self.rows = check.one_of("rows", rows, ROWS)
        self.timeout_s, self.group = check.positive("timeout_s", timeout_s), group
        super().__init__(inner, Ranks.of(group, self.timeout_s), block)
        self._nothing: ResidentRows | None = None
        self._step: _Step | None = None  # tensors of the decode step in a caller's CUDA graph
        self._ranks.check_same("sharded", self._facts())

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal on all ranks: versions of libraries, index, and options."""
        reports = capability(self.inner, ReportsRecipe)
        index = {"index": class_name(type(self.inner))} if reports is None else reports.recipe()
        versions = {"version": __version__, "torch": str(torch.__version__)}
        return {**versions, **index, "block": self.block, "rows": self.rows}

    def _options(self) -> dict[str, Any]:
        # leave out the process group, because a process that loads the saved index passes its own
        # process group
        return {**super()._options(), "group": None}

    # Search and fetch

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError: a sharded index does not support `coverage`.

        To estimate the coverage, a rank would need the attention weights of the rows on all other
        ranks.
        """
        raise ValueError(f"coverage: got {coverage}, allowed is None, because tokens are sharded")

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Select `k` rows from the tokens of all ranks. Every rank returns the same rows.

        The search needs one all-gather, or two if the wrapped index offers `SearchesShard`.

        Args:
            queries: `[B, H, D]`.
            k: Rows to select per KV head.
            coverage: Must be None.

        Raises:
            ValueError: An argument does not fit, or `coverage` is not None.
            TypeError: `queries` is not a tensor.
        """
        if coverage is not None:
            self.check_coverage(coverage)
        check.wanted_rows(k)
        self._check_queries(queries)
        # In an index of N tokens, a search returns at most 2 N rows: N rows with the key and value
        # of one token each, and at most N rows that each summarize several tokens.
        most, queries = min(k, max(2 * self._length, 1)), queries.detach()
        searcher = capability(self.inner, SearchesShard)
        if capability(self.inner, WeighsRows) is not None:
            hits = self._sampled(queries, most)
        elif searcher is not None:
            own = searcher.search_shard(queries, k=most, total=self._total)
            found = self._ranks.gather(self._shard.to_whole(own.ids), own.scores)
            ids, scores = map(_side_by_side, found)
            hits = _best(ids, scores, most)[0]
        else:
            hits = self._rescored(queries, most)
        return hits if most == k else hits.widened(k)

    def _total(self, sums: Tensor) -> Tensor:
        """Return the log-sum-exp of the logits of the whole sequence.

        `sums` contains the log-sum-exps over the tokens of this rank. All ranks call this method
        together. It is passed to `search_shard` as the argument `total`.
        """
        return self._ranks.gather(sums)[0].logsumexp(0)

    def _rescored(self, queries: Tensor, k: int) -> Hits:
        """Let each rank propose `k` tokens, and return the `k` tokens of all ranks with the best
        exact scores.
        """
        own, g = self.inner.search(queries, k=k), self.geometry
        keys = self.inner.fetch(own).keys.float()
        products = groups.fold(queries, g.kv_heads, "mean_share") @ keys.mT  # [B, G, g, K]
        found = self._ranks.gather(self._shard.to_whole(own.ids), products)
        ids, products = map(_side_by_side, found)
        products = products.masked_fill((ids == UNUSED)[:, :, None], NEVER)
        scores = groups.agree(products, "mean_share", scale=g.scale, softcap=g.softcap)
        return _best(ids, scores, k)[0]

    def _sampled(self, queries: Tensor, k: int) -> Hits:
        """Let each of `W` ranks sample about `k / W` of its tokens, and return all samples."""
        rank, count = self._ranks.rank, self._ranks.count
        most, mine = -(-k // count), k // count + (rank < k % count)
        own = self.inner.search(queries, k=max(mine, 1)).widened(most)
        ids, weight = self._shard.to_whole(own.ids), own.log_weight
        if weight is None:
            wide = ids.repeat_interleave(self.geometry.group_size, dim=1)
            weight = torch.zeros_like(wide, dtype=torch.float32).masked_fill(wide < 0, NEVER)
        if not mine:
            ids, own = torch.full_like(ids, UNUSED), Hits(ids, torch.full_like(own.scores, NEVER))
        ids, scores, weights = map(_side_by_side, self._ranks.gather(ids, own.scores, weight))
        hits, places = _best(ids, scores, k)
        places = places.repeat_interleave(self.geometry.group_size, dim=1)
        weights = weights.gather(-1, places.clamp_min(0)).masked_fill(places < 0, NEVER)
        return Hits(hits.ids, hits.scores, weights)

    def fetch(self, hits: Hits) -> Rows:
        """Return keys and values of the rows that a search has selected, on every rank.

        Each rank reads the rows that it stores, and one all-reduce combines them.

        Args:
            hits: Result of a search.

        Raises:
            ValueError: The shape, dtype or device of the ids does not fit. On a CPU also: an id is
                out of range.
            TypeError: `hits` is not a `Hits`.
        """
        ids = self._checked_ids(hits)
        own, failed = self._own_hits(ids), False
        named = self.geometry.device.type != "cuda" and bool((ids < UNUSED).any())
        try:
            rows = self.inner.fetch(own)
        except ValueError:
            if not named:
                raise
            rows, failed = self.inner.fetch(self._own_hits(torch.full_like(ids, UNUSED))), True
        if named and bool(self._ranks.gather(torch.tensor([failed]))[0].any()):
            lowest = int(ids.min())
            raise ValueError(f"hits.ids: got {lowest}, allowed is an id that a search has returned")
        both = self._ranks.add(torch.cat([rows.keys, rows.values], dim=-1))
        keys, values = both.tensor_split([self.geometry.head_dim], dim=-1)
        return Rows(keys.contiguous(), values.contiguous())

    def _own_hits(self, ids: Tensor, log_weight: Tensor | None = None) -> Hits:
        own = self._shard.to_own(ids)
        return Hits(own, torch.zeros_like(own, dtype=torch.float32), log_weight)

    def _check_queries(self, queries: Tensor) -> None:
        g = self.geometry
        shape = {"B": self._batch, "H": g.q_heads, "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        if g.device.type != "cuda":
            check.finite("queries", queries)

    def _checked_ids(self, hits: Hits) -> Tensor:
        """Check the ids of `hits`, and return them.

        An id that is too large raises ValueError on a CPU, and becomes -1 on a GPU.
        """
        if not isinstance(hits, Hits):
            raise TypeError(f"hits: got {type(hits).__name__}, allowed is kvindex.Hits")
        g = self.geometry
        shape = {"B": self._batch, "G": g.kv_heads, "K": None}
        check.tensor("hits.ids", hits.ids, shape, torch.int64, g.device)
        wrong = hits.ids >= self._length
        if g.device.type != "cuda" and bool(wrong.any()):
            got, last = hits.ids[wrong][0].item(), self._length - 1
            raise ValueError(f"hits.ids: got {got}, allowed is {UNUSED} to {last}")
        return hits.ids.masked_fill(wrong, UNUSED)

    # Attention

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search, and attend to the selected rows of all ranks, to the sink and to the window.

        With rows="own", each rank attends to `k` rows of its own tokens. With rows="best", all
        ranks together attend to `k` rows, which `search` selects with one or two all-gathers. One
        further all-gather merges the outputs.

        Args:
            queries: `[B, H, D]`.
            resident: Rows of sink and window, to which only rank 0 attends.
            k: Rows to select per KV head.

        Returns:
            The merged attention. Its `found` counts the rows of all ranks.

        Raises:
            ValueError: An argument does not fit, or the index is empty.
            TypeError: `queries` is not a tensor.
        """
        check.at_least("len(index)", self._length, 1)
        if self.rows == "best":
            return super().attend(queries, resident, k=k)
        check.wanted_rows(k)
        self._check_queries(queries)
        resident = self._own_resident(resident)
        seen, attends = len(resident) > 0, capability(self.inner, Attends)
        if not len(self.inner) or attends is None:
            hits = self.inner.search(queries, k=min(k, max(len(self.inner) * 2, 1)))
            return self._merged(self._attended(queries, hits, resident), seen=seen)
        return self._merged(attends.attend(queries, resident, k=k), seen=seen)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows that a search has selected, to the sink and to the window.

        Each rank attends to the rows that it stores. Only rank 0 attends to `resident`, the rows of
        sink and window. One all-gather merges the outputs.
        """
        check.at_least("len(index)", self._length, 1)
        self._check_queries(queries)
        own, resident = (
            self._own_hits(self._checked_ids(hits), hits.log_weight),
            self._own_resident(resident),
        )
        seen, attends = len(resident) > 0, capability(self.inner, Attends)
        if not len(self.inner) or attends is None:
            return self._merged(self._attended(queries, own, resident), seen=seen)
        return self._merged(attends.attend_hits(queries, own, resident), seen=seen)

    def _own_resident(self, resident: ResidentRows) -> ResidentRows:
        """Return the buffer of sink and window on rank 0, and an empty one on other ranks."""
        if self._ranks.rank == 0:
            return resident
        if self._nothing is None or self._nothing.batch != resident.batch:
            self._nothing = ResidentRows(self.geometry, resident.batch, 1)
        return self._nothing

    def _attended(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend in plain PyTorch to the rows of `hits`, to the sink and to the window."""
        g, rows, count = self.geometry, self.inner.fetch(hits), len(resident)
        own_resident = resident.rows[:, :, :count].tensor_split([g.head_dim], dim=-1)
        used = hits.ids != UNUSED
        seen = resident.mask[:, None, :count].bool().expand(-1, g.kv_heads, -1)
        hidden = ~torch.cat([used, seen], dim=2).repeat_interleave(g.group_size, dim=1)
        bias = torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, NEVER)
        if hits.log_weight is not None:
            bias[..., : used.shape[-1]] += hits.log_weight
        keys = torch.cat([rows.keys, own_resident[0]], dim=2)
        values = torch.cat([rows.values, own_resident[1]], dim=2)
        options: Any = dict(scale=g.scale, softcap=g.softcap, bias=bias, return_lse=True)
        output, lse = ops.attention.attend(queries.detach(), keys, values, **options)
        return Attended(output, lse, used.sum(-1, dtype=torch.int32))

    def _merged(
        self, own: Attended, *, seen: bool, take: bool = False, total: Tensor | None = None
    ) -> Attended:
        """Merge the attention of all ranks with one all-gather (`ops.messages`).

        Args:
            own: The attention of this rank.
            seen: Whether this rank has also attended to the sink and the window. If False, heads
                that found no rows in this rank's index do not change the result.
            take: See `ops.messages.pack`.
            total: See `ops.messages.merge_messages`.
        """
        messages = self._messages
        every = self._ranks.gather_message(messages.pack(own, seen=seen, take=take))
        merged: Attended = messages.merge_messages(every, own, total=total)
        return merged

    @property
    def _messages(self) -> Any:
        """The module `messages` in the wrapped index's backend, which packs and merges messages."""
        runs = capability(self.inner, RunsOps)
        return (ops if runs is None else runs.ops).messages

    # Decode steps that a caller captures in a CUDA graph

    def _offers(self, wanted: type) -> bool:
        if wanted is CapturesStep:  # only with rows="own", and if every rank has tokens
            whole = self._length > (self._ranks.count - 1) * self.block
            return self.rows == "own" and whole and super()._offers(wanted)
        return super()._offers(wanted)

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """Prepare the capture or replay of `captured_step` on all ranks.

        Returns an object that identifies the graph (see `protocol.CapturesStep.prepare_replay`).
        """
        check.at_least("len(index)", self._length, 1)
        step = self._step
        own_resident = step.own_resident if step is not None and step.resident is resident else None
        if own_resident is None:
            own_resident = resident if self._ranks.rank == 0 else resident.unseen()
        reads = self._inner(CapturesStep).prepare_replay(own_resident, k=k)
        if step is None or step.own_resident is not own_resident or step.reads is not reads:
            g = self.geometry
            shape = resident.batch, g.kv_heads
            if step is not None and step.found.shape == shape:
                found = step.found  # keep this tensor, because callers may read it
            else:
                found = torch.zeros(shape, dtype=torch.int64, device=g.device)
            step = self._step = _Step(resident, own_resident, reads, found)
            self._load_messages(found)
        return step

    def _load_messages(self, found: Tensor) -> None:
        """Pack and merge a message once. This loads the kernels before a CUDA graph is captured."""
        g, (B, _) = self.geometry, found.shape
        output = torch.zeros((B, g.q_heads, g.value_dim), dtype=g.dtype, device=g.device)
        lse = torch.zeros(output.shape[:2], device=g.device)
        own, messages = Attended(output, lse, found), self._messages
        message = messages.pack(own, seen=True, take=True)
        messages.merge_messages(message[None], own, total=found)

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """Launch the kernels of a decode step, which a CUDA graph can capture.

        The new token attends to the rows (keys and values) of all ranks: each rank attends to its
        own rows, and one all-gather merges the outputs. The token's key and value are added to
        `resident` (sink and window) on all ranks, but only rank 0 attends to `resident`.
        """
        step = self._step
        if step is None or step.resident is not resident:
            raise RuntimeError(
                "graph: got a step before prepare_replay(); call prepare_replay() first"
            )
        own = self._inner(CapturesStep).captured_step(queries, token, step.own_resident, k=k)
        merged = self._merged(own, seen=self._ranks.rank == 0, take=True, total=step.found)
        return Attended(merged.output, merged.lse, step.found)

    def _after_copy(self) -> None:
        super()._after_copy()
        self._step = None

    # Calls that are not supported, and the explanation

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Raise TypeError, because sharded tokens cannot be appended asynchronously."""
        self._refuse("start_append")

    def expand_batch(self, count: int) -> NoReturn:
        """Raise TypeError, because a sharded index cannot be viewed as a batch of sequences."""
        self._refuse("expand_batch")

    def _refuse(self, name: str) -> NoReturn:
        raise TypeError(f"{name}: got a sharded index, allowed is an index in a single process")

    def explain(self) -> str:
        """Return the wrapper's options, the wrapped index's explanation, and this rank's number."""
        ways = {"own": "each its own, outputs merged", "best": "the best of all"}
        return (
            f"{super().explain()}\nranks: this is {self._ranks.rank} of {self._ranks.count}; rows "
            f"of a step: {ways[self.rows]}"
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """Inputs and outputs of a decode step in a CUDA graph.

    The graph may be replayed as long as `resident` and `reads` are the same objects.

    Attributes:
        resident: The caller's buffer with the rows (keys and values) of sink and window.
        own_resident: `resident` on rank 0. On other ranks, the same rows are hidden, so that only
            one rank attends to them.
        reads: The object that `prepare_replay` of the wrapped index returned. A different object
            means that the graph would read outdated addresses.
        found: Number of rows that the searches of all ranks have returned in all steps so far,
            int64 `[B, G]`.
    """

    resident: ResidentRows
    own_resident: ResidentRows
    reads: object
    found: Tensor


def _side_by_side(every: Tensor) -> Tensor:
    """Concatenate the tensors of `W` ranks: `[W, ..., K]` becomes `[..., W * K]`."""
    return every.movedim(0, -2).flatten(-2)


def _best(ids: Tensor, scores: Tensor, k: int) -> tuple[Hits, Tensor]:
    """Return the `k` ids with the highest scores, and their positions in `ids`.

    `ids` and `scores` are `[B, G, n]`. Among equal scores, the lower id comes first.
    """
    ids, order = ids.sort(dim=-1)
    best, slots = ops.select.top_k(scores.gather(-1, order), k)
    at = slots.clamp_min(0)
    found = ids.gather(-1, at).masked_fill(slots < 0, UNUSED)
    return Hits(found, best), order.gather(-1, at).masked_fill(slots < 0, UNUSED)
