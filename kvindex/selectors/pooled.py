"""Score a block of keys by its mean key and the mean query: the query-aware rule of FlexPrefill."""

from __future__ import annotations

from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class PooledSelector:
    """Keeps the blocks of keys with the largest softmax weights of the mean query and mean keys.

    With the mean query `q̄` of a block and the mean key `k̄_j` of each block `j` before it, the
    weight of block `j` is

        w_j = softmax_j(scale * q̄ · k̄_j)

    The selector keeps the smallest set of the largest weights whose sum is at least `mass`, and the
    blocks that are always kept. Block 0 and the block before the own one take part in the softmax.
    The own block does not, unlike in the paper: it is always kept, and its keys may be incomplete.

    The paper uses this rule only for heads whose attention the pooled vectors estimate well, and
    another rule (vertical and slash lines) for the rest. Here it is used for all heads.

    Args:
        mass: Fraction of the softmax weight to keep, in (0, 1]. With 1, all blocks are kept.

    Source: Lai et al., FlexPrefill (ICLR 2025), section 3.2, query-aware index search.
    """

    def __init__(self, mass: float = 0.95) -> None:
        self.mass = check.within("mass", mass, 0, 1)

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the mean key of each block, float32 `[B, G, n, D]`."""
        return base.check_keys(keys).mean(3)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by their softmax weights. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale)
        means = base.mean_queries(queries, summaries.shape[1])
        scores = scale * (means @ summaries.float()[:, :, None].mT)  # [B, G, H / G, QB, KB - 1]
        base.check_finite(queries, summaries, scores)
        QB, before = scores.shape[3:]
        hidden = ~base.candidates(QB, before + 1, block, scores.device)
        # a block of queries without any block before it has only -inf: its weights are 0
        weights = scores.masked_fill(hidden, base.NEVER).softmax(-1).masked_fill(hidden, 0.0)
        return base.with_kept(base.smallest_set(weights, self.mass).flatten(1, 2), block)
