"""Compile and launch kernels: one `.cu` file in `kernels/`, one function, on the current stream.

A kernel's source is compiled by NVRTC the first time it runs with a set of definitions. Arguments:
a tensor is passed as its address, None as a null pointer, an int as `long long`, a float as
`float`. Launchers check dtypes, strides, devices and ranges; here nothing but the device is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "kernels"

OLDEST = (8, 0)
"""Compute capability: the first with the bit matrix instruction that `scan.cu` uses."""

OVERLAPS = (9, 0)
"""Compute capability: the first whose kernels may begin before the one before them ends."""

OPTIONS = ("--std=c++17",)

Grid = tuple[int, ...]
Launch = Callable[[Grid, Grid, list[Any], int, bool], None]
"""Of a compiled kernel: grid, block, arguments, bytes of dynamic shared memory, `overlap`."""

Loader = Callable[[str, str, tuple[tuple[str, int], ...]], Launch]
"""Of a file in `kernels/`, the name of a function in it, and definitions."""


def source(file: str) -> str:
    """The text of `kernels/<file>`."""
    return (SOURCES / file).read_text()


def launch(
    file: str,
    name: str,
    grid: Grid,
    block: Grid,
    *arguments: Tensor | int | float | None,
    shared_bytes: int = 0,
    overlap: bool | int = False,
    **defines: int,
) -> None:
    """Run `name` of `kernels/<file>` on torch's current stream of the tensors' device.

    overlap: whether it may begin before the kernel before it ends (`after_previous` in
    common.cuh); defines: what the source leaves open, as `-Dname=value`. Raises ImportError
    without CuPy, RuntimeError for a device that cannot run it, ValueError for tensors of several
    devices.
    """
    device = next(part.device for part in arguments if isinstance(part, Tensor))
    for part in arguments:
        if isinstance(part, Tensor) and part.device != device:
            raise ValueError(f"{name}: got tensors on {device} and {part.device}, allowed is one")
    if device.type not in LOADERS:
        raise ValueError(f"{name}: got tensors on {device}, allowed is a CUDA device")
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        run = LOADERS[device.type](file, name, tuple(sorted(defines.items())))
        passed = [_passed(part) for part in arguments]
        run(grid, block, passed, shared_bytes, bool(overlap))


def _passed(argument: Tensor | int | float | None) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else argument


@lru_cache
def _compiled(file: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    """CuPy's function, compiled for and loaded on one device."""
    cupy = checked(device)
    options = (*OPTIONS, *(f"-D{key}={value}" for key, value in defines), f"-I{SOURCES}")
    with cupy.cuda.Device(device):
        return cupy.RawModule(code=source(file), options=options).get_function(name)


def _on_cuda(file: str, name: str, defines: tuple[tuple[str, int], ...]) -> Launch:
    device = torch.cuda.current_device()
    function = _compiled(file, name, defines, device)
    overlaps = torch.cuda.get_device_capability(device) >= OVERLAPS
    stream = torch.cuda.current_stream(device).cuda_stream

    def run(
        grid: Grid, block: Grid, arguments: list[Any], shared_bytes: int, overlap: bool
    ) -> None:
        if shared_bytes + function.shared_size_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared_bytes
        values = [
            ctypes.c_float(part) if isinstance(part, float) else ctypes.c_longlong(part)
            for part in arguments
        ]
        sizes = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        config = _Config(*sizes, shared_bytes, stream)
        if overlap and overlaps:
            config.attributes, config.count = ctypes.pointer(_Attribute(6, 1)), 1
        passed = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        address = ctypes.c_void_p(function.kernel.ptr)
        failed = _driver().cuLaunchKernelEx(ctypes.byref(config), address, passed, None)
        if failed:
            raise RuntimeError(f"{name}: the driver refuses to launch it, error {failed}")

    return run


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute. 6, 1: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed."""

    _fields_: ClassVar = [
        ("id", ctypes.c_longlong),  # an int and its padding
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    """CUlaunchConfig: sizes of grid and block, and so on."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@lru_cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver, which CuPy does not pass launch attributes to."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


LOADERS: dict[str, Loader] = {"cuda": _on_cuda}
"""By type of device. Tests add `cpu`: the emulator of `tests/cuda/`."""


@lru_cache
def checked(device: int) -> Any:
    """CuPy, if it and the device can run the kernels. Raises ImportError or RuntimeError."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            'backend="cuda" needs CuPy: pip install "kvindex-torch[cuda13]" (CUDA 13) or '
            '"kvindex-torch[cuda12]" (CUDA 12)'
        ) from error
    if not torch.cuda.is_available():
        raise RuntimeError(
            'backend="cuda" needs an NVIDIA GPU and a driver that torch can use; torch sees none '
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})"
        )
    if (found := torch.cuda.get_device_capability(device)) < OLDEST:
        raise RuntimeError(
            f'backend="cuda": got a GPU of compute capability {found[0]}.{found[1]}, allowed is '
            f'{OLDEST[0]}.{OLDEST[1]} or newer; backend="torch" runs on it'
        )
    try:
        runtime, driver = (
            cupy.cuda.runtime.runtimeGetVersion(),
            cupy.cuda.runtime.driverGetVersion(),
        )
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f'backend="cuda": CuPy cannot reach the driver: {error}') from error
    if driver // 1000 < runtime // 1000:
        raise RuntimeError(
            f'backend="cuda": got a driver for CUDA {driver // 1000}, but this CuPy is built for '
            f"CUDA {runtime // 1000}: update the driver, or install the CuPy of the older CUDA "
            '(pip install "kvindex-torch[cuda12]")'
        )
    return cupy
