"""Rerank the candidates: estimate their inner products with the queries, and score them.

An inner product is estimated from all bits of a candidate's codes. Then the estimates for the query
heads that share a KV head are combined into one score per candidate.
"""

from __future__ import annotations

import math

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined, keep, kernel, prefetch, uint8_at
from kvindex.cpu.kernels.decode import WORD, put_word
from kvindex.cpu.kernels.numbers import exp, largest, log
from kvindex.cpu.kernels.vectors import FOUR, four_dots

NEVER = np.float32(-np.inf)

AHEAD = 24
"""Prefetch distance, in candidates."""

STEPS = 2**11
"""Number of logarithmic weight codes from a weight to twice this weight: the lower 11 of the 16
bits of a code.
"""


@inlined
def weight_of(upper: int, lower: int, fine: np.ndarray) -> Number:
    """Decode a key's weight from the upper and the lower byte of its 16-bit logarithmic code.

    This is the compiled version of `ops.codes.log_weights`.

    `fine` is a table of the weights from 1 to 2, float32 `[2^11]`, indexed by the lower 11 bits of
    the code. The upper bits are the exponent of a power of two.
    """
    code = np.int32(upper) << np.int32(8) | np.int32(lower)
    if code == 0:
        return np.float32(0)
    exponent = np.int32((code >> np.int32(11)) + np.int32(127 - 16))
    return fine[code & (STEPS - 1)] * np.int32(exponent << np.int32(23)).view(np.float32)


@inlined
def put_direction(
    signs: int, magnitudes: int, bits: int, M: int, levels: int, room: int, out: int
) -> None:
    """Decode a key's quantized direction from its sign bits and magnitude bits.

    Args:
        signs: Address of the signs, uint8 `[M]`.
        magnitudes: Address of the magnitudes, uint8 `[bits, M]`.
        bits: Number of bits of a magnitude.
        M: Number of bytes of signs.
        levels: Address of the levels, float32 `[2^bits]`, padded to at least 16.
        room: Address of a buffer, uint8 `[1 + bits, 8]`.
        out: Address of the result, float32 `[8 · M]`, padded to a multiple of 64.
    """
    for b in range(0, M - 7, 8):
        put_word(signs + b, magnitudes + b, M, bits, levels, out + b * 32)
    rest = M % 8
    if rest:
        some, last = uint8_at(room, 8 * (1 + bits)), M - rest
        for p in range(1 + bits):
            plane = uint8_at(signs if p == 0 else magnitudes + (p - 1) * M, M)
            for j in range(rest):
                some[8 * p + j] = plane[last + j]
        put_word(room, room + 8, 8, bits, levels, out + last * 32)


