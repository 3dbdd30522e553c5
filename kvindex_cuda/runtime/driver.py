"""The CUDA driver's launch, for attributes that CuPy passes none of."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import ClassVar


class Attribute(ctypes.Structure):
    """CUlaunchAttribute. 6, 1: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed."""

    _fields_: ClassVar = [
        ("id", ctypes.c_longlong),  # an int and its padding
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class Config(ctypes.Structure):
    """CUlaunchConfig: sizes of grid and block, and so on."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


@lru_cache
def driver() -> ctypes.CDLL:
    """The CUDA driver, which CuPy does not pass launch attributes to."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
