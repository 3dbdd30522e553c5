"""Pool: the indexes of many sequences, which one call can search or attend to together."""

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
    """Indexes for many sequences of one attention layer, one index of batch size 1 per sequence.

    The methods have the names of `KVIndex`, and take a list of sequences as their first argument.
    Entry `i` of the other arguments belongs to `sequences[i]`.

    A pool has no sink and no window. A caller that stores the newest tokens itself must compute the
    attention to these tokens, and merge it with the attention that the pool returns, by log-sum-exp
    (`kvindex.ops.attention.merge`). `LayerPool` is a pool with sink and window.

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
        # A pool has no sink and no window, so it passes empty buffers for them to kernels.
        self._none = ResidentRows(self.geometry, 1, 1)
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
            sequences: Numbers of open sequences, without duplicates.
            keys: `[n, G, T, D]`, after the rotary embedding.
            values: `[n, G, T, Dv]`.
            valid: Bool `[n, T]`, False for padding; None where no token is padded.

        Raises:
            ValueError: A sequence is not open or occurs twice, a shape, dtype or device does not
                fit, or a key that is not padding is NaN or infinite.
            TypeError: An argument is not a tensor, or `sequences` is a single number.
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
            sequences: Numbers of open sequences, without duplicates.
            queries: `[n, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.
            coverage: Select fewer than `k` rows if fewer rows are estimated to have this fraction
                of the attention weight (`KVIndex.search`).

        Returns:
            Hits with token ids int64 `[n, G, k]`. The ids of an empty sequence are all -1.

        Raises:
            ValueError: A sequence is not open or occurs twice, or another argument does not fit.
            TypeError: `queries` is not a tensor, or `sequences` is a single number.
        """
        some = self._several(sequences)
        check_queries(queries, len(some), self.geometry, None)
        check.wanted_rows(k)
        if self._batch is not None and coverage is None and (rows := _rows(some, queries, k)):
            most = min(k, max(map(len, some)))
            return self._batch.search(rows, queries.detach(), k=most).widened(k)
        with all_or_nothing(some):  # because a search can change the state of an index
            found = [
                index.search(queries[i : i + 1], k=k, coverage=coverage)
                for i, index in enumerate(some)
            ]
        return _together(found, self.geometry.group_size)

    def fetch(self, sequences: Sequence[int], hits: Hits) -> Rows:
        """Return the keys and values of the rows that a search has selected.

        Args:
            sequences: Numbers of open sequences, without duplicates.
            hits: The result of `search`, with ids `[n, G, K]`.

        Returns:
            Keys `[n, G, K, D]` and values `[n, G, K, Dv]` on the device and in the dtype of the
            geometry, with zeros for unused slots.

        Raises:
            ValueError: A sequence is not open or occurs twice, or the ids do not fit.
            TypeError: `sequences` is a single number.
        """
        some = self._several(sequences)
        shape = {"n": len(some), "G": self.geometry.kv_heads, "K": None}
        check.tensor("hits.ids", hits.ids, shape, torch.int64, self.geometry.device)
        rows = [index.fetch(_of(hits, i)) for i, index in enumerate(some)]
        return Rows(torch.cat([r.keys for r in rows]), torch.cat([r.values for r in rows]))

    @in_plain_torch
    def attend(self, sequences: Sequence[int], queries: Tensor, *, k: int) -> Attended:
        """Search each sequence, and attend from its query to the `k` best rows.

        Args:
            sequences: Numbers of open sequences, without duplicates.
            queries: `[n, H, D]`, after the rotary embedding.
            k: Rows to select per KV head, at least 1.

        Returns:
            Outputs `[n, H, Dv]` and log-sum-exp `[n, H]` of the logits. For an empty sequence the
            output is zeros and the log-sum-exp is `-inf`.

        Raises:
            ValueError: A sequence is not open or occurs twice, or another argument does not fit.
            TypeError: `queries` is not a tensor, or `sequences` is a single number.
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
        """Report the memory of all sequences, and how much of it they share."""
        indexes = list(self._open.values())  # another thread may open or close sequences meanwhile
        return Report.of(indexes, sum(map(len, indexes)))

    def explain(self) -> str:
        """Explain which implementation computes searches and attention.

        Returns:
            A line that says whether the same kernels compute several sequences together, or one
            sequence after the other. It is followed by the index's explanation.
        """
        how = "one after the other"
        if self._batch is not None:
            how = f"together, by kernels (with coverage, or where one is empty: {how})"
        explains = capability(self._like, Explains)
        return f"sequences: {how}" + ("" if explains is None else f"\n{explains.explain()}")

    def _attend(self, index: KVIndex, queries: Tensor, k: int) -> Attended:
        """Search one index with queries `[1, H, D]`, and attend to the best `k` rows."""
        attends, rows = capability(index, Attends), rows_to_ask(index, k)
        if attends is not None and len(index):
            return attends.attend(queries, self._none, k=rows)
        return _attend_to(index, queries, index.search(queries, k=max(rows, 1)))


def _rows(indexes: list[KVIndex], queries: Tensor, k: int) -> list[object]:
    """Prepare one search for several indexes: return the result of `JoinsBatch.batch_row` for each.

    Returns an empty list if there is only one index, or if any index is empty.
    """
    if len(indexes) == 1 or not all(map(len, indexes)):
        return []
    pairs = zip(indexes, queries[:, None], strict=True)
    return [required(index, JoinsBatch).batch_row(query, k=k) for index, query in pairs]


def _attend_to(index: KVIndex, queries: Tensor, hits: Hits) -> Attended:
    """Fetch keys and values that a search has selected, and attend to them.

    The queries are `[B, H, D]`.
    """
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
    """Concatenate the search results of several sequences along the batch dimension."""
    ids, scores = torch.cat([hits.ids for hits in found]), torch.cat([h.scores for h in found])
    weights = [hits.log_weight for hits in found]
    if any(weight is not None for weight in weights):  # an empty sequence has no weights
        weights = [_weight(hits, group_size) for hits in found]
    coverages = [hits.coverage for hits in found]
    return Hits(ids, scores, _cat(weights), _cat(coverages))


def _weight(hits: Hits, group_size: int) -> Tensor:
    if hits.log_weight is not None:
        return hits.log_weight
    return bias_of(hits.ids != UNUSED).repeat_interleave(group_size, dim=1)


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    some = [part for part in parts if part is not None]
    return torch.cat(some) if some else None


def _of(hits: Hits, row: int) -> Hits:
    """Return the search result of sequence `row` of the batch."""
    return Hits(hits.ids[row : row + 1], hits.scores[row : row + 1])
