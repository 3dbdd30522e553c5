"""Wrapper that measures the recall of an index, compared with exact search, during generation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.core.capability import required
from kvindex.core.protocol import (
    UNUSED,
    AppendsAsync,
    CountsTokens,
    ErrorLimit,
    ExpandsBatch,
    Hits,
    KVIndex,
)
from kvindex.indexes.exact import Exact, ExactConfig
from kvindex.ops import group
from kvindex.storage.layout import Layout, TensorSpec
from kvindex.storage.state import State, above, below, length_and_batch
from kvindex.wrappers.base import Wrapper


class MeasureRecall(Wrapper):
    """Measures the recall of an index: the fraction of the true `k` best rows that it finds.

    The true best rows of each query head are found by exact search. A search of the index returns
    `k` rows for each KV head, which all of its query heads share. So even an exact search per KV
    head may not reach a recall of 1. `limit()` returns the recall of this exact search.

    The wrapper stores a second copy of all rows, in an `exact` index. If the wrapped index is not
    empty, the constructor copies its rows.

    Args:
        inner: The index to measure.

    Raises:
        TypeError: `inner` is not empty, and cannot report which of its tokens are padding.
    """

    statistics = ("_found", "_reachable", "_wanted")
    holds = frozenset({"inner", "truth"})
    lacks = frozenset({AppendsAsync, ExpandsBatch})  # the exact index must change with `inner`

    _found: int
    _reachable: int
    _wanted: int

    def __init__(self, inner: KVIndex) -> None:
        super().__init__(inner)
        group = getattr(inner.config, "group", ExactConfig.group)
        self._exact = Exact(**inner.geometry.options(), group=group)
        self._found = self._reachable = self._wanted = 0
        if len(inner):
            self._copy_rows()

    def _copy_rows(self) -> None:
        """Copy the keys and values of the wrapped index into the index `exact` for comparison.

        Raises TypeError if the wrapped index cannot report which tokens are padding.
        """
        known, g = required(self.inner, CountsTokens, name="inner"), self.geometry
        ids = torch.arange(len(self.inner), device=g.device)
        ids = ids.expand(len(known.counts), g.kv_heads, -1)
        rows = self.inner.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
        self._exact.append(rows.keys, rows.values, valid=known.valid)

    def recall(self) -> float | None:
        """Return the recall over all searches, sequences and query heads so far.

        Returns None before the first search.
        """
        return self._found / self._wanted if self._wanted else None

    def limit(self) -> float | None:
        """Return the recall of an exact search that selects `k` rows per KV head.

        Recall compares with the `k` best rows of each query head. The query heads of a KV head must
        share `k` rows, so even an exact search per KV head may have a recall below 1. The exact
        search combines the query heads by the same rule as the wrapped index (`ops.group`). Returns
        None before the first search.
        """
        return self._reachable / self._wanted if self._wanted else None

    def _undone(self, name: str) -> bool:
        return name in ("search", "search_within") or super()._undone(
            name
        )  # a search changes the counts

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Search the wrapped index, and count how many of the true best rows it has found."""
        return self._counted(queries, k, self.inner.search(queries, k=k, coverage=coverage))

    def search_within(self, queries: Tensor, *, k: int, limit: ErrorLimit) -> Hits:
        """Search the wrapped index with a limit of the error, and count as `search` does."""
        return self._counted(queries, k, super().search_within(queries, k=k, limit=limit))

    def _counted(self, queries: Tensor, k: int, hits: Hits) -> Hits:
        """Count how many of the true best `k` rows are among the hits, and return the hits."""
        if len(self._exact):
            g = self.geometry
            scores = self._exact.scores(group.fold(queries, g.kv_heads, "union"))
            most = min(k, len(self._exact))
            true = self._exact.ops.select.top_k(scores, most)[1]  # [B, G, g, k]
            self._wanted += int((true >= 0).sum())
            used = hits.ids[..., : int((hits.ids != UNUSED).sum(-1).max())]
            self._found += _common(true, used)
            self._reachable += _common(true, self._exact.search(queries, k=most).ids)
        return hits

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens to the wrapped index, and to the exact index with which its results are
        compared."""
        self.inner.append(keys, values, valid=valid)
        self._exact.append(keys, values, valid=valid)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state into the wrapper, the wrapped index and the exact index."""
        super().load_state_dict(state)
        self._exact.load_state_dict(below("truth", state))

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        super()._check_own(state)
        truth = below("truth", state)
        self._exact.check_state(truth)
        inner, exact = length_and_batch(state), length_and_batch(truth)
        if inner and inner != exact:
            raise ValueError(
                f"state['truth.length']: got {exact}, allowed is {inner} as in the wrapped index"
            )

    def _layout(self, state: Mapping[str, Tensor], length: int) -> Layout:
        return {
            name: TensorSpec("", torch.int64, least=0) for name in ("found", "reachable", "wanted")
        }

    def _own_state(self) -> State:
        return super()._own_state() | above("truth", self._exact.state_dict())

    def truncate(self, length: int) -> None:
        """Truncate the wrapped index and the exact index.

        The counts from which the recall is computed do not change.
        """
        self.inner.truncate(length)
        self._exact.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch of the wrapped index and of the exact index.

        The counts of the recall do not change.
        """
        self.inner.reorder(batch_indices)
        self._exact.reorder(batch_indices)

    def reset(self) -> None:
        """Remove all tokens from the wrapped index and from the index that searches exactly.

        The counts from which the recall is computed become zero.
        """
        super().reset()
        self._exact.reset()
        self._found = self._reachable = self._wanted = 0


def _common(true: Tensor, ids: Tensor) -> int:
    """Count the ids of `true` `[B, G, g, k]` that occur in `ids` `[B, G, K]`."""
    hit = (true[..., None] == ids[:, :, None, None]).any(-1)
    return int((hit & (true >= 0)).sum())
