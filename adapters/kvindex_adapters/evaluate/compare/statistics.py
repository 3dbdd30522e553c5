"""Statistics: Wilson's interval, bootstrap intervals, the sign test, and Holm's correction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Z = 1.959964
"""95% of a normal distribution lie within this number of standard deviations of the mean."""

RESAMPLES, SEED = 4000, 0
"""Number of resamples that the bootstrap draws, and the seed of its random numbers."""

Interval = tuple[float, float]


def wilson(scores: Sequence[float]) -> Interval:
    """Return the 95% confidence interval of the mean of scores in [0, 1] (Wilson, 1927).

    The formula assumes that each score is 0 or 1. For fractional scores, which vary less, the
    interval is wider than necessary.
    """
    n, mean, square = len(scores), float(np.mean(scores)), Z * Z
    half = Z * math.sqrt(mean * (1 - mean) / n + square / (4 * n * n))
    middle, scale = mean + square / (2 * n), 1 + square / n
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def bootstrap(values: Sequence[float], *, comparisons: int = 1) -> Interval:
    """Return the 95% confidence interval of the mean by the percentile bootstrap (Efron, 1979).

    With several comparisons, each interval is so wide that all of them together are right with a
    probability of at least 95% (Bonferroni).
    """
    return _percentiles(_means(values), 2.5 / comparisons)


def bootstrap_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the 95% confidence interval of `mean(above) / mean(below)` by the bootstrap.

    The values are paired: `above[i]` and `below[i]` are resampled together. `below` is positive.
    """
    means = _means(np.stack([above, below], axis=1))
    return _percentiles(means[:, 0] / means[:, 1])


def in_blocks(values: Sequence[float], size: int) -> list[float]:
    """Return the means of blocks of about `size` successive values.

    Successive values are correlated, so the bootstrap must resample blocks instead of values.
    """
    parts = np.array_split(np.asarray(values, dtype=float), max(len(values) // size, 1))
    return [float(part.mean()) for part in parts]


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign test.

    This is the probability of signs that are at least as uneven as those of `differences`, if both
    signs were equally likely. Differences of zero do not count. If a difference compares a right
    answer with a wrong one, this is McNemar's exact test.
    """
    signs = np.sign(differences)
    fewer, n = int(min((signs > 0).sum(), (signs < 0).sum())), int((signs != 0).sum())
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm, 1979), in the same order.

    If no comparison has a real difference, the probability that any corrected p-value is below 5%
    is at most 5%.
    """
    n, least = len(probabilities), 0.0
    corrected = [0.0] * n
    for rank, i in enumerate(np.argsort(probabilities, kind="stable")):
        least = max(least, min(1.0, (n - rank) * probabilities[i]))
        corrected[i] = least
    return corrected


def _means(values: ArrayLike) -> NDArray[np.float64]:
    """Return the mean of each bootstrap resample of `n` values.

    The result is `[RESAMPLES]` for values `[n]`, and `[RESAMPLES, C]` for values `[n, C]`.
    """
    values = np.asarray(values, dtype=float)
    return _counts(len(values)) @ values / len(values)


@functools.lru_cache(maxsize=4)
def _counts(n: int) -> NDArray[np.float64]:
    """Make the bootstrap's resamples of `n` values, `[RESAMPLES, n]`.

    Each element is the number of times that a resample contains a value.
    """
    return np.random.default_rng(SEED).multinomial(n, [1 / n] * n, RESAMPLES).astype(float)


def _percentiles(means: NDArray[np.float64], tail: float = 2.5) -> Interval:
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)
