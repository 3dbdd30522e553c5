"""Rerank: inner products with candidates from all their code bits, and what heads agree on."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, kernel, prefetch, uint8_at
from kvindex.cpu.kernels.numbers import exp

ONE = np.uint64(1)
BYTE = np.uint64(255)
EIGHT = np.uint64(8)

NEVER = np.float32(-np.inf)

AHEAD = 12
"""Candidates whose codes are on their way."""


@kernel
def decode(
    signs: int, magnitudes: int, bits: int, M: int, spread: np.ndarray, out: np.ndarray
) -> None:
    """Indexes uint8 `[D]` of signed levels, from a key's sign and magnitude bytes.

    spread: a byte's bits as bytes, uint64 `[256]`.
    """
    sign_bytes, planes = uint8_at(signs, M), uint8_at(magnitudes, bits * M)
    for b in range(M):
        word = spread[sign_bytes[b]] << np.uint64(bits)
        for p in range(bits):
            word |= spread[planes[p * M + b]] << np.uint64(p)
        for j in range(8):
            out[b * 8 + j] = np.uint8(word & BYTE)
            word >>= EIGHT


@kernel
def estimate(
    ids: np.ndarray,
    signs: np.ndarray,
    magnitudes: np.ndarray,
    weights: np.ndarray,
    fractions: np.ndarray,
    bits: int,
    full: int,
    block: int,
    queries: np.ndarray,
    products: np.ndarray,
    levels: np.ndarray,
    sizes: np.ndarray,
    spread: np.ndarray,
    out: np.ndarray,
) -> None:
    """As `ops.rerank.estimate`, with products of centers; out: float32 `[g, C]`.

    ids: int32 `[C]`; signs, magnitudes, weights, fractions: addresses int64 `[2]` of full blocks
    and of the open one, the keys from `full` on; queries: rotated, float32 `[g, D]`; products:
    float32 `[S, g]`; levels: signed, float32 `[2 · 2^bits]`; sizes: of weights, float32 `[2^16]`.
    """
    g, D = queries.shape
    M, codes, values = D // 8, np.empty(D, np.uint8), np.empty(D, np.float32)
    for c in range(len(ids)):
        if c + AHEAD < len(ids):
            later = np.int64(ids[c + AHEAD])
            of = int(later >= full)
            later -= full * of
            prefetch(signs[of] + later * M)
            prefetch(magnitudes[of] + later * M * bits)
            prefetch(weights[of] + later)
            prefetch(fractions[of] + later)
        i = np.int64(ids[c])
        opened = int(i >= full)
        own = i - full * opened
        decode(signs[opened] + own * M, magnitudes[opened] + own * M * bits, bits, M, spread, codes)
        upper = np.int64(uint8_at(weights[opened] + own, 1)[0])
        weight = sizes[upper << 8 | np.int64(uint8_at(fractions[opened] + own, 1)[0])]
        for d in range(D):
            values[d] = levels[codes[d]]
        for h in range(g):
            dot = np.float32(0)
            for d in range(D):
                dot += queries[h, d] * values[d]
            out[h, c] = dot * weight + products[i // block, h]


@kernel
def cap(logit: Number, scale: float, softcap: float) -> Number:
    """As `ops.attention.cap`; softcap: 0 for none."""
    scaled = np.float32(logit) * np.float32(scale)
    if softcap == 0:
        return scaled
    return np.float32(softcap * math.tanh(scaled / softcap))


@kernel
def agree(
    estimates: np.ndarray, scale: float, softcap: float, largest: bool, out: np.ndarray
) -> None:
    """As `ops.group.agree`, of estimates float32 `[g, C]`, which it overwrites; out float32 `[C]`.

    largest: "max_share", else "mean_share".
    """
    g, C = estimates.shape
    if g == 1 or C == 0:
        out[:] = estimates[0]
        return
    out[:] = NEVER
    for h in range(g):
        one = estimates[h]
        for c in range(C):
            one[c] = cap(one[c], scale, softcap)
        peak, total = NEVER, 0.0
        for c in range(C):
            peak = max(peak, one[c])
        for c in range(C):
            total += np.float64(exp(one[c] - peak))
        lse = np.float32(peak + math.log(total))
        for c in range(C):
            one[c] -= lse
            out[c] = max(out[c], one[c])
    if largest:
        return
    for c in range(C):
        shares = np.float32(0)
        for h in range(g):
            shares += exp(estimates[h, c] - out[c])
        out[c] = np.float32(out[c] + math.log(np.float64(shares) / g))
