"""Pool: the indexes of many sequences of different lengths, searched and attended to together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability, required
from kvindex.core.protocol import (
    UNUSED,
    Attended,
    Attends,
    Explains,
    Hits,
    JoinsBatch,
    KVIndex,
    Rows,
)
from kvindex.core.resident import ResidentRows
from kvindex.core.transaction import in_plain_torch
from kvindex.layer.retrieval import bias_of, rows_to_ask
from kvindex.ops import attention
from kvindex.pool.report import Report
from kvindex.pool.sequences import Sequences, all_or_nothing, check_queries, check_tokens
from kvindex.registry import create


class Pool(Sequences[KVIndex]):
    """Many sequences of one attention layer. Each has an index of its own, with batch size 1.

    The methods have the names of `KVIndex`, and take a list of sequences as their first argument.
    Entry `i` of the other arguments belongs to `sequences[i]`.

    A pool has no sink and no window. A caller that stores rows elsewhere merges its attention over
    them with that of the pool, by `Attended.lse` (`kvindex.ops.attention.merge`). `LayerPool` has
    whole attention layers instead.

    Args:
        index: The name and options of an index, as for `kvindex.create`; or an empty index.
        **options: Further options of `kvindex.create`.

    Raises:
        ValueError: The index is not empty, or cannot undo a failed call.
    """

    @in_plain_torch
    def __init__(self, index: str | KVIndex, **options: Any) -> None:
        super().__init__(create(index, **options) if isinstance(index, str) else index)
        self.geometry = self._like.geometry
        joins = capability(self._like, JoinsBatch)
        self._batch = None if joins is None else joins.new_batch()
        self._none = ResidentRows(self.geometry, 1, 1)  # empty: a pool has no resident rows
        self._nones = ResidentRows(self.geometry, 1, 1, ragged=True)

    def append(
        self,
        sequences: Sequence[int],
        keys: Tensor,
        values: Tensor,
        *,
        valid: Tensor | None = None,
    ) -> None:
        """Append `T` tokens to each of `n` sequences. If this fails, all sequences are unchanged.

        Args:
            sequences: Numbers of open sequences, each once.
            keys: `[n, G, T, D]`, after the rotary embedding.
            values: `[n, G, T, Dv]`.
            valid: Bool `[n, T]`, False for padding; None where no token is padded.

        Raises:
            ValueError: A sequence is not open or comes twice, a shape, dtype or device does not
                fit, or a valid key is NaN or infinite.
            TypeError: An argument is not a tensor.
        """
        some = self._several(sequences)
        check_tokens(keys, values, len(some), self.geometry)
        if valid is not None:
            shape: dict[str, int | None] = {"n": len(some), "T": keys.shape[2]}
            check.tensor("valid", valid, shape, torch.bool, self.geometry.device)
        with all_or_nothing(some):
            for i, index in enumerate(some):
                own = slice(i, i + 1)
                given = keys[own], values[own]
                index.append(*given, valid=None if valid is None else valid[own])

    @in_plain_torch
    def search(
        self, sequences: Sequence[int], queries: Tensor, *, k: int, coverage: float | None = None
    ) -> Hits:
        """Select the rows that each sequence's query should attend to.

        Args:
            sequences: Numbers of open sequences, each once.
            queries: `[n, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.
            coverage: As in `KVIndex.search`.

        Returns:
            Hits with ids `[n, G, k]`, as from `KVIndex.search`. All slots of an empty sequence are
            unused.

        Raises:
            ValueError: A sequence is not open or comes twice, or another argument does not fit.
            TypeError: `queries` is not a tensor.
        """
        some = self._several(sequences)
        check_queries(queries, len(some), self.geometry, None)
        check.wanted_rows(k)
        if self._batch is not None and coverage is None and (rows := _rows(some, queries, k)):
            most = min(k, max(map(len, some)))
            return self._batch.search(rows, queries.detach(), k=most).widened(k)
        with all_or_nothing(some):  # a search changes some indexes
            found = [
                index.search(queries[i : i + 1], k=k, coverage=coverage)
                for i, index in enumerate(some)
            ]
        return _together(found, self.geometry.group_size)

    def fetch(self, sequences: Sequence[int], hits: Hits) -> Rows:
        """Return keys and values of hits.

        Args:
            sequences: Numbers of open sequences, each once.
            hits: Hits with ids `[n, G, K]`.

        Returns:
            Keys `[n, G, K, D]` and values `[n, G, K, Dv]` on the compute device, in the geometry's
            dtype; zeros for unused slots.

        Raises:
            ValueError: A sequence is not open or comes twice, or the ids do not fit.
        """
        some = self._several(sequences)
        shape = {"n": len(some), "G": self.geometry.kv_heads, "K": None}
        check.tensor("hits.ids", hits.ids, shape, torch.int64, self.geometry.device)
        rows = [index.fetch(_of(hits, i)) for i, index in enumerate(some)]
        return Rows(torch.cat([r.keys for r in rows]), torch.cat([r.values for r in rows]))

    @in_plain_torch
    def attend(self, sequences: Sequence[int], queries: Tensor, *, k: int) -> Attended:
        """Attend from each sequence's query to the `k` best rows of the sequence.

        Args:
            sequences: Numbers of open sequences, each once.
            queries: `[n, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.

        Returns:
            Outputs `[n, H, Dv]` and log-sum-exp `[n, H]` of the logits. For an empty sequence the
            output is zeros and the log-sum-exp is `-inf`.

        Raises:
            ValueError: A sequence is not open or comes twice, or another argument does not fit.
            TypeError: `queries` is not a tensor.
        """
        some = self._several(sequences)
        check_queries(queries, len(some), self.geometry, None)
        check.wanted_rows(k)
        if self._batch is not None and (rows := _rows(some, queries, k)):
            if self._nones.batch != len(some):
                self._nones = ResidentRows(self.geometry, len(some), 1, ragged=True)
            most = min(k, max(map(len, some)))
            return self._batch.attend(rows, queries.detach(), self._nones, k=most)
        with all_or_nothing(some):
            each = [self._attend(index, queries[i : i + 1], k) for i, index in enumerate(some)]
        return Attended(
            torch.cat([attended.output for attended in each]),
            torch.cat([attended.lse for attended in each]),
            torch.cat([attended.found for attended in each]),
        )

    def report(self) -> Report:
        """Report the memory of all sequences, and how much of it they share.

        Returns:
            Numbers of sequences, tokens and blocks of memory, and bytes.
        """
        indexes = list(self._open.values())  # another thread may open or close sequences meanwhile
        return Report.of(indexes, sum(map(len, indexes)))

    def explain(self) -> str:
        """Explain which implementation runs.

        Returns:
            A line about the steps of several sequences, and one or more about each index.
        """
        how = "one after the other"
        if self._batch is not None:
            how = f"together, by kernels (with coverage, or where one is empty: {how})"
        explains = capability(self._like, Explains)
        return f"sequences: {how}" + ("" if explains is None else f"\n{explains.explain()}")

    def _attend(self, index: KVIndex, queries: Tensor, k: int) -> Attended:
        """Attend from one query `[1, H, D]`."""
        attends, rows = capability(index, Attends), rows_to_ask(index, k)
        if attends is not None and len(index):
            return attends.attend(queries, self._none, k=rows)
        return _attend_to(index, queries, index.search(queries, k=max(rows, 1)))


def _rows(indexes: list[KVIndex], queries: Tensor, k: int) -> list[object]:
    """Return each index's part of a batch. Return an empty list if there is only one index, or if
    any index is empty.
    """
    if len(indexes) == 1 or not all(map(len, indexes)):
        return []
    pairs = zip(indexes, queries[:, None], strict=True)
    return [required(index, JoinsBatch).batch_row(query, k=k) for index, query in pairs]


def _attend_to(index: KVIndex, queries: Tensor, hits: Hits) -> Attended:
    """Fetch the rows of hits, and attend to them from queries `[B, H, D]`."""
    g, rows, used = index.geometry, index.fetch(hits), hits.ids != UNUSED
    bias = bias_of(used).repeat_interleave(g.group_size, dim=1)
    if hits.log_weight is not None:
        bias = bias + hits.log_weight
    output, lse = attention.attend(
        queries,
        rows.keys,
        rows.values,
        scale=g.scale,
        softcap=g.softcap,
        bias=bias,
        return_lse=True,
    )
    return Attended(output, lse, used.sum(-1, dtype=torch.int32))


def _together(found: list[Hits], group_size: int) -> Hits:
    """Concatenate the hits of several sequences to those of a batch."""
    ids, scores = torch.cat([hits.ids for hits in found]), torch.cat([h.scores for h in found])
    weights = [hits.log_weight for hits in found]
    if any(weight is not None for weight in weights):  # an empty sequence has none
        weights = [_weight(hits, group_size) for hits in found]
    shares = [hits.coverage for hits in found]
    return Hits(ids, scores, _cat(weights), _cat(shares))


def _weight(hits: Hits, group_size: int) -> Tensor:
    if hits.log_weight is not None:
        return hits.log_weight
    return bias_of(hits.ids != UNUSED).repeat_interleave(group_size, dim=1)


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    some = [part for part in parts if part is not None]
    return torch.cat(some) if some else None


def _of(hits: Hits, row: int) -> Hits:
    """Return the hits of one sequence of the batch."""
    return Hits(hits.ids[row : row + 1], hits.scores[row : row + 1])
