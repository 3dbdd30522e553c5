"""Combine the estimated inner products of the query heads that share a KV head.

The result is one score for each candidate (a key that a search may return).
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.numbers import exp, largest, log
from kvindex.cpu.kernels.rerank import NEVER, cap

CHUNK = 256
"""Candidates that are processed at a time, so that their float32 sums stay in the L1 cache."""

LOWEST = np.finfo(np.float32).min
"""Number used instead of `-inf` in intermediate results, so that no difference is NaN."""


@kernel
def log_sum(logits: np.ndarray, sizes: np.ndarray) -> Number:
    """Return the log-sum-exp of `logits`, where logit `c` counts `sizes[c]` times.

    Args:
        logits: Float32 `[C]`.
        sizes: Number of rows that each logit stands for, int64 `[C]`; empty if each counts once.

    Returns:
        Float32; 0 if all logits are `-inf` or count 0 times.
    """
    peak, total = NEVER, 0.0
    if not len(sizes):
        peak = largest(logits)
    for c in range(len(sizes)):
        peak = max(peak, logits[c] if sizes[c] > 0 else NEVER)
    if peak == NEVER:
        return np.float32(0)
    for start in range(0, len(logits), CHUNK):
        own, part_of = logits[start : start + CHUNK], np.float32(0)
        if len(sizes):
            times = sizes[start : start + CHUNK]
            for c in range(len(own)):
                total += np.float64(exp(min(own[c] - peak, np.float32(0)))) * np.float64(times[c])
        else:
            for c in range(len(own)):
                part_of += exp(own[c] - peak)
        total += np.float64(part_of)
    return np.float32(peak + math.log(total))


@kernel
def put_logits(
    estimates: np.ndarray, scale: float, softcap: float, first: np.ndarray, out: np.ndarray
) -> None:
    """Compute the logits of a query head from its estimates of inner products, float32 `[C]`.

    The lists of all query heads of a KV head have entries without a candidate at the same places.
    These entries get the logit `-inf`. They are found in `first`, the estimates for the first of
    these query heads, where they are `-inf`.
    """
    for c in range(len(out)):
        out[c] = estimates[c]
    cap(out, scale, softcap)
    if softcap != 0:
        for c in range(len(out)):
            out[c] = NEVER if first[c] == NEVER else out[c]


@kernel
def agree(
    part: int,
    parts: int,
    estimates: np.ndarray,
    sizes: np.ndarray,
    scale: float,
    softcap: float,
    by_largest: bool,
    log_weights: np.ndarray,
    out: np.ndarray,
) -> None:
    """Combine the estimates for the query heads of a KV head into one score per candidate.

    A group is one KV head of one sequence. Each thread processes some of the groups. This is the
    compiled version of `ops.group.agree`.

    Args:
        part: Number of this thread, from 0 to `parts - 1`.
        parts: Number of threads among which the work is divided.
        estimates: Float32 `[B·G, g, C]`.
        sizes: Number of rows that each candidate represents, int64 `[B·G, C]`; `[B·G, 0]` if each
            represents one row.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        by_largest: True for "max_share", False for "mean_share".
        log_weights: Buffer, float32 `[parts, g, C]`.
        out: Result, float32 `[B·G, C]`.
    """
    groups, g, C = estimates.shape
    own = log_weights[part]
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        some, first = out[group], estimates[group, 0]
        some[:] = LOWEST
        for h in range(g):
            one = own[h]
            put_logits(estimates[group, h], scale, softcap, first, one)
            total = log_sum(one, sizes[group])
            for c in range(C):
                one[c] -= total
                some[c] = max(some[c], one[c])
        if not by_largest:
            put_mean(own, some)
        for c in range(C):
            some[c] = NEVER if first[c] == NEVER else some[c]


@kernel
def put_mean(log_weights: np.ndarray, out: np.ndarray) -> None:
    """Compute the logarithm of each candidate's mean attention weight over the query heads.

    Args:
        log_weights: Logarithms of attention weights, float32 `[g, C]`.
        out: Float32 `[C]`. Before the call it contains the largest of each candidate's
            `log_weights`, and after the call the result.
    """
    (g, C), sums = log_weights.shape, np.empty(CHUNK, np.float32)
    for start in range(0, C, CHUNK):
        own = out[start : start + CHUNK]
        sums[:] = 0
        for h in range(g):
            one = log_weights[h, start : start + CHUNK]
            for c in range(len(own)):
                sums[c] += exp(one[c] - own[c])
        for c in range(len(own)):
            own[c] += log(np.float32(sums[c] / np.float32(g)))
