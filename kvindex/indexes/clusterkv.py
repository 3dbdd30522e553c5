"""ClusterKV: selects whole clusters of keys with similar directions, which k-means finds.

Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression
(arXiv 2412.03213).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvindex.bases.clusters import ClusteredIndex, Plan
from kvindex.core import check
from kvindex.core.protocol import Hits
from kvindex.ops import group


@dataclass(frozen=True)
class ClusterKVConfig:
    """Options of ClusterKV. The defaults are those of the paper.

    Args:
        per_cluster: Average number of keys in a cluster of the prompt.
        block: Number of tokens after the prompt that are clustered together.
        block_clusters: Number of clusters into which these `block` tokens are divided.
        iterations: Maximum number of k-means iterations.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the starting points of k-means.
    """

    per_cluster: int = 80
    block: int = 320
    block_clusters: int = 8
    iterations: int = 10
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        check.at_least("per_cluster", self.per_cluster, 1)
        check.at_least("block", self.block, 1)
        if check.at_least("block_clusters", self.block_clusters, 1) > self.block:
            raise ValueError(
                f"block_clusters: got {self.block_clusters}, allowed is 1 to {self.block}, the "
                "value of block"
            )
        check.at_least("iterations", self.iterations, 0)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed)


class ClusterKV(ClusteredIndex):
    """Selects whole clusters by the inner product of the query and the mean of a cluster's keys.

    In `Hits.scores`, all rows of a cluster have the cluster's score.

    Source: Liu et al., ClusterKV (arXiv 2412.03213).
    """

    Config = ClusterKVConfig

    def _plan(self) -> Plan:
        c = self.config
        return Plan(None, c.per_cluster, c.block, c.block_clusters)

    def _search(self, queries: Tensor, k: int) -> Hits:
        units = self._units()
        scores = self._scores(self._estimates(queries, units), units)
        hits: Hits = self.ops.units.best_rows(
            scores, units.starts, units.sizes, units.members, k, units.singles
        )
        return hits
