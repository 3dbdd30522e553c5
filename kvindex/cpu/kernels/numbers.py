"""Rows of float32, bfloat16 or float16 numbers as float32: Numba has neither of the short ones."""

from __future__ import annotations

import numpy as np
import torch

from kvindex.cpu.kernels.compile import float32_at, kernel, uint16_at

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
