"""Score a block of keys by the exact attention weights of some queries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class SampledSelector:
    """Keeps the blocks of keys with the largest attention weights of a sample of queries.

    Of each block of 128 queries, every `128 / queries`-th query is taken. The weight of block `j`
    of keys is the mean over these queries `q_i` of

        Σ_{k in block j} softmax_k(scale * q_i · k)

    where the softmax is over all keys before the own block. This is an unbiased estimate of the
    block's attention weight. Unlike mean keys, it finds a block of which a single key has most of
    the weight. The selector keeps the smallest set of the largest weights whose sum is at least
    `mass`, and the blocks that are always kept.

    Args:
        mass: Fraction of the attention weight to keep, in (0, 1]. With 1, all blocks are kept.
        queries: Number of queries of a block that are taken, a divisor of 128.
    """

    def __init__(self, mass: float = 0.95, queries: int = 32) -> None:
        self.mass = check.within("mass", mass, 0, 1)
        self.queries = check.at_least("queries", queries, 1)
        if base.BLOCK % queries:
            raise ValueError(f"queries: got {queries}, allowed is a divisor of {base.BLOCK}")

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the keys of each block, `[B, G, n, 128, D]` in their dtype."""
        return base.check_keys(keys).to(keys.dtype)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by the attention weights of some queries. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=base.all_keys)
        chosen, step = base.nothing_chosen(queries, summaries), base.BLOCK // self.queries
        for i, some, keys in base.blocks_with_keys(queries, summaries, block):
            taken = torch.arange(step - 1, base.BLOCK, step, device=some.device)
            logits = scale * (some[..., taken.clamp(max=some.shape[-2] - 1), :] @ keys.mT)
            base.check_finite(queries, summaries, logits)
            rows = logits.softmax(-1).mean(-2)
            weights = rows.view(*rows.shape[:-1], -1, base.BLOCK).sum(-1)
            chosen[..., i, : weights.shape[-1]] = base.smallest_set(weights, self.mass)
        return base.with_kept(chosen.flatten(1, 2), block)
