"""Measure how many of the best rows an index finds, with the queries that a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import (
    AppendsAsync,
    Attends,
    CountsTokens,
    ErrorLimit,
    Hits,
    KVIndex,
)
from kvindex.layer import AttentionLayer
from kvindex.wrappers.base import Wrapper

AT_ONCE = 2**24
"""Largest number of exact scores that are computed together, which limits the memory."""


@dataclass
class Found:
    """Sums over the searches of all query heads, decode steps and layers.

    Attributes:
        searches: Number of searches, one for each query head, decode step and layer.
        recall: Sum of the recalls of all searches. The recall of a search is the fraction of the
            `k` rows with the largest `q·k` that the search has retrieved.
        coverage: Sum of the attention weights of the retrieved rows, over all searches. In each
            search, the weights of all rows in the index add up to 1.
        weighted: Whether a search returned log weights, because the index samples rows. Recall and
            coverage of such an index are low by design.
    """

    searches: int = 0
    recall: Tensor | float = 0.0
    coverage: Tensor | float = 0.0
    weighted: bool = False

    def means(self) -> dict[str, float | None]:
        """Return a dict with the means of `recall` and `coverage`.

        Both are None if no search has run.
        """
        n = self.searches
        return {
            name: float(total) / n if n else None
            for name, total in (("recall", self.recall), ("coverage", self.coverage))
        }

    def add(
        self, queries: Tensor, hits: Hits, keys: Tensor, valid: Tensor, k: int, g: Geometry
    ) -> None:
        """Compare the hits of decode steps with exact scores.

        Args:
            queries: `[B, H, D]`, one query for each of `B` steps.
            hits: What a search with `k` has found.
            keys: Keys in the index, `[1, G, N, D]`.
            valid: Bool `[N]`, False for tokens that no search returns, such as the sink.
            k: Number of rows that a search retrieves.
            g: Geometry of the index.
        """
        (B, H, _), N = queries.shape, keys.shape[2]
        keys = keys[:, :, valid].float()
        count = keys.shape[2]
        step, most = max(AT_ONCE // (H * count), 1), min(k, count)
        for ids, part in zip(torch.split(hits.ids, step), torch.split(queries, step), strict=True):
            retrieved = torch.zeros(*ids.shape[:2], N + 1, dtype=torch.bool, device=ids.device)
            retrieved.scatter_(-1, torch.where(ids < 0, N, ids), True)
            logits = part.float().reshape(len(part), g.kv_heads, g.group_size, -1) @ keys.mT
            flags = retrieved[:, :, None, :N][..., valid].expand_as(logits)  # [b, G, H / G, count]
            best = logits.topk(most, sorted=False).indices
            self.recall = self.recall + flags.gather(-1, best).sum().double() / most
            logits *= g.scale
            if g.softcap is not None:
                logits = g.softcap * (logits / g.softcap).tanh()
            weights = logits.softmax(-1).masked_fill(~flags, 0)
            self.coverage = self.coverage + weights.sum(-1).double().sum()
        self.searches += B * H
        self.weighted = self.weighted or hits.log_weight is not None


class Watching(Wrapper):
    """Wrapper around an index that adds the recall and coverage of each search to a `Found`.

    Args:
        inner: The index.
        found: The sums of recall and coverage. Several indexes may add to the same `Found`.
    """

    # the wrapper hides these capabilities of the index, so that the layer calls `search`
    lacks = frozenset({AppendsAsync, Attends})

    def __init__(self, inner: KVIndex, found: Found) -> None:
        super().__init__(inner)
        self._found = found
        self._whole = inner  # `expand_batch` replaces the attribute `inner` by a view of the index

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Search the wrapped index, and compare the hits with exact scores."""
        return self._added(queries, k, self.inner.search(queries, k=k, coverage=coverage))

    def search_within(self, queries: Tensor, *, k: int, limit: ErrorLimit) -> Hits:
        """Search the wrapped index with a limit of the error, and compare the hits."""
        return self._added(queries, k, super().search_within(queries, k=k, limit=limit))

    def _added(self, queries: Tensor, k: int, hits: Hits) -> Hits:
        """Add the recall and coverage of hits to the sums, and return the hits."""
        g, known = self.geometry, capability(self._whole, CountsTokens)
        valid = torch.ones(len(self), dtype=torch.bool, device=g.device)
        if known is not None and known.valid is not None:
            valid = known.valid[0]
        if valid.any():
            ids = torch.arange(len(self), device=g.device).expand(1, g.kv_heads, -1)
            rows = self._whole.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))
            self._found.add(queries, hits, rows.keys, valid, k, g)
        return hits


@contextmanager
def watched(layers: Sequence[AttentionLayer]) -> Iterator[Found]:
    """Context manager that measures recall and coverage of all searches in the given layers.

    It yields a `Found` object. Each search inside the `with` block adds its recall and coverage to
    the sums in this object.
    """
    found, before = Found(), [layer.index for layer in layers]
    for layer, index in zip(layers, before, strict=True):
        layer.index = Watching(index, found)
    try:
        yield found
    finally:
        for layer, index in zip(layers, before, strict=True):
            layer.index = index
