"""Score a block of keys by sums of logits along antidiagonals: the rule of XAttention."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvindex.core import check
from kvindex.selectors import base


class AntidiagonalSelector:
    """Keeps the blocks of keys with the largest weights, estimated from antidiagonals.

    The matrix of logits is divided into tiles of `stride` queries and `stride` keys. The logit of a
    tile is the mean of the logits on its antidiagonal, which every query and every key of the tile
    contributes to once:

        a_xy = scale / stride * Σ_t q_{x * stride + stride - 1 - t} · k_{y * stride + t}

    The softmax over all tiles `y` before the own block gives the weights of a row `x` of tiles. The
    weight of a block is the sum over its tiles, as a mean over the rows. The selector keeps the
    smallest set of the largest weights whose sum is at least `mass`, and the blocks that are always
    kept. If a tile has fewer queries, at the end of the prompt, the mean is over these.

    This costs `1 / stride` of the logits of full attention. Unlike in the paper, the own block has
    no weight, because it is always kept.

    Args:
        mass: Fraction of the softmax weight to keep, in (0, 1]. With 1, all blocks are kept.
        stride: Side of a tile, a power of two from 1 to 128.

    Source: Xu et al., XAttention (ICML 2025), antidiagonal scoring.
    """

    def __init__(self, mass: float = 0.9, stride: int = 16) -> None:
        self.mass = check.within("mass", mass, 0, 1)
        if base.BLOCK % check.at_least("stride", stride, 1):
            raise ValueError(f"stride: got {stride}, allowed is a divisor of {base.BLOCK}")
        self.stride = stride

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the keys of each block, with those of a tile in one row.

        The shape is `[B, G, n, 128 / stride, stride * D]`, the dtype that of the keys.
        """
        blocks = base.check_keys(keys).to(keys.dtype)
        return blocks.reshape(*blocks.shape[:3], *self._one(keys.shape[-1]).values())

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by the weights of their tiles. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=self._one)
        stride, T = self.stride, queries.shape[2]
        tiles = base.split(base.grouped(queries, summaries.shape[1]), stride).flip(-2).flatten(-2)
        sizes = base.part_sizes(T, stride, queries.device)
        keys = summaries.float().flatten(2, 3)[:, :, None]  # [B, G, 1, (KB - 1) * tiles, ...]
        logits = scale * (tiles @ keys.mT) / sizes[:, None]
        base.check_finite(queries, summaries, logits)
        per_block = base.BLOCK // stride
        rows = base.split(logits, per_block)  # [B, G, H / G, QB, rows, (KB - 1) * tiles]
        QB, before = rows.shape[3], summaries.shape[2]
        hidden = ~base.candidates(QB, before + 1, block, queries.device)
        hidden = hidden.repeat_interleave(per_block, 1)[:, None]
        weights = rows.masked_fill(hidden, base.NEVER).softmax(-1).masked_fill(hidden, 0.0)
        # rows of tiles after the last query are padding
        real = base.split(sizes[:, None], per_block) > 0  # [QB, rows, 1]
        weights = weights.view(*weights.shape[:-1], before, per_block).sum(-1)
        weights = weights.masked_fill(~real, 0.0).sum(-2)
        return base.with_kept(base.smallest_set(weights, self.mass).flatten(1, 2), block)

    def _one(self, D: int) -> Mapping[str, int]:
        """Return the shape of the summary of one block."""
        return {"tiles": base.BLOCK // self.stride, "stride * D": self.stride * D}
