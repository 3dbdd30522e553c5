"""Keep vertical and slash lines of the attention weights: the main pattern of MInference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core import check
from kvindex.selectors import base

LAST = 64
"""Number of queries at the end of a block from which its lines are estimated."""


class VerticalSlashSelector:
    """Keeps the blocks of keys that the largest vertical and slash lines of a block cross.

    The attention weights of the last 64 queries of a block to all keys before the block are
    computed exactly. A *vertical* line is one key, read by all queries. A *slash* line is one
    distance between query and key. The weight of a line is the mean over the 64 queries. The
    selector keeps the smallest set of vertical lines whose sum is at least `vertical`, and the
    smallest set of slash lines whose sum is at least `slash`. Then it extends the lines to all
    queries of the block, and keeps every block of keys that contains a part of one.

    The paper estimates the lines once, from the last 64 queries of the prompt, and keeps a number
    of them that is chosen for each head beforehand. Here each block of queries has its own lines,
    so that a prompt can be read in chunks. Block 0 and the block before the own one, which are
    always kept, contain most of the lines that the paper's code always keeps.

    This costs half of the logits of full attention.

    Args:
        vertical: Fraction of the attention weight in vertical lines to keep, in (0, 1].
        slash: Fraction of the attention weight in slash lines to keep, in (0, 1].

    Source: Jiang et al., MInference 1.0 (NeurIPS 2024), vertical-slash pattern.
    """

    def __init__(self, vertical: float = 0.5, slash: float = 0.3) -> None:
        self.vertical = check.within("vertical", vertical, 0, 1)
        self.slash = check.within("slash", slash, 0, 1)

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the keys of each block, `[B, G, n, 128, D]` in their dtype."""
        return base.check_keys(keys).to(keys.dtype)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by the lines that cross them. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=base.all_keys)
        chosen = base.nothing_chosen(queries, summaries)
        for i, some, keys in base.blocks_with_keys(queries, summaries, block):
            logits = scale * (some[..., -LAST:, :] @ keys.mT)  # [B, G, H / G, at most 64, n * 128]
            base.check_finite(queries, summaries, logits)
            weights = logits.softmax(-1)
            vertical = base.smallest_set(weights.mean(-2), self.vertical)
            crossed = vertical.view(*vertical.shape[:-1], -1, base.BLOCK).any(-1)
            slash = base.smallest_set(slash_sums(weights), self.slash)
            crossed = crossed | slash_blocks(slash, some.shape[-2])
            chosen[..., i, : crossed.shape[-1]] = crossed
        return base.with_kept(chosen.flatten(1, 2), block)


def slash_sums(weights: Tensor) -> Tensor:
    """Add up weights along slash lines.

    Args:
        weights: Weights of `R` successive queries to `K` keys, `[..., R, K]`.

    Returns:
        Sums `[..., R + K - 1]`. Entry `c` is the line through key `c` of the last query. In this
        count, earlier queries' keys are shifted: query `R - 1 - r` has key `c - r`.
    """
    R, K = weights.shape[-2:]
    # in rows that are one longer than their distance in memory, each row moves by one more place
    wide = pad(weights.flip(-2), (0, R)).flatten(-2)[..., : R * (K + R - 1)]
    return wide.view(*weights.shape[:-2], R, K + R - 1).sum(-2)


def slash_blocks(kept: Tensor, T: int) -> Tensor:
    """Return which blocks of keys before a block of queries contain a part of a slash line.

    Args:
        kept: Which lines are kept, bool `[..., R + K - 1]`, in the order of `slash_sums`. The `K`
            keys are all those before the block.
        T: Number of queries of the block. The `R` queries of `slash_sums` are the last of them.

    Returns:
        Bool `[..., K / 128]`.
    """
    lines = kept.shape[-1]
    K = lines + 1 - min(T, LAST)
    # the last query of the block has key c, so the first query has key c - (T - 1)
    last = torch.arange(lines, device=kept.device)
    crossed = torch.zeros(*kept.shape[:-1], K // base.BLOCK + 1, device=kept.device)
    for key in (last, last - (T - 1)):  # at most 128 keys, so the ends are in all blocks crossed
        there = torch.where((key >= 0) & (key < K), key // base.BLOCK, K // base.BLOCK)
        crossed.index_add_(-1, there, kept.float())
    return crossed[..., :-1] > 0
