"""Score a block of keys by estimates for each key, from the sign codes of an index."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.ops import codes, transform
from kvindex.selectors import base

SEED = 0
"""Seed of the rotation."""


class IndexSelector:
    """Keeps the blocks of keys with the largest weights, estimated from signs of all keys.

    The summary of a block is what ParisKV stores for search: the mean key `c`, and for each key the
    signs `s_k` of its rotated difference from the mean, and one weight `w_k` (`ops.codes.encode`
    without magnitude bits). With the rotation `R`, the estimate of a logit is

        e_k = scale * (q · c + w_k * level * Σ_d s_kd (R q)_d)

    where `level` is the mean absolute value of a coordinate. `q` is the last query of each of the
    `samples` equal parts of a block of queries. The softmax over the estimates for all keys before
    the own block gives the weight of each key for this query. The weight of a block is the sum over
    its keys, as a mean over the sampled queries. The selector keeps the smallest set of the largest
    weights whose sum is at least `mass`, and the blocks that are always kept.

    Unlike the mean key alone, the signs show which blocks contain single keys with large logits.
    Queries are sampled instead of averaged, because the mean of several queries has smaller logits
    than each of them. The cost is `samples / 128` of the logits of full attention, with keys of one
    bit per number.

    Args:
        mass: Fraction of the softmax weight to keep, in (0, 1]. With 1, all blocks are kept.
        samples: Number of queries that are sampled from a block of 128 queries, a power of two from
            1 to 128.

    Source: Qi et al., ParisKV (ICML 2026), sections A.1 to A.3, for the codes.
    """

    def __init__(self, mass: float = 0.9, samples: int = 8) -> None:
        self.mass = check.within("mass", mass, 0, 1)
        if base.BLOCK % check.at_least("samples", samples, 1):
            raise ValueError(f"samples: got {samples}, allowed is a divisor of {base.BLOCK}")
        self.samples = samples

    def summarize(self, keys: Tensor) -> Tensor:
        """Return the mean, the signs and the weights of each block as bytes, `[B, G, n, bytes]`.

        The bytes of a block are: the mean key, bfloat16 `[D]`; the weights `w_k * level`, bfloat16
        `[128]`; the signs, one bit each, `[128, D / 8]`.
        """
        blocks, D = base.check_keys(keys), keys.shape[-1]
        if D % codes.SUBSPACE:
            raise ValueError(f"keys: got D={D}, allowed is a multiple of {codes.SUBSPACE}")
        if blocks.shape[2] == 0:
            return keys.new_empty((*blocks.shape[:3], *_bytes(D).values()), dtype=torch.uint8)
        means = blocks.mean(3).bfloat16()
        directions, norms = transform.normalize(blocks - means.float()[:, :, :, None])
        rotated = transform.rotate(directions, _rotation(D, keys.device))
        levels = codes.levels(D, 0, keys.device)
        found = codes.encode(rotated, norms, levels, block=D)
        weights = (found["weights"][..., 0] * levels).bfloat16()
        parts = means.view(torch.uint8), weights.view(torch.uint8), found["signs"].flatten(3)
        return torch.cat(parts, -1)

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose blocks by the estimated weights of their keys. See `BlockSelector.choose`."""
        summaries, block = base.check_choose(queries, summaries, first, scale, one=_bytes)
        check.tensor("summaries", summaries, dict.fromkeys("BGmS"), torch.uint8)
        means, weights, signs = _parts(summaries, queries.shape[-1])
        (T, D), every = queries.shape[2:], base.BLOCK // self.samples
        # a part at the end of the prompt may have fewer queries
        last = torch.arange(0, T, every, device=queries.device).add(every - 1).clamp(max=T - 1)
        some = base.grouped(queries, summaries.shape[1]).index_select(3, last)
        rotated = transform.rotate(some, _rotation(D, queries.device))
        estimates = rotated @ signs[:, :, None].mT * weights[:, :, None, None]
        centers = (some @ means[:, :, None].mT).repeat_interleave(base.BLOCK, -1)
        logits = scale * (estimates + centers)  # [B, G, H / G, sampled, (KB - 1) * 128]
        base.check_finite(queries, summaries, logits)
        sums = logits.view(*logits.shape[:-1], -1, base.BLOCK).logsumexp(-1)
        rows = base.split(sums, self.samples)  # [B, G, H / G, QB, samples, KB - 1]
        QB, before = rows.shape[3], rows.shape[5]
        hidden = ~base.candidates(QB, before + 1, block, queries.device)[:, None]
        block_weights = rows.masked_fill(hidden, base.NEVER).softmax(-1).masked_fill(hidden, 0.0)
        real = torch.arange(QB * self.samples, device=queries.device) < len(last)
        # the rest is padding after the last query
        block_weights = block_weights.masked_fill(~real.view(QB, -1, 1), 0.0).sum(-2)
        return base.with_kept(base.smallest_set(block_weights, self.mass).flatten(1, 2), block)


@lru_cache(maxsize=8)
def _rotation(D: int, device: torch.device) -> Tensor:
    return transform.rotation(D, SEED, device)


def _bytes(D: int) -> Mapping[str, int]:
    """Return the shape of the summary of one block."""
    return {"bytes": 2 * D + 2 * base.BLOCK + base.BLOCK * D // codes.SUBSPACE}


def _parts(summaries: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return means `[B, G, n, D]`, weights `[B, G, n * 128]` and signs `[B, G, n * 128, D]`.

    All are float32. Signs are 1 and -1.
    """
    sizes = [2 * D, 2 * base.BLOCK, base.BLOCK * D // 8]
    means, weights, signs = torch.split_with_sizes(summaries, sizes, -1)
    bits = codes.unpack(signs.reshape(*signs.shape[:-1], base.BLOCK, D // 8))
    return (
        means.contiguous().view(torch.bfloat16).float(),
        weights.contiguous().view(torch.bfloat16).float().flatten(2),
        (bits.float() * 2 - 1).flatten(-2).flatten(2, 3),
    )
