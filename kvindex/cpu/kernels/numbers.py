"""Rows of short floats as float32, which Numba lacks, and an exponential that LLVM vectorizes."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvindex.cpu.kernels.compile import Number, float32_at, kernel, uint16_at

FLOAT32, BFLOAT16, FLOAT16 = range(3)

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""How kernels are told of a dtype."""

SIXTEEN = np.uint32(16)
THIRTEEN = np.uint32(13)
SIGN = np.uint32(0x8000)
REST = np.uint32(0x7FFF)
LARGEST = np.uint32(0x7C00)
INFINITE = np.uint32(0x7F800000)
BIAS = np.float32(2.0**112)
"""What float16's exponent lacks to float32's: a product with it is right for subnormals, too."""


@kernel
def read(address: int, count: int, kind: int, out: np.ndarray) -> None:
    """Numbers at an address, of a kind of `KINDS`, into float32 `out[:count]`."""
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
"""Exponentials below it count as 0."""

LOG2_E = np.float32(1.4426950408889634)
LN2_UPPER = np.float32(0.693359375)
LN2_LOWER = np.float32(-2.12194440e-4)
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
ONE = np.float32(1)


@kernel
def exp(x: Number) -> Number:
    """`e^x` of a float32 up to 0, within a few units of the last place."""
    bounded = max(np.float32(x), LEAST)
    octaves = np.float32(np.rint(bounded * LOG2_E))
    r = np.float32(np.float32(bounded - octaves * LN2_UPPER) - octaves * LN2_LOWER)
    sum_of = np.float32(C4 + r * np.float32(C5 + r * np.float32(C6 + r * C7)))
    sum_of = np.float32(ONE + r * np.float32(ONE + r * np.float32(C2 + r * (C3 + r * sum_of))))
    power = np.int32((np.int32(octaves) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(sum_of * power) if x >= LEAST else np.float32(0)
