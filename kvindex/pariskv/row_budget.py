"""Choose how many rows a search samples, so that the expected error of attention is below a limit.

A search samples rows by their estimated attention weights, so the variance of the attention output
can be predicted before any row is read. Let `p` be the estimated attention weight of a row, and `π`
the probability with which the row is sampled. Every sampled row counts `1 / π` times, and the
variance of its weight is `p² (1 / π − 1)` (Horvitz and Thompson, 1952). The variance of the output
is the sum over all rows, times the mean squared distance between the values and the output.

Only candidates have estimates. A candidate was itself sampled with a known probability `c`, so it
represents `1 / c` keys like it, and its term of the sum counts `1 / c` times.

A search predicts the variance for each number of rows in `counts_of`, and takes the smallest one
that is within the limit. It reads rows only afterwards. So the number of rows does not depend on
the values that are read, which would bias the output.

The prediction ignores two errors: the bias of tempered weights, which replaces a part of the
variance (docs/pipeline/rerank.md), and the errors of the estimates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.pariskv.config import NOMINAL, ParisKVConfig

LEAST = 16
"""Smallest number of rows that a search chooses."""

FAINT = -80.0
"""Smallest logarithm of a probability that the sums use, so that no term is infinite."""


def candidates_of(config: ParisKVConfig, count: int, k: int) -> int:
    """Return the number of candidates of a sequence: as many as for `NOMINAL` rows, but at least
    twice as many as a search may select rows.

    Args:
        config: Options of the index.
        count: Number of valid keys.
        k: Largest number of rows that the search may select.
    """
    return min(max(config.candidates(count, min(k, NOMINAL)), 2 * k), count)


def candidates(config: ParisKVConfig, counts: Tensor, k: int) -> Tensor:
    """Return `candidates_of` for each sequence of a batch.

    Args:
        config: Options of the index.
        counts: Number of valid keys of each sequence, int64 `[B]`, on the CPU.
        k: Largest number of rows that the search may select.

    Returns:
        Int64 `[B]`, on the CPU.
    """
    sizes: list[int] = counts.tolist()
    return torch.tensor([candidates_of(config, size, k) for size in sizes], dtype=torch.int64)


def counts_of(most: int) -> list[int]:
    """Return the numbers of rows among which a search chooses: 16, 24, 32, 48, 64, … and `most`.

    Args:
        most: The largest number.
    """
    small = (size * 2**i for i in range(most.bit_length()) for size in (LEAST, LEAST * 3 // 2))
    return sorted({most, *(count for count in small if count < most)})


def variances(weights: Tensor, sizes: Tensor, chances: Tensor, thresholds: Tensor) -> Tensor:
    """Predict the variance of the attention weights for several numbers of sampled rows.

    The result is the sum over the query heads of a KV head. Times the mean squared distance between
    values and output, it is the expected squared error of the output of these heads.

    Args:
        weights: Logarithms of the candidates' estimated attention weights, float32 `[B, G, g, C]`,
            `-inf` in unused slots. The weights of all tokens that the query attends to, in the
            index or not, have the sum 1.
        sizes: Logarithms of the candidates' sampling weights, float32 `[B, G, C]`
            (`priority.root_mean_square`).
        chances: Logarithms of the probabilities with which the candidates were sampled from all
            keys, float32 `[B, G, C]`.
        thresholds: For each number of rows `n`, the priority that follows the `n` largest ones,
            float32 `[B, G, n]`; `-inf` where every candidate becomes a row.

    Returns:
        Float32 `[B, G, n]`.
    """
    squares = (2 * weights).logsumexp(2)  # [B, G, C]
    chances = chances.clamp(FAINT, 0)
    found = []
    for threshold in thresholds.unbind(-1):
        total = torch.minimum((sizes - threshold[..., None]).clamp(FAINT, 0), chances)
        missed = -torch.expm1(total)  # 1 - π
        found.append(((squares - total - chances).exp() * missed).sum(-1))
    return torch.stack(found, dim=-1)


def choose(variances: Tensor, limits: Tensor) -> Tensor:
    """Return the position of the smallest number of rows whose variance is within the limit.

    Args:
        variances: Result of the function `variances`, `[B, G, n]`.
        limits: Largest allowed variance, float32 `[B, G]`.

    Returns:
        Int64 `[B, G]`: a position in `[0, n)`. If no number of rows is within the limit, it is the
        last one.
    """
    within = variances <= limits[..., None]
    within[..., -1] = True
    return within.int().argmax(-1)
