"""Squeezed Attention: selects clusters whose estimated attention weight exceeds a threshold.

Hooper et al., Squeezed Attention: Accelerating Long Context Length LLM Inference
(arXiv 2411.09688).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.clusters import ClusteredIndex, Plan, Units
from kvindex.bases.prompt_queries import PromptQueries, PromptQueriesIndex, are_real
from kvindex.core import check
from kvindex.core.protocol import Hits
from kvindex.ops import group
from kvindex.ops.attention import cap
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

BINS = 4096
"""Bins of the histogram of attention weights."""

PER_NAT = 64
"""Bins per unit of a weight's natural logarithm. Bins cover weights down to e^-64."""


@dataclass(frozen=True)
class SqueezedConfig:
    """Options of Squeezed Attention.

    Args:
        per_cluster: Average number of keys in a cluster of the prompt (published: 20).
        block: Number of tokens after the prompt that are clustered together, into
            `block / per_cluster` clusters.
        sparsity: Fraction of the keys that the threshold excludes, in [0, 1), on average over heads
            and over the queries by which the threshold is calibrated. 0: no threshold.
        calibration: Number of last queries of the prompt by which the threshold is calibrated
            (published: 100).
        stale: If True, tokens after the prompt are not clustered (published): each of them is a
            cluster of one token.
        iterations: Maximum number of k-means iterations.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the starting points of k-means.
    """

    per_cluster: int = 20
    block: int = 320
    sparsity: float = 0.9
    calibration: int = 100
    stale: bool = False
    iterations: int = 10
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("per_cluster", "block", "calibration"):
            check.at_least(name, getattr(self, name), 1)
        check.below_one("sparsity", self.sparsity)
        check.flag("stale", self.stale)
        check.at_least("iterations", self.iterations, 0)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed)


class Squeezed(PromptQueriesIndex, ClusteredIndex):
    """Selects rows of the clusters whose estimated attention weight per row exceeds a threshold.

    The weight must exceed the threshold for at least one query head of the KV head. A search
    returns the `k` best rows of all such clusters. Before `end_prompt`, or if no query was
    observed, there is no threshold. In `Hits.scores`, all rows of a cluster have the cluster's
    score.

    Source: Hooper et al., Squeezed Attention (arXiv 2411.09688).
    """

    Config = SqueezedConfig

    def _plan(self) -> Plan:
        c = self.config
        blocks = 0 if c.stale else max(round(c.block / c.per_cluster), 1)
        return Plan(None, c.per_cluster, c.block, blocks)

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        units = self._units()
        estimates = self._estimates(queries, units)
        scores = self._scores(estimates, units)
        if "threshold" in self._learned:
            least = self._learned["threshold"][:, None, None, None]
            passes = (self._weights(estimates, units) > least).any(2)
            scores = scores.masked_fill(~passes, float("-inf"))
        parts = units.starts, units.sizes, units.members
        hits: Hits = self.ops.units.best_rows(scores, *parts, k, units.singles)
        return hits

    def _weights(self, estimates: Tensor, units: Units) -> Tensor:
        """Return the log of the estimated attention weight of one row of each unit, `[B, G, g, U]`.

        A unit is a cluster or a token that is not clustered. The estimated weight for unit `i` is
        `e^{q·c_i} / Σ_j n_j e^{q·c_j}`, where unit `j` has `n_j` rows and the mean key `c_j`. The
        weight for a unit without tokens is 0.
        """
        g = self.geometry
        logits = cap(estimates, g.scale, g.softcap)
        logits = logits.masked_fill(estimates == float("-inf"), float("-inf"))
        total = (logits + units.sizes[:, :, None].log()).logsumexp(-1, keepdim=True)
        return logits - total.masked_fill(total == float("-inf"), 0)

    def _layout(self, sizes: StateSizes) -> Layout:
        threshold = TensorSpec("B", torch.float32, optional=True)
        return super()._layout(sizes) | {"learned.threshold": threshold}

    # Calibration

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store the last queries `[B, H, T, D]` of the prompt, to calibrate the threshold.

        Queries after `end_prompt` are ignored. NaN and infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if self.config.sparsity and not self._prompt_ended:
            self._sample_queries(queries, positions, self.config.calibration)

    def end_prompt(self) -> None:
        """End the prompt: compute the threshold from the last queries of the prompt."""
        if not self._prompt_ended and self._observed is not None and len(self):
            self._learned = {**self._learned, "threshold": self._threshold(self._observed)}
        self._prompt_ended, self._observed = True, None

    def _threshold(self, observed: PromptQueries) -> Tensor:
        """Compute the threshold of each sequence, `[B]`, as the logarithm of an attention weight.

        On average over the observed queries and all heads, the attention weights of a fraction
        `sparsity` of the keys do not exceed the threshold.
        """
        units = self._units()
        bins = torch.zeros((len(units.sizes), BINS), dtype=torch.int64, device=units.sizes.device)
        real = are_real(observed.queries)
        for i, position in enumerate(observed.positions.tolist()):
            weights = self._weights(self._estimates(observed.queries[:, :, i], units), units)
            index = (-weights * PER_NAT).floor().clamp(0, BINS - 1).long()
            rows = units.sizes[:, :, None].expand_as(index).long()
            rows = rows * real[:, i, None, None, None]  # padded queries do not count
            if self.valid is not None and position < len(self):
                rows = rows * self.valid[:, position, None, None, None]
            bins.scatter_add_(1, index.flatten(1), rows.flatten(1))
        target = (1 - self.config.sparsity) * bins.sum(1, keepdim=True).double()
        passed: Tensor = (bins.cumsum(1) <= target).sum(1)
        return passed.float().neg() / PER_NAT
