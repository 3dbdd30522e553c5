"""Confidence intervals and tests: Wilson's interval, the bootstrap, the sign test, Holm's
correction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Z = 1.959964
"""Number of standard deviations around the mean that contain 95% of a normal distribution."""

RESAMPLES, SEED = 4000, 0
"""Number of resamples of the bootstrap, and their seed."""

Interval = tuple[float, float]


def wilson(scores: Sequence[float]) -> Interval:
    """Return the 95% interval of the mean of scores in [0, 1] (Wilson, 1927).

    Fractional scores vary less than scores of 0 and 1 with the same mean, so their interval is
    wider than necessary.
    """
    n, mean, square = len(scores), float(np.mean(scores)), Z * Z
    half = Z * math.sqrt(mean * (1 - mean) / n + square / (4 * n * n))
    middle, scale = mean + square / (2 * n), 1 + square / n
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95% interval of a mean: percentiles over resamples (Efron, 1979)."""
    return _percentiles(_means(values))


def bootstrap_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the 95% interval of the ratio of two means of paired values (`below` is positive)."""
    means = _means(np.stack([above, below], axis=1))
    return _percentiles(means[:, 0] / means[:, 1])


def in_blocks(values: Sequence[float], size: int) -> list[float]:
    """Return means over blocks of about `size` successive values. The bootstrap then resamples
    blocks, because successive values are correlated."""
    parts = np.array_split(np.asarray(values, dtype=float), max(len(values) // size, 1))
    return [float(part.mean()) for part in parts]


def sign_test(differences: Sequence[float]) -> float:
    """Return the p-value of the sign test: how likely signs are at least this uneven by chance.

    Zeros do not count. For right and wrong answers, this is McNemar's exact test.
    """
    signs = np.sign(differences)
    fewer, n = int(min((signs > 0).sum(), (signs < 0).sum())), int((signs != 0).sum())
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons (Holm, 1979). The order stays the same.

    The probability that any corrected p-value below 5% is a coincidence is at most 5%.
    """
    n, least = len(probabilities), 0.0
    corrected = [0.0] * n
    for rank, i in enumerate(np.argsort(probabilities, kind="stable")):
        least = max(least, min(1.0, (n - rank) * probabilities[i]))
        corrected[i] = least
    return corrected


def _means(values: ArrayLike) -> NDArray[np.float64]:
    """Return means of resamples, `[RESAMPLES]` for values `[n]`, `[RESAMPLES, C]` for `[n, C]`."""
    values = np.asarray(values, dtype=float)
    return _counts(len(values)) @ values / len(values)


@functools.lru_cache(maxsize=4)
def _counts(n: int) -> NDArray[np.float64]:
    """Return how often each of `n` values is in a resample, `[RESAMPLES, n]`."""
    return np.random.default_rng(SEED).multinomial(n, [1 / n] * n, RESAMPLES).astype(float)


def _percentiles(means: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
