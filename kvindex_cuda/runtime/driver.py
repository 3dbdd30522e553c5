"""The launch function of the CUDA driver, called through ctypes. CuPy cannot pass launch
attributes."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import ClassVar


class Attribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute. Id 6 with value 1 stands for programmatic dependent
    launch, with which kernels overlap."""

    _fields_: ClassVar = [
        ("id", ctypes.c_longlong),  # an int and its padding
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class Config(ctypes.Structure):
    """The driver's struct CUlaunchConfig: grid and block sizes, shared memory, stream and
    attributes."""

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
