"""RetroInfer: returns the tokens of the best clusters, and one weighted row for each next cluster.

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
"""Fraction of the returned rows that represent clusters: `.232 / (.018 · 16 + .232)`.

The paper returns 1.8% of the clusters token by token (16 rows each), and 23.2% as one row each.
"""


@dataclass(frozen=True)
class RetroInferConfig:
    """Options of RetroInfer. The defaults are the published ones.

    Args:
        per_cluster: Average keys per cluster.
        segment: Tokens of the prompt that are clustered together.
        block: Number of later tokens that are clustered together.
        estimated: Fraction of the `k` slots that represent whole clusters, in [0, 1).
        centered: Whether to subtract, before clustering, the mean of the keys that are clustered
            together.
        iterations: Maximum number of k-means iterations.
        group: How the query heads of a group agree (`kvindex.ops.group`).
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
    """Ranks clusters by `q·c`; returns the best ones token by token, and the next as one row each.

    Here `c` is the mean key of a cluster. A cluster that is one row has the key `c`, the mean
    value, and `log_weight = log(size)`. No cluster is in both parts, and none is cut. In
    `Hits.scores`, all rows of a cluster have the cluster's score.

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
        """Return flags of the best units that are returned token by token, bool `[B, G, W]`.

        They are a prefix of the units. The last of them may take more slots than are reserved for
        single tokens, if `k` allows. Otherwise a large best cluster, which has most of the
        attention weight, would become a single row. If the remaining clusters, at one row each,
        would leave slots unused, more units are returned token by token.

        Args:
            sizes: Tokens of the units, best first, int64 `[B, G, W]`.
            units: Total number of units, `[B, G, 1]`.
            k: Slots.
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
