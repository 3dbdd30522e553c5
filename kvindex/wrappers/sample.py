"""Some of the `k` rows are drawn at random and weighted for all that are left out.

The best `k` rows are not the best use of `k` reads: attention over them alone takes the missing
share for nothing. Here the best `k - r` rows are kept, and `r` are drawn from the inner index's
next best, each with a known probability `π` and a log-weight of `-log π` (Horvitz and Thompson,
1952), so that numerator and denominator of the softmax over that pool are right on average. What it
gains on a real model: docs/decisions/0010.
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
"""Whose scores are logarithms of shares."""


class Sample(Wrapper):
    """`share` of the `k` rows are drawn from the `pool · k` best of the inner index.

    Hits' `log_weight` is 0 for the rows that are sure. Drawing is systematic, in order of ids, so
    that the rows drawn are spread over the sequence and the same from run to run.

    Raises ValueError for sizes out of range, for an index whose rows have weights of their own
    (`weighted`), and for one whose scores are no shares
    (`group` other than `mean_share` and `max_share`, unless groups have one head).
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
        """Raises ValueError: what is drawn at random has no share."""
        raise ValueError(
            f"coverage: got {coverage}, allowed is None where rows are drawn at random"
        )

    def warm_up(self, *, k: int, tokens: int) -> None:
        """As the inner index does, for the rows that this one draws from."""
        g = self.geometry
        super().warm_up(k=self._pool(k, tokens), tokens=tokens)
        if self.capability(Attends) is not None:
            batch = len(self.counts)
            queries = torch.zeros((batch, g.q_heads, g.head_dim), dtype=g.dtype, device=g.device)
            self.attend(queries, ResidentRows(g, batch, 1), k=k)

    def search(self, queries: Tensor, *, k: int, coverage: float | None = None) -> Hits:
        """The best rows and some that stand for the rest.

        Raises ValueError for a coverage.
        """
        if coverage is not None:
            self.check_coverage(coverage)
        most = min(check.wanted_rows(k), max(len(self.inner), 1))  # of more all are sure
        asked = min(self._pool(most, len(self.inner)), check.MOST_ROWS)
        hits = self.inner.search(queries, k=asked)
        self._check_weights(hits.log_weight is not None)
        g = self.geometry
        logits = hits.scores if g.group_size > 1 else cap(hits.scores, g.scale, g.softcap)
        logits = logits.masked_fill(hits.ids == UNUSED, float("-inf"))  # a softcap makes it finite
        places, weights = self._sampled(logits, hits.ids, most)
        unused, at = places < 0, places.clamp_min(0)
        found = Hits(
            hits.ids.gather(-1, at).masked_fill(unused, UNUSED),
            hits.scores.gather(-1, at).masked_fill(unused, float("-inf")),
            weights.repeat_interleave(g.group_size, dim=1),
        )
        return found if most == k else found.widened(k)

    def _pool(self, k: int, tokens: int) -> int:
        """Rows to draw `k` from, of an index that holds so many tokens."""
        return k * self.pool

    def _sampled(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As `ops.sampling.draw`."""
        runs = capability(self.inner, RunsOps)
        backend = ops if runs is None else runs.ops
        chosen: tuple[Tensor, Tensor] = backend.sampling.draw(logits, ids, k, int(self.share * k))
        return chosen

    def _check_weights(self, weighted: bool) -> None:
        if weighted:
            raise ValueError(
                f"inner: got {type(self.inner).__name__}, whose rows stand for others already; "
                "allowed is an index that selects rows (of pariskv preset='fast')"
            )
