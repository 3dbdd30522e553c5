"""Wrapper that returns the result of an earlier search while the queries stay similar.

Source: LouisKV (ICLR 2026), semantic-aware retrieval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import ExpandsBatch, Hits, KVIndex, ObservesQueries, WeighsRows
from kvindex.storage.layout import Layout, TensorSpec, distinct
from kvindex.wrappers.base import Wrapper


@dataclass(frozen=True)
class _Last:
    """The result and arguments of the last search, and the length of the index at that time."""

    hits: Hits
    k: int
    coverage: float | None
    length: int


class Reuse(Wrapper):
    """Searches only if the queries differ enough from the queries of the last token. Otherwise it
    returns the hits of the last search again.

    The queries of token `t` have changed if the mean over the query heads of the cosine of
    `q_{t-1}` and `q_t` is below `tau`. If `tau` is above 1, the wrapper searches for every token.
    If `tau` is below -1, it searches only for the first token. Each sequence of a batch is compared
    separately: one may reuse its hits while the wrapper searches for another. If the queries of any
    sequence have changed, the wrapper calls `mark_boundary` of the wrapped index for all sequences.

    Reused hits have the scores and log weights of the query that searched, and contain no tokens
    that were appended later. A negative id in the hits means that no row was found, or it stands
    for a row that summarizes a cluster. After an append, this id may stand for something else. So a
    sequence with a negative id in its hits searches again if the index has grown. A call of
    `truncate`, or a different `k` or `coverage`, also causes a search.

    Args:
        inner: The index to wrap.
        tau: Cosine below which the wrapper searches. The paper uses 0.7 for Qwen3-8B;
            `kvindex_adapters.evaluate.reuse_threshold` finds a value for a model.

    Attributes:
        steps: Number of calls of `search`.
        searches: Number of those calls that searched the wrapped index.

    Raises:
        ValueError: `tau` is not a number.

    Source: LouisKV (ICLR 2026), semantic-aware retrieval.
    """

    statistics = ("steps", "searches", "_before", "_differs", "_last")
    own = frozenset({ObservesQueries})
    lacks = frozenset({ExpandsBatch})  # because hits may be those of an earlier search

    steps: int
    searches: int
    _before: Tensor | None  # normalized queries of the last token, [B, H, D]
    _differs: Tensor | None  # set by `observe_queries`: True for sequences that must search next
    _last: _Last | None

    def __init__(self, inner: KVIndex, *, tau: float = 0.7) -> None:
        super().__init__(inner)
        if isinstance(tau, bool) or not isinstance(tau, int | float) or math.isnan(tau):
            raise ValueError(f"tau: got {tau!r}, allowed is a number")
        self.tau = float(tau)
        self._forget()

    def rate(self) -> float | None:
        """Return the fraction of `search` calls that searched the wrapped index.

        The other calls returned the hits of an earlier search. The result is None before the first
        call.
        """
        return self.searches / self.steps if self.steps else None

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Compare the queries with those of the last token, and pass them to the wrapped index.

        The queries are compared only if they belong to a single token. If they have changed since
        the last token, this method first calls `mark_boundary` of the wrapped index.
        """
        g = self.geometry
        shape = {"B": None, "H": g.q_heads, "T": None, "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        if queries.shape[2] == 1:
            self._differs = self._judged(queries[:, :, 0])
        elif queries.shape[2]:
            self._before = normalize(queries[:, :, -1].detach().float(), dim=-1)
            self._differs = None
        self.inner.observe_queries(queries, positions)

    def _undone(self, name: str) -> bool:
        return name == "search" or super()._undone(name)  # a search stores its hits

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Search for the sequences whose queries have changed, and reuse the last hits of the other
        sequences.

        Args:
            queries: `[B, H, D]`.
            k: Rows to select per KV head.
            coverage: Passed to the wrapped index (see `KVIndex.search`).

        Raises:
            ValueError: An argument does not fit, or the wrapped index raised it.
        """
        g, last = self.geometry, self._last
        shape = {"B": None, "H": g.q_heads, "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        differs = self._judged(queries) if self._differs is None else self._differs
        self._last = self._differs = None  # if this search fails, the next call searches
        asked = (k, coverage, len(queries), len(queries))
        if last and (last.k, last.coverage, len(last.hits.ids), len(differs)) == asked:
            if len(self) != last.length:
                differs = differs | (last.hits.ids < 0).flatten(1).any(1)
            if bool(differs.any()):
                new = self._searched(queries, k, coverage)
                last = _Last(_mixed(differs, new, last.hits), k, coverage, len(self))
        else:
            last = _Last(self._searched(queries, k, coverage), k, coverage, len(self))
        self.steps += 1
        self._last = last if len(self) else None  # the batch of an empty index may change
        return last.hits

    def truncate(self, length: int) -> None:
        """Truncate the wrapped index.

        If this removes tokens, the stored result of the last search is discarded, so that the next
        call of `search` searches the wrapped index.
        """
        shorter = length < len(self)
        self.inner.truncate(length)
        if shorter:
            self._last = None

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the sequences of the wrapped index, and those of the stored search result."""
        self.inner.reorder(batch_indices)
        rows, known = batch_indices.to(self.geometry.device), self._before
        if known is not None and int(batch_indices.max()) >= len(known):
            # The stored queries have another batch size than the index, so discard them. This
            # happens if an empty index received queries of one batch size, and then tokens of
            # another batch size.
            self._before = self._differs = None
        self._before = None if self._before is None else self._before[rows]
        self._differs = None if self._differs is None else self._differs[rows]
        if self._last is not None:
            old = self._last.hits
            weight = None if old.log_weight is None else old.log_weight[rows]
            coverage = None if old.coverage is None else old.coverage[rows]
            hits = Hits(old.ids[rows], old.scores[rows], weight, coverage)
            self._last = replace(self._last, hits=hits)

    def reset(self) -> None:
        """Reset the wrapped index and the counts `steps` and `searches`."""
        super().reset()
        self._forget()

    def _searched(self, queries: Tensor, k: int, coverage: float | None) -> Hits:
        hits = self.inner.search(queries, k=k, coverage=coverage)
        self.searches += 1
        return hits

    def _layout(self, state: Mapping[str, Tensor], length: int) -> Layout:
        count = TensorSpec("", torch.int64, least=0)
        layout = {"steps": count, "searches": count}
        specs = {
            "before": TensorSpec("B H D", torch.float32),
            "differs": TensorSpec("B", torch.bool),
            "last.hits.ids": TensorSpec(
                "B G K",
                torch.int64,
                least=-1 - length,  # at most as many summary rows as tokens
                most=length - 1,
                allowed="distinct",
                rule=lambda parts: distinct(parts["last.hits.ids"]),
            ),
            "last.hits.scores": TensorSpec("B G K", torch.float32, infinite=True),
            "last.hits.log_weight": TensorSpec("B H K", torch.float32, infinite=True),
            "last.hits.coverage": TensorSpec("B H", torch.float32),
            "last.k": TensorSpec(
                "",
                torch.int64,
                least=1,
                allowed="the number of last.hits.ids",
                rule=lambda parts: parts["last.k"] == parts["last.hits.ids"].shape[2],
            ),
            "last.length": TensorSpec("", torch.int64, least=0, most=length),
        }
        layout |= {name: spec for name, spec in specs.items() if name in state}
        if "last.k" in state and capability(self.inner, WeighsRows) is not None:
            layout["last.hits.log_weight"] = specs["last.hits.log_weight"]
        return layout

    def _forget(self) -> None:
        self.steps = self.searches = 0
        self._before = self._differs = self._last = None

    def _judged(self, queries: Tensor) -> Tensor:
        """Return bool `[B]`: True for sequences whose queries have changed since the last token.

        If any have changed, this also calls `mark_boundary` of the wrapped index.
        """
        directions, before = normalize(queries.detach().float(), dim=-1), self._before
        self._before = directions
        if before is None or before.shape != directions.shape:
            return torch.ones(len(queries), dtype=torch.bool, device=queries.device)  # the first
        similar = similarity(before, directions).clamp(-1, 1)
        differs = ~(similar >= self.tau)  # NaN counts as different
        if bool(differs.any()):
            self.inner.mark_boundary()
        return differs


def similarity(before: Tensor, after: Tensor) -> Tensor:
    """Return how similar the queries of two tokens are, float32 `[B]`.

    The result is the mean over the query heads of the cosine of the two queries.

    Args:
        before: Queries of the earlier token, scaled to length 1, `[B, H, D]`.
        after: Queries of the later token, scaled to length 1, `[B, H, D]`.
    """
    return (before * after).sum(-1).mean(-1)


def _mixed(differs: Tensor, new: Hits, old: Hits) -> Hits:
    """Combine two search results: `new` for sequences where `differs` is True, `old` for others."""
    rows = differs[:, None, None]
    weight, coverage = new.log_weight, new.coverage
    if weight is not None and old.log_weight is not None:
        weight = torch.where(rows, weight, old.log_weight)
    if coverage is not None and old.coverage is not None:
        coverage = torch.where(differs[:, None], coverage, old.coverage)
    ids = torch.where(rows, new.ids, old.ids)
    return Hits(ids, torch.where(rows, new.scores, old.scores), weight, coverage)
