"""What the query heads of a group agree on, for any number of groups and rows of each size."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel
from kvindex.cpu.kernels.numbers import exp
from kvindex.cpu.kernels.rerank import NEVER, cap
from kvindex.cpu.kernels.select import score_of
from kvindex.cpu.kernels.top import largest_order

PIECE = 256
"""Candidates at a time: their sums stay in the first cache, and are added in float32."""

LOWEST = np.finfo(np.float32).min
"""In place of a share of 0 until the end: differences stay numbers."""

SQRT_HALF = np.float32(math.sqrt(0.5))
LN2_UPPER = np.float32(0.693359375)
LN2_LOWER = np.float32(-2.12194440e-4)
HALF, ONE = np.float32(0.5), np.float32(1)
TERMS = tuple(
    np.float32(term)
    for term in (
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
)
"""Of the logarithm on [√½, √2] (Cephes, logf)."""

T0, T1, T2, T3, T4, T5, T6, T7, T8 = TERMS


@kernel
def log(x: Number) -> Number:
    """The logarithm of a normal float32 above 0, within a few units of the last place."""
    bits = np.float32(x).view(np.int32)
    octaves = np.float32((bits >> np.int32(23)) - np.int32(126))
    part = np.int32(bits & np.int32(0x007FFFFF) | np.int32(0x3F000000)).view(np.float32)
    low = part < SQRT_HALF
    octaves -= ONE if low else np.float32(0)
    r = np.float32((part + part if low else part) - ONE)
    z = r * r
    sum_of = np.float32(T0 * r + T1)
    sum_of = np.float32(np.float32(sum_of * r + T2) * r + T3)
    sum_of = np.float32(np.float32(sum_of * r + T4) * r + T5)
    sum_of = np.float32(np.float32(np.float32(sum_of * r + T6) * r + T7) * r + T8)
    tail = np.float32(np.float32(sum_of * r * z + octaves * LN2_LOWER) - HALF * z)
    return np.float32(np.float32(r + tail) + octaves * LN2_UPPER)


@kernel
def log_sum(logits: np.ndarray, sizes: np.ndarray) -> Number:
    """Logarithm of the sum of exponentials of logits float32 `[C]`, each as often as its size says.

    sizes: int64 `[C]`, or none: once. 0 where there is nothing to sum.
    """
    peak, total, counted = NEVER, 0.0, len(sizes) > 0
    if not counted and len(logits):
        peak = score_of(largest_order(logits) << np.int64(32))  # faster than a maximum of floats
    for c in range(len(sizes)):
        peak = max(peak, logits[c] if sizes[c] > 0 else NEVER)
    if peak == NEVER:
        return np.float32(0)
    if not counted:
        for start in range(0, len(logits), PIECE):
            own, part_of = logits[start : start + PIECE], np.float32(0)
            for c in range(len(own)):
                part_of += exp(own[c] - peak)
            total += np.float64(part_of)
    else:
        for c in range(len(logits)):
            part = np.float64(exp(min(logits[c] - peak, np.float32(0))))
            total += part * np.float64(sizes[c])
    return np.float32(peak + math.log(total))


@kernel
def agree(
    part: int,
    parts: int,
    estimates: np.ndarray,
    sizes: np.ndarray,
    scale: float,
    softcap: float,
    largest: bool,
    shares: np.ndarray,
    out: np.ndarray,
) -> None:
    """As `ops.group.agree` of a part of the groups, of estimates float32 `[P, g, C]`.

    sizes: int64 `[P, C]`, or of no candidates; largest: "max_share", else "mean_share". Overwrites
    shares float32 `[parts, g, C]`; writes out float32 `[P, C]`.
    """
    groups, g, C = estimates.shape
    own = shares[part]
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        some, first = out[group], estimates[group, 0]
        some[:] = LOWEST
        for h in range(g):
            one, given = own[h], estimates[group, h]
            if softcap == 0:
                for c in range(C):
                    one[c] = given[c] * np.float32(scale)
            else:
                for c in range(C):
                    capped = cap(given[c], scale, softcap)
                    one[c] = NEVER if first[c] == NEVER else capped
            total = log_sum(one, sizes[group])
            for c in range(C):
                one[c] -= total
                some[c] = max(some[c], one[c])
        if not largest:
            put_mean(own, some)
        for c in range(C):
            some[c] = NEVER if first[c] == NEVER else some[c]


@kernel
def put_mean(shares: np.ndarray, out: np.ndarray) -> None:
    """The mean over heads of shares, all as logarithms: float32 `[g, C]`, the largest in `out`."""
    (g, C), sums = shares.shape, np.empty(PIECE, np.float32)
    for start in range(0, C, PIECE):
        own = out[start : start + PIECE]
        sums[:] = 0
        for h in range(g):
            one = shares[h, start : start + PIECE]
            for c in range(len(own)):
                sums[c] += exp(one[c] - own[c])
        for c in range(len(own)):
            own[c] += log(np.float32(sums[c] / np.float32(g)))
