"""RetroInfer: rows of the best clusters, and one weighted centroid row for each of the next.

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
"""Share of rows read that represent clusters: of published 1.8% of clusters with 16 keys each and
23.2% with one row each, .232 / (.018 · 16 + .232)."""


@dataclass(frozen=True)
class RetroInferConfig:
    """Configuration of RetroInfer; the defaults are the published ones.

    per_cluster: keys per cluster, on average.
    segment: tokens of the prompt that are clustered together.
    block: later tokens that are clustered together.
    estimated: share of the `k` slots that represent whole clusters, in [0, 1).
    centered: whether the mean of keys that are clustered together is subtracted first.
    iterations: of k-means, at most; seed: of its starting points.
    group: how query heads agree (`kvindex.ops.group`).
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
    """Ranks clusters by `q·c`: whole ones exactly, then one row `(c, mean value)` for each of the
    next, with `log_weight = log(size)`; a cluster is never in both parts, nor cut.

    Hits' scores: what `group.agree` returns for `q·c`, the same for all rows of a cluster.
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
        """Whether the best units return all their rows: a prefix, bool `[B, G, W]`.

        sizes: of the units, best first, int64 `[B, G, W]`; units: their total number
        `[B, G, 1]`. The last one may go past its share of the slots, as far as k allows: else a
        large best cluster, which holds most of the attention, would be one row. Where the others
        would leave slots unused, more are exact.
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
