"""Noise of keys, by which candidates and rows are drawn: the integers of `ops.priority`."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import Number, inlined
from kvindex.ops import priority

SPREAD = np.uint32(priority.SPREAD)
FIRST, SECOND = (np.uint64(factor) for factor in priority.FACTORS)
ADDED, LOWER, HALF = np.uint64(priority.ADDED), np.uint64(priority.BITS), np.uint64(32)
C0, C1, C2, C3 = (np.int32(coefficient) for coefficient in priority.CURVE)
UNIT, SIXTEEN = np.int32(priority.UNIT), np.int32(16)
NATS = np.float32(priority.NATS)

ABOVE = np.int32((32 + 127 - 8) << 16)
"""From it a bound takes a float's exponent, which begins with 127, of the upper 24 of 32 bits."""

EIGHT, SEVEN, ONE = np.uint32(8), np.int32(7), np.uint32(1)


@inlined
def number_of(position: int, seed: Number) -> Number:
    """What is hashed for a key at a position, uint32, by a seed uint32."""
    return np.uint32(np.uint32(position) * SPREAD + seed)


@inlined
def hashed(number: Number) -> Number:
    """As `priority.hashed`, of a uint32, which it gives."""
    both = np.uint64(np.uint32(number)) * FIRST + ADDED
    both = ((both >> HALF) ^ (both & LOWER)) * SECOND + ADDED
    return np.uint32((both >> HALF) ^ (both & LOWER))


@inlined
def noise_of(number: Number) -> Number:
    """As `priority.noise_of`, of a uint32: an int32."""
    bits = np.float64(hashed(number) | ONE).view(np.int64)  # whose exponent and mantissa are exact
    octave = np.int32(bits >> np.int64(52)) - np.int32(1023)
    t = np.int32(bits >> np.int64(36)) & np.int32(UNIT - 1)
    curve = np.int32(C2 + (np.int32(C3 * t) >> SIXTEEN))
    curve = np.int32(C1 + (np.int32(curve * t) >> SIXTEEN))
    curve = np.int32(C0 + (np.int32(curve * t) >> SIXTEEN))
    arc = np.int32(np.int32(t * np.int32(UNIT - t)) >> SIXTEEN)
    line = np.int32(np.int32(np.int32(32) - octave) * UNIT - t)
    return np.int32(line - (np.int32(arc * curve) >> SIXTEEN))


@inlined
def bound_of(number: Number) -> Number:
    """`noise_of` or up to .09 octaves more, for less: an int32.

    A float's exponent and mantissa are a logarithm that goes straight between powers of two. Of
    noise from 8 octaves on, one key's in 256, it knows fewer bits, and may be more.
    """
    upper = np.float32(np.int32(hashed(number) >> EIGHT))
    return np.int32(ABOVE - (upper.view(np.int32) >> SEVEN))
