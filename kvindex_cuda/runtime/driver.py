"""The CUDA driver's launch function. It is called directly because CuPy passes no launch
attributes."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import ClassVar


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute. Id 6, value 1: allow programmatic stream serialization."""

    _fields_: ClassVar = [
        ("id", ctypes.c_longlong),  # an int and its padding
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class Config(ctypes.Structure):
    """The driver's CUlaunchConfig: sizes of grid and block, and so on."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


@lru_cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver's library on the first call, and return it."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
