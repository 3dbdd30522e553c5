"""Compare each block's score with the largest score: the rule of FlashPrefill."""

from __future__ import annotations

import math

from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class MaxThresholdSelector:
    """Keeps the blocks of keys whose score is at least a fraction of the largest score.

    With the queries `q_i` of a block and the mean key `k̄_j` of each block `j` before it, the score
    of block `j` is

        s_j = Σ_i exp(scale * q_i · k̄_j)

    The selector keeps the blocks with `s_j >= threshold * max_j s_j`, and the blocks that are
    always kept. It needs neither sorting nor sums of weights. Scores are computed as logarithms,
    so they do not overflow.

    Unlike in the paper's code, the own block has no score: it is always kept, and its keys may be
    incomplete. That code always keeps 2 blocks at the start and 4 blocks up to the own block, here
    it is 1 and 2.

    Args:
        threshold: Fraction of the largest score that a block must reach, in (0, 1].

    Source: Fan et al., FlashPrefill (arXiv 2603.06199, 2026), as in the published code.
    """

    def __init__(self, threshold: float = 0.1) -> None:
        self.threshold = check.within("threshold", threshold, 0, 1)

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the mean key of each block, float32 `[B, G, n, D]`."""
        return base.check_keys(keys).mean(3)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by comparison with the largest score. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale)
        means = summaries.float()[:, :, None]  # [B, G, 1, KB - 1, D]
        logits = scale * (base.grouped(queries, summaries.shape[1]) @ means.mT)
        base.check_finite(queries, summaries, logits)
        scores = base.split(logits, value=base.NEVER).logsumexp(-2)  # [B, G, H / G, QB, KB - 1]
        QB, before = scores.shape[3:]
        if before:
            hidden = ~base.candidates(QB, before + 1, block, scores.device)
            scores = scores.masked_fill(hidden, base.NEVER)
            largest = scores.amax(-1, keepdim=True)
            scores = scores - largest.masked_fill(largest == base.NEVER, 0.0)
        return base.with_kept((scores >= math.log(self.threshold)).flatten(1, 2), block)
