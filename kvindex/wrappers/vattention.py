"""vAttention: select the best rows, and a uniform sample of the other rows. The size of the sample
is chosen to bound the error of attention.

Of the `n_s` rows that are not among the best, `b` are sampled. Each sampled row has the weight
`n_s / b`, so that numerator and denominator of the softmax are unbiased.

Source: Desai et al., vAttention: Verified Sparse Attention via Sampling (ICLR 2026, arXiv
2510.05688).
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import CountsTokens, KVIndex
from kvindex.ops import priority
from kvindex.ops.select import top_k
from kvindex.wrappers.sample import Sample

PILOT, SAMPLED = range(2)
"""Numbers of the two samples, the pilot and the final one. Each uses random numbers of its own."""


class VAttention(Sample):
    """Selects `k` rows: the best ones, and a uniform sample of the others.

    The sample is large enough that the relative error of the softmax's denominator is above ε only
    with probability δ (by the central limit theorem). It has
    `b = (Φ⁻¹(1 - δ/2) * n_s * σ / (ε * D))²` rows, but at most `share * k`. In this formula:

    - `n_s` is the number of rows that are not among the best.
    - `D` is the denominator of the softmax.
    - σ is the standard deviation of the terms `exp(logit)` of the `n_s` rows.

    A pilot sample of `base_rate * n_s` rows estimates `D` and σ. The final sample is at least as
    large as the pilot sample.

    Differences from the paper:

    - `b` is at most `share * k`. Where that limit applies, ε and δ are not guaranteed. It always
      applies if `base_rate * n_s` is larger than `share * k`.
    - The pilot sample uses the scores that the wrapped index has computed for all its rows, and
      does not read keys.
    - `D` is computed from the combined scores of a group of query heads. The error of the numerator
      is not considered.
    - The sink and the window do not count as best rows, because the index does not contain them.
    - A row's random numbers are hashes of its position, its KV head, the number of tokens and
      `seed`, so they stay the same until tokens are appended.

    Args:
        inner: The index to wrap. Its hits must not have log weights already.
        epsilon: Relative error ε, in (0, 1].
        delta: Probability δ of a larger error, in (0, 1].
        base_rate: Fraction of the `n_s` rows that are in the pilot sample, in (0, 1].
        share: Largest fraction of the `k` rows that are sampled, in (0, 1].
        seed: Seed of the random numbers.

    Raises:
        ValueError: An option is out of range, or `inner` does not fit (see `Sample`).

    Source: Desai et al., vAttention (ICLR 2026).
    """

    def __init__(
        self,
        inner: KVIndex,
        *,
        epsilon: float = 0.05,
        delta: float = 0.05,
        base_rate: float = 0.05,
        share: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(inner, share=share)
        self.epsilon = check.within("epsilon", epsilon, 0, 1)
        self.delta = check.within("delta", delta, 0, 1)
        self.base_rate = check.within("base_rate", base_rate, 0, 1)
        self.seed = check.seed(seed)

    def _pool(self, k: int, tokens: int) -> int:
        return max(k, tokens)

    def _sampled(self, logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        sure = k - int(self.share * k)
        rest = logits > float("-inf")
        best = torch.where(rest, _positions(rest), -1)[..., :sure]
        rest[..., :sure] = False
        left = rest.sum(-1, keepdim=True)
        wanted = torch.where(left <= k - sure, left, self._wanted(logits, ids, rest, sure))
        sampled = self._some(rest, ids, k - sure, wanted, SAMPLED)
        weight = (left / (sampled >= 0).sum(-1, keepdim=True)).log()
        weights = torch.cat(
            [torch.zeros(best.shape, device=ids.device), weight.expand_as(sampled)], -1
        )
        return _in_order(torch.cat([best, sampled], -1), weights)

    def _wanted(self, logits: Tensor, ids: Tensor, rest: Tensor, sure: int) -> Tensor:
        """Return how many rows must be sampled, int64 `[B, G, 1]`.

        With this number of rows, the relative error of the softmax's denominator exceeds the option
        `epsilon` with a probability of at most the option `delta`.

        Args:
            logits: Scores of all rows, best first, `[B, G, P]`.
            ids: Token ids of the rows, int64 `[B, G, P]`.
            rest: Bool `[B, G, P]`, True for the rows that may be sampled: those that are not
                among the `sure` best rows.
            sure: Number of best rows, which are always selected without sampling.
        """
        left = rest.sum(-1, keepdim=True)
        count = (self.base_rate * left).long().clamp_min(2)  # a standard deviation needs two rows
        most = max(2, int(self.base_rate * logits.shape[-1]))
        pilot = self._some(rest, ids, most, count, PILOT)
        parts = (logits.double() - logits[..., :1]).exp()
        mean, deviation = _moments(parts.gather(-1, pilot.clamp_min(0)), pilot >= 0)
        total = parts[..., :sure].sum(-1, keepdim=True) + left * mean
        bound = NormalDist().inv_cdf(1 - self.delta / 2) * left * deviation
        needed = (bound / (self.epsilon * total)).square().ceil().nan_to_num(0)
        return torch.maximum(needed.clamp_max(check.MOST_ROWS).long(), count)

    def _some(self, rest: Tensor, ids: Tensor, most: int, counts: Tensor, use: int) -> Tensor:
        """Return the positions of `counts` random rows among the rows where `rest` is True.

        The result is int64 `[B, G, most]`, with -1 in unused slots.
        """
        _, sampled = top_k(self._noise(ids, use).masked_fill(~rest, float("-inf")), most)
        return sampled.masked_fill(_positions(sampled) >= counts, -1)

    def _noise(self, ids: Tensor, use: int) -> Tensor:
        """Return a random number, float32, for each of the token ids `[B, G, P]`.

        A search takes two samples, each with its own random numbers. `use` says for which of them
        the numbers are: `PILOT` or `SAMPLED`.
        """
        counts, places = self._places(ids)
        heads = torch.arange(ids.shape[1], device=ids.device)[:, None]
        seeds = priority.hashed(priority.hashed(counts)[:, None, None] + heads)
        return priority.noise(places, seeds + (2 * self.seed + use) * priority.SPREAD).float()

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lengths of the sequences `[B]`, and the positions of the tokens `ids`.

        Lengths and positions count only real tokens, so that the sample does not depend on padding.
        """
        known = capability(self.inner, CountsTokens)
        if known is None or not len(self):
            return torch.tensor([len(self)], device=ids.device), ids
        if known.valid is None:
            return known.counts.to(ids.device), ids
        places = (known.valid.cumsum(-1) - 1)[:, None].expand(-1, ids.shape[1], -1)
        return known.counts.to(ids.device), places.gather(-1, ids.clamp_min(0))


def _positions(like: Tensor) -> Tensor:
    return torch.arange(like.shape[-1], device=like.device).expand(like.shape)


def _moments(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, `[..., 1]`, of the values for which `real` is True."""
    count = real.sum(-1, keepdim=True)
    mean = values.where(real, 0).sum(-1, keepdim=True) / count
    squares = (values - mean).square().where(real, 0).sum(-1, keepdim=True)
    return mean, (squares / (count - 1)).sqrt()


def _in_order(positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sort positions in ascending order, with -1 last, and their weights in the same order.

    The weight of a position of -1 becomes `-inf`.
    """
    last = torch.iinfo(torch.int64).max
    ordered, order = positions.masked_fill(positions < 0, last).sort(-1)
    unused = ordered == last
    found = weights.gather(-1, order).masked_fill(unused, float("-inf"))
    return ordered.masked_fill(unused, -1), found
