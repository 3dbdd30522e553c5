"""Score a block of keys by its exact attention weight, as the best possible selector."""

from __future__ import annotations

from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class OracleSelector:
    """Keeps the blocks of keys with the largest exact attention weights.

    The weight of block `j` is the mean over the queries `q_i` of a block of

        Σ_{k in block j} softmax_k(scale * q_i · k)

    where the softmax is over all keys before the own block. The selector keeps the smallest set of
    the largest weights whose sum is at least `mass`, and the blocks that are always kept.

    This costs as much as full attention. It shows how close another selector comes to the best
    choice of the same number of blocks.

    Args:
        mass: Fraction of the attention weight to keep, in (0, 1]. With 1, all blocks are kept.
    """

    def __init__(self, mass: float = 0.95) -> None:
        self.mass = check.within("mass", mass, 0, 1)

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the keys of each block, `[B, G, n, 128, D]` in their dtype."""
        return base.check_keys(keys).to(keys.dtype)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by their attention weights. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=base.all_keys)
        chosen = base.nothing_chosen(queries, summaries)
        for i, some, keys in base.blocks_with_keys(queries, summaries, block):
            logits = scale * (some @ keys.mT)  # [B, G, H / G, at most 128, n * 128]
            base.check_finite(queries, summaries, logits)
            rows = logits.softmax(-1).mean(-2)
            weights = rows.view(*rows.shape[:-1], -1, base.BLOCK).sum(-1)
            chosen[..., i, : weights.shape[-1]] = base.smallest_set(weights, self.mass)
        return base.with_kept(chosen.flatten(1, 2), block)
