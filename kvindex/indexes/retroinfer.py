"""RetroInfer: selects the tokens of the best clusters, and summaries of the next best clusters.

A summary is one row, with the mean key and the mean value of the cluster. In attention, this row
has the weight of as many tokens as the cluster contains.

Chen et al., RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference
(arXiv 2505.02922): the wave index and its three zones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.clusters import ClusteredIndex, Plan
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Hits, Rows
from kvindex.ops import group
from kvindex.ops import units as unit_rows

ESTIMATED = 0.446
"""Fraction of the returned rows that are summaries of clusters: `.232 / (.018 · 16 + .232)`.

The paper returns all tokens of 1.8% of the clusters (16 rows each), and summaries of 23.2%.
"""


@dataclass(frozen=True)
class RetroInferConfig:
    """Options of RetroInfer. The defaults are those of the paper.

    Args:
        per_cluster: Average number of keys in a cluster.
        segment: Number of tokens of the prompt that are clustered together.
        block: Number of tokens after the prompt that are clustered together.
        estimated: Fraction of the `k` returned rows that are summaries of clusters, in [0, 1).
        centered: True if the mean of the keys that are clustered together is subtracted from them
            before clustering.
        iterations: Maximum number of k-means iterations.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the starting points of k-means.
    """

    per_cluster: int = 16
    segment: int = 8192
    block: int = 1024
    estimated: float = ESTIMATED
    centered: bool = True
    iterations: int = 10
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("per_cluster", "segment", "block"):
            check.at_least(name, getattr(self, name), 1)
        check.below_one("estimated", self.estimated)
        check.flag("centered", self.centered)
        check.at_least("iterations", self.iterations, 0)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed)


class RetroInfer(ClusteredIndex):
    """Selects all tokens of the best clusters, and a summary of each of the next best clusters.

    Clusters are ranked by the inner product of the query and the cluster's mean key. A summary is
    one row with the mean key, the mean value, and the log weight `log(n)` for a cluster of `n`
    tokens. A cluster is returned either completely or as a summary. In `Hits.scores`, all rows of a
    cluster have the cluster's score.

    Source: Chen et al., RetroInfer (arXiv 2505.02922).
    """

    Config = RetroInferConfig
    weighted = True
    means_of_values = True

    def _plan(self) -> Plan:
        c = self.config
        return Plan(c.segment, c.per_cluster, c.block, max(round(c.block / c.per_cluster), 1))

    def _labels(self, keys: Tensor, clusters: int) -> Tensor:
        if self.config.centered:
            keys = keys - keys.double().mean(1, keepdim=True).float()
        return super()._labels(keys, clusters)

    def _search(self, queries: Tensor, k: int) -> Hits:
        units = self._units()
        scores = self._scores(self._estimates(queries, units), units)
        best, taken = self.ops.select.top_k(scores, min(k, scores.shape[-1]))
        sizes = unit_rows.at(units.sizes, taken, 0).long()  # [B, G, W]
        exact = self._exact(sizes, (units.sizes > 0).sum(-1, keepdim=True), k)
        slot, offset = self.ops.units.walk(torch.where(exact, sizes, sizes.clamp_max(1)), k)
        unit, size = unit_rows.at(taken, slot, UNUSED), unit_rows.at(sizes, slot, 1)
        summary = (unit >= 0) & (unit < units.starts.shape[-1]) & ~unit_rows.at(exact, slot, 0)
        rows = unit_rows.rows_at(unit, offset, units.starts, units.members, units.singles)
        ids = torch.where(summary, UNUSED - 1 - unit, rows)
        weights = size.float().log().masked_fill(~summary, 0.0)
        weights = weights.repeat_interleave(self.geometry.group_size, dim=1)
        hits: Hits = self.ops.units.ranked(ids, unit_rows.at(best, slot, float("-inf")), weights)
        return hits

    def _exact(self, sizes: Tensor, units: Tensor, k: int) -> Tensor:
        """Choose how many of the best units to return completely, instead of as summaries.

        A unit is a cluster or a token that is not clustered yet. Some of the `k` rows are reserved
        for summaries, and complete units get the other rows:

        - Units are returned completely as long as some of these other rows are free. The last
          complete unit may also take reserved rows. Otherwise the best cluster, which has most of
          the attention weight, would become a summary if it is large.
        - If summaries of all remaining units do not fill the `k` rows, more units are returned
          completely.

        Args:
            sizes: Number of tokens of the units, best first, int64 `[B, G, W]`.
            units: Total number of units, `[B, G, 1]`.
            k: Number of requested rows.

        Returns:
            True for units that are returned completely, bool `[B, G, W]`.
        """
        ends = sizes.cumsum(-1)
        after = units - torch.arange(1, sizes.shape[-1] + 1, device=sizes.device)
        rows = k - int(self.config.estimated * k)
        begun = (ends - sizes < rows) & (ends <= k)
        return begun | (ends + after.clamp_min(0) <= k)

    def _summaries(self) -> Rows | None:
        if not self._learned or not self._learned["sizes"].shape[-1]:
            return None
        return Rows(self._learned["centroids"], self._learned["means"])
