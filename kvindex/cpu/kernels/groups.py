"""Combine the estimates of the query heads that share a KV head into one score per candidate."""

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
    """Compute a query head's logits from its estimates, float32 `[C]`.

    The logit is `-inf` where `first`, the estimates of the group's first head, is `-inf`. There is
    no candidate in such a place.
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
    """Combine the query heads' estimates into one score per candidate, for some of the groups.

    This is the compiled version of `ops.group.agree`. A group is one KV head of one sequence.

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
    """Compute the logarithm of the heads' mean attention weight for each candidate.

    Args:
        log_weights: Logarithms of attention weights, float32 `[g, C]`.
        out: On entry the largest log weight of the heads, on return the result, float32 `[C]`.
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
