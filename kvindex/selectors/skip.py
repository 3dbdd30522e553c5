"""Skip blocks of keys whose logits are far below the maximum so far: the rule of BLASST."""

from __future__ import annotations

import math

from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class SkipSelector:
    """Leaves out a block of keys if all its logits are far below the running maximum.

    Blocks are read in ascending order. For a query `q_i`, let `p_ij` be the largest logit of block
    `j`, and `m_ij = max(p_i0, ..., p_ij)` the running maximum. Block `j` is skipped if for every
    query of a block

        p_ij < m_ij - ln(1 / threshold)

    Each weight that is left out is then below `threshold` times the largest weight of its query.

    A kernel that applies this rule inside its running softmax computes all logits, but reads no
    values of skipped blocks. This selector is the specification of such a kernel: it computes the
    exact logits, and costs about half as much as full attention. The own block is always kept and
    does not take part in the maximum.

    Args:
        threshold: Fraction of the largest weight so far below which a weight is negligible, in
            (0, 1].

    Source: Yuan et al., BLASST (arXiv 2512.12087, 2025).
    """

    def __init__(self, threshold: float = 1e-3) -> None:
        self.threshold = check.within("threshold", threshold, 0, 1)

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the keys of each block, `[B, G, n, 128, D]` in their dtype."""
        return base.check_keys(keys).to(keys.dtype)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose the blocks that are not skipped. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=base.all_keys)
        chosen, margin = base.nothing_chosen(queries, summaries), -math.log(self.threshold)
        for i, some, keys in base.blocks_with_keys(queries, summaries, block):
            logits = scale * (some @ keys.mT)  # [B, G, H / G, at most 128, n * 128]
            base.check_finite(queries, summaries, logits)
            peaks = logits.view(*logits.shape[:-1], -1, base.BLOCK).amax(-1)
            read = (peaks >= peaks.cummax(-1).values - margin).any(-2)
            chosen[..., i, : read.shape[-1]] = read
        return base.with_kept(chosen.flatten(1, 2), block)
