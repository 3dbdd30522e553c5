"""Compile and launch kernels: one `.cu` file in `kernels/`, one function, on the current stream.

A kernel's source is compiled by NVRTC the first time it runs with a set of definitions. Arguments:
a tensor is passed as its address, None as a null pointer, an int as `long long`, a float as
`float`. Launchers check dtypes, strides, devices and ranges; here nothing but the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "kernels"

OLDEST = (8, 0)
"""Compute capability: the first with the bit matrix instruction that `scan.cu` uses."""

OPTIONS = ("--std=c++17",)

Grid = tuple[int, ...]
Launch = Callable[[Grid, Grid, list[Any], int], None]
"""Of a compiled kernel: grid, block, arguments, bytes of dynamic shared memory."""

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
    **defines: int,
) -> None:
    """Run `name` of `kernels/<file>` on torch's current stream of the tensors' device.

    defines: what the source leaves open, as `-Dname=value`. Raises ImportError without CuPy,
    RuntimeError for a device that cannot run it, ValueError for tensors of several devices.
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
        run(grid, block, [_passed(part) for part in arguments], shared_bytes)


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
    stream = _stream(checked(device), torch.cuda.current_stream(device).cuda_stream, device)

    def run(grid: Grid, block: Grid, arguments: list[Any], shared_bytes: int) -> None:
        import numpy

        if shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared_bytes
        typed = tuple(numpy.float32(a) if isinstance(a, float) else a for a in arguments)
        with stream:
            function(grid, block, typed, shared_mem=shared_bytes)

    return run


class _Handle:
    """A stream by its address, in CUDA's stream protocol."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _stream(cupy: Any, address: int, device: int) -> Any:
    """CuPy's view of torch's stream; CuPy 14 has another name for it than 13."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(address))
    return cupy.cuda.ExternalStream(address, device)


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
