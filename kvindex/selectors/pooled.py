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

    There are three differences to the paper:

    - The own block has no weight, because it is always kept and its keys may be incomplete.
    - Each block of queries has its own set, so that a prompt can be read in chunks. The paper takes
      one set from the weights of all blocks of queries of a head.
    - All heads use this rule. The paper uses another rule (vertical and slash lines) for heads
      whose attention the mean vectors do not estimate well.

    Args:
        mass: Fraction of the softmax weight to keep, in (0, 1]. With 1, all blocks are kept.

    Source: Lai et al., FlexPrefill (ICLR 2025), query-aware index search.
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
        weights = base.softmax_before(scores, block)
        return base.with_kept(base.smallest_set(weights, self.mass).flatten(1, 2), block)
