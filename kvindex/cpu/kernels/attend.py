"""Attention of a group's queries over rows where they lie: those found, and the resident ones."""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import kernel, uint8_at
from kvindex.cpu.kernels.numbers import exp, read
from kvindex.cpu.kernels.rerank import NEVER, cap


@kernel
def attend(
    queries: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray,
    kind: int,
    scale: float,
    softcap: float,
    logits: np.ndarray,
    output: np.ndarray,
    lse: np.ndarray,
) -> None:
    """As `ops.attention.attend`, of queries float32 `[g, D]`.

    rows: addresses int64 `[R]` of a key and then its value, numbers of a `kind`; 0: none. weights:
    float32 `[g, R']`, added to the first logits. Overwrites logits float32 `[g, R]`; writes output
    float32 `[g, Dv]` and lse float32 `[g]`.
    """
    g, D = queries.shape
    Dv, row_numbers = output.shape[1], np.empty(max(D, output.shape[1]), np.float32)
    for r in range(len(rows)):
        if not rows[r]:
            for h in range(g):
                logits[h, r] = NEVER
            continue
        read(rows[r], D, kind, row_numbers)
        for h in range(g):
            dot = np.float32(0)
            for d in range(D):
                dot += queries[h, d] * row_numbers[d]
            logits[h, r] = cap(dot, scale, softcap)
            if r < weights.shape[1]:
                logits[h, r] += weights[h, r]
    for h in range(g):
        peak, total = NEVER, np.float64(0)
        for r in range(len(rows)):
            peak = max(peak, logits[h, r])
        base = np.float32(0) if peak == NEVER else peak
        for r in range(len(rows)):
            logits[h, r] = exp(logits[h, r] - base)
            total += np.float64(logits[h, r])
        lse[h] = peak if total == 0 else np.float32(peak + math.log(total))
        share = np.float32(0) if total == 0 else np.float32(1 / total)
        for r in range(len(rows)):
            logits[h, r] *= share
        for d in range(Dv):
            output[h, d] = 0
    width = 4 if kind == 0 else 2
    for r in range(len(rows)):
        if not rows[r]:
            continue
        read(rows[r] + D * width, Dv, kind, row_numbers)
        for h in range(g):
            share = logits[h, r]
            if share == 0:
                continue
            for d in range(Dv):
                output[h, d] += share * row_numbers[d]


@kernel
def put_resident(resident: int, row_bytes: int, mask: int, count: int, out: np.ndarray) -> None:
    """Addresses int64 `[count]` of a group's resident rows; 0 where the mask is."""
    shown = uint8_at(mask, count)
    for r in range(count):
        out[r] = resident + r * row_bytes if shown[r] else 0
