"""ActQKV: scores pages of tokens with a probe query, which is a weighted mean of recent queries.

Xiao et al., Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs
Inference (arXiv 2502.13542). docs/indexes/actqkv.md lists the differences from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.eviction import are_valid
from kvindex.bases.pages import PagedIndex, Tail
from kvindex.bases.prompt_queries import PromptQueriesIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import group
from kvindex.storage.layout import Layout, TensorSpec


@dataclass(frozen=True)
class ActQKVConfig:
    """Options of ActQKV.

    Args:
        page: Tokens per page.
        window: Number of queries from which the probe query is computed: the query that is passed
            to `search`, and the newest queries before it.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 16
    window: int = 8
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.at_least("window", self.window, 1)
        check.one_of("group", self.group, group.POLICIES)


class ActQKV(PagedIndex, PromptQueriesIndex):
    """Selects whole pages by the inner product of a probe query and the page's mean key.

    The probe query is a weighted mean of the latest queries. Queries that are far from the
    unweighted mean get large weights. The latest queries are the queries that were passed to
    `observe_queries`, but the newest of them is replaced by the query that is passed to `search`.
    If no query was observed, the query of the search is the probe query. In `Hits.scores`, each row
    has the score of its page.

    Source: Xiao et al., Activation-aware Probe-Query (arXiv 2502.13542).
    """

    Config = ActQKVConfig

    # The probe

    @property
    def depends_on_queries(self) -> bool:
        """True, because the result of a search depends on the queries that were observed before."""
        return True

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store the newest queries `[B, H, T, D]` of the tokens `positions`, for later searches.

        NaN and infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        self._sample_queries(queries, positions, self.config.window)

    def _probes(self, queries: Tensor) -> Tensor:
        """Return the query with which each head scores pages (the probe), float32 `[B, H, D]`.

        It is a weighted mean of earlier observed queries and of `queries`, the argument of the
        search (see `probe`).
        """
        observed, window = self._observed, queries[:, :, None].float()
        if observed is None:
            return window[:, :, 0]
        window = torch.cat([observed.queries[:, :, :-1].float(), window], dim=2)
        counted = are_valid(observed.queries, observed.positions, self.valid)
        newest = torch.ones_like(counted[:, :1])
        return probe(window, torch.cat([counted[:, :-1], newest], dim=1))

    def _search(self, queries: Tensor, k: int) -> Hits:
        return super()._search(self._probes(queries), k)

    # Pages

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        sums = keys.float().masked_fill(~present, 0).sum(3)
        return {"means": (sums / present.sum(3).clamp_min(1)).to(keys.dtype)}

    def _page_layout(self, pages: str) -> Layout:
        return {"codes.means": TensorSpec(f"B G {pages} D", self.geometry.dtype)}

    def _page_scores(self, queries: Tensor) -> Tensor:
        return queries @ self._codes["means"].float().mT

    # Housekeeping

    def _with_truncated(self, length: int) -> Any:
        return super()._with_truncated(length), self._observed and self._observed.before(length)

    def _commit(self, statistics: Any) -> None:
        if isinstance(statistics, tuple):
            tail, statistics = statistics
            super()._commit(tail)
        if not isinstance(statistics, Tail):
            self._observed = statistics


def probe(window: Tensor, counted: Tensor) -> Tensor:
    """Compute the probe query: the mean of the latest queries, weighted by their activation bias.

    The activation bias of a query is its squared distance from the unweighted mean, divided by the
    sum of these distances over all queries. If all queries are equal, they get equal weights.

    Args:
        window: The latest `W` queries, float32 `[B, H, W, D]`.
        counted: Bool `[B, W]`, True for queries to include, at least one in each sequence.

    Returns:
        Float32 `[B, H, D]`.
    """
    counts = counted[:, None, :, None].to(window.dtype)
    alike = counts / counts.sum(2, keepdim=True)
    mean = (window * alike).sum(2, keepdim=True)
    bias = (window - mean).square().sum(-1, keepdim=True) * counts
    total = bias.sum(2, keepdim=True)
    weights = torch.where(total > 0, bias / total, alike)
    return (weights * window).sum(2)