@inlined
def ask_for(
    id_of: int,
    signs: np.ndarray,
    magnitudes: np.ndarray,
    weights: np.ndarray,
    fractions: np.ndarray,
    bits: int,
    full: int,
    M: int,
) -> None:
    """Prefetch the codes of one key. Later, `estimate` reads them. `id_of` is the token id."""
    of = int(id_of >= full)
    own = id_of - full * of
    prefetch(signs[of] + own * M)
    prefetch(magnitudes[of] + own * M * bits)
    prefetch(magnitudes[of] + (own + 1) * M * bits - 1)
    prefetch(weights[of] + own)
    prefetch(fractions[of] + own)


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
    fine: np.ndarray,
    out: np.ndarray,
) -> None:
    """Estimate the inner products of one KV head's queries with the candidates.

    This is the compiled version of `ops.rerank.estimate`. In addition, it adds the inner products
    of the queries with the centers of the candidates' blocks.

    `signs`, `magnitudes`, `weights` and `fractions` are addresses of codes, int64 `[2]`. Element 0
    is the address of the codes in the full blocks. Element 1 is the address of those in the last,
    partly filled block.

    Args:
        ids: Token ids of the candidates, int32 `[C]`.
        signs: Addresses of the signs.
        magnitudes: Addresses of the magnitudes.
        weights: Addresses of the upper bytes of the logarithmic weights.
        fractions: Addresses of the lower bytes of the logarithmic weights.
        bits: Number of bits of a magnitude.
        full: Number of keys in full blocks; later keys are in the last, partly filled block.
        block: Number of tokens in a block.
        queries: Rotated queries, float32 `[g, D]`.
        products: Inner products of the queries with block centers, float32 `[S, g]`.
        levels: Quantized absolute values of a coordinate, float32 `[2^bits]`, padded to 16 or more.
        fine: Table of weights from 1 to 2, float32 `[2^11]` (`weight_of`).
        out: Result, float32 `[g, C]`.
    """
    (g, D), C = queries.shape, len(ids)
    M, words = D // 8, -(-D // WORD)
    values, sizes = np.empty((FOUR, words * WORD), np.float32), np.zeros(FOUR, np.float32)
    dots, room = np.empty((g, FOUR), np.float32), np.zeros(8 * (1 + bits), np.uint8)
    places, spare = np.empty(FOUR, np.int64), room.ctypes.data
    for i in range(FOUR):
        places[i] = values[i].ctypes.data
    asked, table, to = queries.ctypes.data, levels.ctypes.data, dots.ctypes.data
    for c in range(0, C, FOUR):
        count = min(FOUR, C - c)
        for i in range(min(c + AHEAD, C), min(c + AHEAD + FOUR, C)):
            ask_for(np.int64(ids[i]), signs, magnitudes, weights, fractions, bits, full, M)
        for i in range(count):
            own = np.int64(ids[c + i])
            of = int(own >= full)
            own -= full * of
            sign, plane = signs[of] + own * M, magnitudes[of] + own * M * bits
            put_direction(sign, plane, bits, M, table, spare, places[i])
            upper = uint8_at(weights[of] + own, 1)[0]
            sizes[i] = weight_of(upper, uint8_at(fractions[of] + own, 1)[0], fine)
        for h in range(g):
            four_dots(asked + h * D * 4, places.ctypes.data, D, to + h * FOUR * 4)
        for i in range(count):
            s = np.int32(ids[c + i]) // np.int32(block)
            for h in range(g):
                out[h, c + i] = dots[h, i] * sizes[i] + products[s, h]
    keep(values, places, dots, room)


@kernel
def cap(logits: np.ndarray, scale: float, softcap: float) -> None:
    """Scale inner products to logits and apply the softcap, in place, float32 `[n]`.

    A `softcap` of 0 means no softcap.
    """
    factor = np.float32(scale)
    for i in range(len(logits)):
        logits[i] *= factor
    if softcap != 0:
        for i in range(len(logits)):
            logits[i] = np.float32(softcap * math.tanh(logits[i] / softcap))


@kernel
def put_log_softmax(logits: np.ndarray, most: np.ndarray) -> None:
    """Replace a query head's logits by the logarithms of their softmax, in place.

    Args:
        logits: Float32 `[C]`.
        most: Float32 `[C]`, updated in place. For each candidate, the maximum of the results for
            all query heads that have been processed so far.
    """
    peak, total = largest(logits), 0.0
    for c in range(len(logits)):
        total += np.float64(exp(logits[c] - peak))
    lse = np.float32(peak + math.log(total))
    for c in range(len(logits)):
        logits[c] -= lse
        most[c] = max(most[c], logits[c])


@kernel
def agree(
    estimates: np.ndarray,
    scale: float,
    softcap: float,
    by_largest: bool,
    sums: np.ndarray,
    out: np.ndarray,
) -> None:
    """Combine the query heads' estimates for one KV head into one score per candidate.

    This is the compiled version of `ops.group.agree`.

    Args:
        estimates: Estimates of inner products, float32 `[g, C]`, overwritten.
        scale: Factor of the logits.
        softcap: Bound of the logits; 0 for none.
        by_largest: True for "max_share", False for "mean_share".
        sums: Buffer, float32 `[C]`.
        out: Result, float32 `[C]`.
    """
    g, C = estimates.shape
    if g == 1 or C == 0:
        for c in range(C):
            out[c] = estimates[0, c]
        return
    out[:] = NEVER
    for h in range(g):
        cap(estimates[h], scale, softcap)
        put_log_softmax(estimates[h], out)
    if by_largest:
        return
    sums[:] = 0
    for h in range(g):
        one = estimates[h]
        for c in range(C):
            sums[c] += exp(one[c] - out[c])
    inverse = np.float32(1 / g)
    for c in range(C):
        out[c] += log(sums[c] * inverse)
