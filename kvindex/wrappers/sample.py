"""Wrapper that samples some of the `k` rows. Their weights make up for the rows that are left out.

Attention over only the best `k` rows treats the attention weight of all other rows as zero. Here
the best `k - r` rows are always selected, and `r` rows are sampled from the next best rows of the
inner index. A row that is sampled with probability `π` has a log weight of `-log π`, so that
numerator and denominator of the softmax over all these rows are unbiased. docs/decisions/0010
measures the effect on a real model.

Source: Horvitz and Thompson, A Generalization of Sampling Without Replacement (1952).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex import ops
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    UNUSED,
    Attends,
    Hits,
    KVIndex,
    ReportsCoverage,
    RunsOps,
    WeighsRows,
)
from kvindex.core.resident import ResidentRows
from kvindex.ops.attention import cap
from kvindex.wrappers.base import Wrapper

POLICIES = ("mean_share", "max_share")
"""Group policies whose scores are logarithms of attention weights."""


class Sample(Wrapper):
    """Samples a fraction `share` of the `k` rows from the `pool · k` best of the inner index.

    Rows that are always chosen have a log weight of 0. Sampling is systematic in the order of ids,
    so the sampled rows are spread over the sequence and are the same from run to run.

    Args:
        inner: The index to wrap. Its rows must not have weights already.
        share: Fraction of the `k` rows that are sampled, in (0, 1].
        pool: Number of best rows to choose and sample from, as a multiple of `k`, at least 2.

    Raises:
        ValueError: An option is out of range, rows of `inner` have weights (`weighted`), or its
            group policy is not "mean_share" or "max_share" although groups have several heads.
    """

    own = frozenset({ReportsCoverage, WeighsRows})
    weighted = True

    def __init__(self, inner: KVIndex, *, share: float = 0.5, pool: int = 8) -> None:
        super().__init__(inner)
        self.share = check.within("share", share, 0, 1)
        self.pool = check.at_least("pool", pool, 2)
        self._check_weights(capability(inner, WeighsRows) is not None)
        policy = getattr(inner.config, "group", None)
        if inner.geometry.group_size > 1 and policy not in POLICIES:
            raise ValueError(f"inner: got one with group={policy!r}, allowed is {list(POLICIES)}")

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError, because coverage cannot be estimated for sampled rows."""
        raise ValueError(
            f"coverage: got {coverage}, allowed is None where rows are sampled at random"
        )

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare searches of the inner index for all rows that are sampled from."""
        g = self.geometry
        super().warm_up(k=self._pool(k, tokens), tokens=tokens)
        if self.capability(Attends) is not None:
            batch = len(self.counts)
            queries = torch.zeros((batch, g.q_heads, g.head_dim), dtype=g.dtype, device=g.device)
            self.attend(queries, ResidentRows(g, batch, 1), k=k)

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """Return the best rows, and a sample of the next best rows.

        Args:
            queries: `[B, H, D]`.
            k: Rows per KV head, including the sampled rows.
            coverage: Must be None.

        Returns:
            Hits with log weights float32 `[B, H, k]`.

        Raises:
            ValueError: An argument does not fit, or `coverage` is not None.
        """
        if coverage is not None:
            self.check_coverage(coverage)
        most = min(check.wanted_rows(k), max(len(self.inner), 1))  # with more, all rows are chosen
        asked = min(self._pool(most, len(self.inner)), check.MOST_ROWS)
        hits = self.inner.search(queries, k=asked)
        self._check_weights(hits.log_weight is not None)
        g = self.geometry
        logits = hits.scores if g.group_size > 1 else cap(hits.scores, g.scale, g.softcap)
        logits = logits.masked_fill(hits.ids == UNUSED, float("-inf"))  # a softcap made it finite
        places, weights = self._sampled(logits, hits.ids, most)
        unused, at = places < 0, places.clamp_min(0)
        found = Hits(
            hits.ids.gather(-1, at).masked_fill(unused, UNUSED),
            hits.scores.gather(-1, at).masked_fill(unused, float("-inf")),
            weights.repeat_interleave(g.group_size, dim=1),
        )
        return found if most == k else found.widened(k)

    def _pool(self, k: int, tokens: int) -> int:
        """Return the number of rows from which `k` are chosen, in an index with `tokens` tokens."""
        return k * self.pool

    def _sampled(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Choose rows with `ops.sampling.sample`, and return their positions and log weights."""
        runs = capability(self.inner, RunsOps)
        backend = ops if runs is None else runs.ops
        chosen: tuple[Tensor, Tensor] = backend.sampling.sample(logits, ids, k, int(self.share * k))
        return chosen

    def _check_weights(self, weighted: bool) -> None:
        if weighted:
            raise ValueError(
                f"inner: got {type(self.inner).__name__}, whose rows have weights already; "
                "allowed is an index without sampling (for pariskv: preset='fast')"
            )
