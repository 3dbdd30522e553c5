"""Functions that Numba lacks: conversion of 16-bit floats, and vectorizable `exp`, `log`, `max`."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvindex.cpu.kernels.compile import Number, float32_at, kernel, uint16_at

FLOAT32, BFLOAT16, FLOAT16 = range(3)

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Dtype -> number that stands for the dtype in the arguments of kernels."""

SIXTEEN = np.uint32(16)
THIRTEEN = np.uint32(13)
SIGN = np.uint32(0x8000)
REST = np.uint32(0x7FFF)
LARGEST = np.uint32(0x7C00)
INFINITE = np.uint32(0x7F800000)
BIAS = np.float32(2.0**112)
"""Factor that corrects the exponent when the bits of a float16 are read as a float32."""


@kernel
def read(address: int, count: int, kind: int, out: np.ndarray) -> None:
    """Convert `count` numbers at an address to float32, and write them to `out[:count]`.

    `kind` is the dtype of the numbers (`KINDS`).
    """
    if kind == FLOAT32:
        floats = float32_at(address, count)
        for i in range(count):
            out[i] = floats[i]
    elif kind == BFLOAT16:
        shorts = uint16_at(address, count)
        for i in range(count):
            out[i] = np.uint32(np.uint32(shorts[i]) << SIXTEEN).view(np.float32)
    else:
        shorts = uint16_at(address, count)
        for i in range(count):
            bits = np.uint32(shorts[i])
            size = np.uint32((bits & REST) << THIRTEEN)
            scaled = np.float32(size.view(np.float32) * BIAS).view(np.uint32)
            if bits & REST >= LARGEST:
                scaled = np.uint32(size | INFINITE)
            out[i] = np.uint32(scaled | (bits & SIGN) << SIXTEEN).view(np.float32)


LEAST = np.float32(-87)
"""Argument below which `exp` returns 0."""

LOG2_E = np.float32(1.4426950408889634)
LN2_UPPER = np.float32(0.693359375)
LN2_LOWER = np.float32(-2.12194440e-4)
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
ONE = np.float32(1)


@kernel
def exp(x: Number) -> Number:
    """Return `e^x` for a float32 `x ≤ 0`, accurate to a few units in the last place."""
    bounded = max(np.float32(x), LEAST)
    octaves = np.float32(np.rint(bounded * LOG2_E))
    r = np.float32(np.float32(bounded - octaves * LN2_UPPER) - octaves * LN2_LOWER)
    sum_of = np.float32(C4 + r * np.float32(C5 + r * np.float32(C6 + r * C7)))
    sum_of = np.float32(ONE + r * np.float32(ONE + r * np.float32(C2 + r * (C3 + r * sum_of))))
    power = np.int32((np.int32(octaves) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(sum_of * power) if x >= LEAST else np.float32(0)


HALF_ROOT = np.uint32(0x3F3504F3)
"""Bits of `√(1/2)` as a float32; `log` reduces its argument to between `√(1/2)` and `√2`."""

HALF = np.float32(0.5)
MANTISSA = np.uint32(0x7FFFFF)
LOG = tuple(
    np.float32(c)
    for c in (
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
)
"""Coefficients of Moshier's Cephes: `log(1 + r) = r - r²/2 + r³ Σ c_i r^(8 - i)`."""
L0, L1, L2, L3, L4, L5, L6, L7, L8 = LOG


@kernel
def log(x: Number) -> Number:
    """Return the natural logarithm of a float32, accurate to a few units in the last place.

    The argument must be positive and normal (not subnormal, infinite or NaN).
    """
    beyond = np.uint32(np.float32(x).view(np.uint32) - HALF_ROOT)
    octaves = np.float32(np.int32(beyond) >> np.int32(23))
    r = np.float32(np.uint32((beyond & MANTISSA) + HALF_ROOT).view(np.float32) - ONE)
    sum_of = np.float32(L3 + r * np.float32(L2 + r * np.float32(L1 + r * L0)))
    sum_of = np.float32(L6 + r * np.float32(L5 + r * np.float32(L4 + r * sum_of)))
    sum_of = np.float32(L8 + r * np.float32(L7 + r * sum_of))
    square = np.float32(r * r)
    rest = np.float32(square * np.float32(r * sum_of - HALF) + octaves * LN2_LOWER)
    return np.float32(np.float32(r + rest) + octaves * LN2_UPPER)


SMALLEST = np.int32(-(2**31))
BELOW_SIGN = np.int32(0x7FFFFFFF)
SIGN_SHIFT = np.int32(31)


@kernel
def largest(numbers: np.ndarray) -> Number:
    """Return the largest of the float32 numbers `[n]`, none of which may be NaN.

    The numbers are compared as integers, because LLVM vectorizes integer comparisons without
    fast-math flags.
    """
    most = SMALLEST
    for i in range(len(numbers)):
        bits = np.float32(numbers[i]).view(np.int32)
        most = max(most, np.int32(bits ^ (bits >> SIGN_SHIFT & BELOW_SIGN)))
    return np.int32(most ^ (most >> SIGN_SHIFT & BELOW_SIGN)).view(np.float32)
