"""Wrapper that reuses hits while queries stay similar.

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
    """The last hits, the arguments of the search, and the length of the index at that time."""

    hits: Hits
    k: int
    coverage: float | None
    length: int


class Reuse(Wrapper):
    """Searches if a step's queries differ from the previous step's, else returns the last hits.

    Queries differ if the mean over the heads of `cos(q_{t-1}, q_t)` is below `tau`. With a `tau`
    above 1 every step searches; below -1 only the first step does. Each sequence of a batch is
    judged on its own: a sequence whose queries stay similar keeps its hits while another sequence
    searches. If any sequence differs, the inner index receives `mark_boundary` before the step, for
    all sequences.

    Reused hits have the scores and weights of the query that searched, and do not contain tokens
    that were appended since then. Slots without a token (unused slots, or rows of clusters) may
    have changed their meaning, so a sequence with such slots searches again if the index has grown.
    A different `k` or `coverage`, or `truncate`, also causes a search.

    Args:
        inner: The index to wrap.
        tau: Similarity below which a step searches. The paper uses 0.7 for Qwen3-8B;
            `kvindex_adapters.evaluate.reuse_threshold` finds a value for a model.

    Attributes:
        steps: Number of calls of `search`.
        searches: Number of these calls that searched the inner index.

    Raises:
        ValueError: `tau` is not a number.

    Source: LouisKV (ICLR 2026), semantic-aware retrieval.
    """

    statistics = ("steps", "searches", "_before", "_differs", "_last")
    own = frozenset({ObservesQueries})
    lacks = frozenset({ExpandsBatch})  # a step may return the hits of the step before

    steps: int
    searches: int
    _before: Tensor | None  # normalized queries of the step before, [B, H, D]
    _differs: Tensor | None  # which sequences must search next, from `observe_queries`
    _last: _Last | None

    def __init__(self, inner: KVIndex, *, tau: float = 0.7) -> None:
        super().__init__(inner)
        if isinstance(tau, bool) or not isinstance(tau, int | float) or math.isnan(tau):
            raise ValueError(f"tau: got {tau!r}, allowed is a number")
        self.tau = float(tau)
        self._forget()

    def rate(self) -> float | None:
        """Return the fraction of the steps that searched, or None before the first step."""
        return self.searches / self.steps if self.steps else None

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Pass queries to the inner index. Mark a boundary before a single query that differs."""
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
        """Search the inner index, or return the last hits.

        Args:
            queries: `[B, H, D]`.
            k: Rows per KV head.
            coverage: As for the inner index.

        Raises:
            ValueError: As for the inner index.
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
        """Truncate the inner index; the next step searches."""
        shorter = length < len(self)
        self.inner.truncate(length)
        if shorter:
            self._last = None

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch of the inner index, and the last hits."""
        self.inner.reorder(batch_indices)
        rows, known = batch_indices.to(self.geometry.device), self._before
        if known is not None and int(batch_indices.max()) >= len(known):
            # An empty index accepts queries of any batch size, and then tokens of another one.
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
        """Reset the inner index and the counts."""
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
        """Return which sequences differ from the step before, bool `[B]`.

        If any sequence differs, the inner index receives `mark_boundary`.
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
    """Return the mean over the heads of the cosines of unit vectors `[B, H, D]`, float32 `[B]`."""
    return (before * after).sum(-1).mean(-1)


def _mixed(differs: Tensor, new: Hits, old: Hits) -> Hits:
    """Return the new hits where `differs` is True, and the old hits for the other sequences."""
    rows = differs[:, None, None]
    weight, coverage = new.log_weight, new.coverage
    if weight is not None and old.log_weight is not None:
        weight = torch.where(rows, weight, old.log_weight)
    if coverage is not None and old.coverage is not None:
        coverage = torch.where(differs[:, None], coverage, old.coverage)
    ids = torch.where(rows, new.ids, old.ids)
    return Hits(ids, torch.where(rows, new.scores, old.scores), weight, coverage)
