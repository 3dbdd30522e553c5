"""Wrapper that selects the best rows and a random sample of the next best rows.

Attention to only the best `k` rows ignores the attention weight of all other rows. This wrapper
selects the best `k - r` rows, and samples `r` rows from the next best rows that the wrapped index
returned. A row that is sampled with probability `π` gets the log weight `-log π`. So the numerator
and denominator of the softmax are unbiased estimates of the sums over all rows that the wrapped
index returned. docs/decisions/0010 measures the effect on a real model.

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
"""Group policies whose row scores are logarithms of attention weights, as sampling requires."""


class Sample(Wrapper):
    """Selects `k` rows, of which a fraction `share` is a random sample.

    The wrapped index returns the best `pool * k` rows. The best `(1 - share) * k` of these rows are
    always selected, with a log weight of 0. The remaining `share * k` rows are sampled from the
    other rows, by systematic sampling in the order of token ids. So the sample is spread over the
    sequence, and is the same in every run.

    Args:
        inner: The index to wrap. Its hits must not have log weights already.
        share: Fraction of the `k` rows that are sampled, in (0, 1].
        pool: How many of the best rows to sample from, as a multiple of `k`, at least 2.

    Raises:
        ValueError: An option is out of range, the hits of `inner` have log weights (`weighted`), or
            a KV head serves several query heads and the group policy of `inner` is neither
            "mean_share" nor "max_share".
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
            allowed = " or ".join(POLICIES)
            raise ValueError(
                f"inner: got an index with group={policy!r}, allowed group is {allowed}"
            )

    def check_coverage(self, coverage: float) -> None:
        """Raise ValueError, because the coverage of sampled rows cannot be estimated."""
        raise ValueError(f"coverage: got {coverage}, allowed is None, because rows are sampled")

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare the wrapped index for searches, so that the first one is fast.

        The wrapped index is prepared for searches of more than `k` rows, because this wrapper
        selects `k` of them.
        """
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
            k: Rows to select per KV head, including the sampled rows.
            coverage: Must be None.

        Returns:
            Hits with log weights float32 `[B, H, k]`.

        Raises:
            ValueError: An argument does not fit, or `coverage` is not None.
        """
        if coverage is not None:
            self.check_coverage(coverage)
        most = min(check.wanted_rows(k), max(len(self.inner), 1))  # the index has no more rows
        asked = min(self._pool(most, len(self.inner)), check.MOST_ROWS)
        hits = self.inner.search(queries, k=asked)
        self._check_weights(hits.log_weight is not None)
        g = self.geometry
        logits = hits.scores if g.group_size > 1 else cap(hits.scores, g.scale, g.softcap)
        logits = logits.masked_fill(hits.ids == UNUSED, float("-inf"))  # softcap makes -inf finite
        places, weights = self._sampled(logits, hits.ids, most)
        unused, at = places < 0, places.clamp_min(0)
        found = Hits(
            hits.ids.gather(-1, at).masked_fill(unused, UNUSED),
            hits.scores.gather(-1, at).masked_fill(unused, float("-inf")),
            weights.repeat_interleave(g.group_size, dim=1),
        )
        return found if most == k else found.widened(k)

    def _pool(self, k: int, tokens: int) -> int:
        """Return how many rows to request from the wrapped index, in order to select `k` of them.

        `tokens` is the number of tokens in the index.
        """
        return k * self.pool

    def _sampled(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Select `k` of the rows with scores `logits`, and return their positions and log weights.

        The positions refer to the last axis of `logits`.
        """
        runs = capability(self.inner, RunsOps)
        backend = ops if runs is None else runs.ops
        chosen: tuple[Tensor, Tensor] = backend.sampling.sample(logits, ids, k, int(self.share * k))
        return chosen

    def _check_weights(self, weighted: bool) -> None:
        if weighted:
            raise ValueError(
                f"inner: got {type(self.inner).__name__}, whose rows have weights already; pass an "
                "index that does not sample (for pariskv: preset='fast')"
            )
