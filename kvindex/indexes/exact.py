"""Exact search: computes the inner product with every key. Other indexes are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits, SearchesShard
from kvindex.ops import group
from kvindex.ops.attention import cap
from kvindex.ops.coverage import log_weights, within

BLOCK = 16_384
"""Tokens scored at a time; bounds what is copied at once from the host."""


@dataclass(frozen=True)
class ExactConfig:
    """Options of exact search.

    Args:
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.one_of("group", self.group, group.POLICIES)


class Exact(BaseIndex):
    """Ranks all keys by their exact inner products with the query, computed in float32.

    The keys are read from the row store, so the index stores no codes. `Hits.scores` contains the
    exact `q·k`, combined over the query heads that share a KV head (option `group`).

    Source: Qi et al., ParisKV (ICML 2026), equation 1.
    """

    Config = ExactConfig

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    def _offers(self, wanted: type) -> bool:
        if wanted is SearchesShard:  # ranks in the lists of different shards cannot be compared
            return self.geometry.group_size == 1 or self.config.group != "union"
        return super()._offers(wanted)

    def _search(self, queries: Tensor, k: int) -> Hits:
        return self._ranked(queries, k)[0]

    def search_shard(self, queries: Tensor, *, k: int, total: Callable[[Tensor], Tensor]) -> Hits:
        """Search this index as one shard of a larger index.

        The scores can be compared with those of the other shards.

        `kvindex.core.protocol.SearchesShard.search_shard` describes the arguments.
        """
        check.wanted_rows(k)
        g, policy = self.geometry, self.config.group
        self._check_tensor("queries", queries, {"B": self._batch, "H": g.q_heads, "D": g.head_dim})
        self._check_finite("queries", queries)
        agreed = self.scores(group.fold(queries.detach(), g.kv_heads, policy))
        if agreed.shape[2] > 1:
            none = agreed.isneginf()
            logits = cap(agreed, g.scale, g.softcap).masked_fill(none, float("-inf"))
            log_weights = logits - total(logits.logsumexp(-1))[..., None]
            agreed = group.combine(log_weights, policy)[:, :, None].masked_fill(none, float("-inf"))
        best, ids = self.ops.select.top_k(agreed[:, :, 0], k)
        return Hits(ids, best)

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        hits, scores = self._ranked(queries, k)
        known = log_weights(scores, None, scale=self.geometry.scale, softcap=self.geometry.softcap)
        return within(hits, hits.ids, known, known.logsumexp(-1), coverage)

    def _ranked(self, queries: Tensor, k: int) -> tuple[Hits, Tensor]:
        """Return the `k` rows per KV head with the best scores, and the `q·k` of all tokens."""
        g, policy = self.geometry, self.config.group
        scores = self.scores(group.fold(queries, g.kv_heads, policy))
        agreed = self.ops.group.agree(scores, policy, scale=g.scale, softcap=g.softcap)
        best, ids = self.ops.select.top_k(agreed, k)
        return Hits(ids, best), scores

    def _scanned(self) -> list[Tensor]:
        return [rows.keys for _, rows in self._store.blocks(BLOCK)]

    def scores(self, queries: Tensor) -> Tensor:
        """Compute `q·k` for every token.

        Args:
            queries: Float32 `[B, G, g, D]`.

        Returns:
            Float32 `[B, G, g, N]`, `-inf` for invalid tokens.
        """
        parts = [queries @ rows.keys.float().mT for _, rows in self._store.blocks(BLOCK)]
        scores = torch.cat([queries.new_empty(*queries.shape[:-1], 0), *parts], dim=-1)
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid[:, None, None], float("-inf"))
        return scores
