"""Compile kernels with NVRTC, and launch them on the current stream.

A kernel is a function in a `.cu` file of `kernels/`. It is compiled at the first launch with each
set of macros. Arguments are passed by name, in any order (`signature.py`). A tensor is passed as
its address, and None as a null pointer. This module checks the names and types of arguments and the
device of tensors; the functions that call it check dtypes, strides and ranges.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kvindex.core.extras import how_to_install
from kvindex.core.streams import raw_device, raw_stream
from kvindex_cuda.runtime.constants import constants
from kvindex_cuda.runtime.driver import Attribute, Config, driver
from kvindex_cuda.runtime.signature import Signature, signature

SOURCES = Path(__file__).parents[1] / "kernels"

OLDEST = (8, 0)
"""Oldest supported compute capability. It introduced the bit matrix instruction that `scan.cu`
uses."""

OVERLAPS = (9, 0)
"""First compute capability on which a kernel may begin before the previous kernel ends."""

WARPGROUPS = (9, 0)
"""The only compute capability with matrix products of warpgroups (`wgmma`), for `WARPGROUPS=1`."""

OPTIONS = ("--std=c++17",)

ADDED = "-ftz=true", "--device-as-default-execution-space"
"""NVRTC options that CuPy 14.2 adds itself (cupy/cuda/compiler.py), besides the architecture.

`_compile_with_cache_cuda` adds the first, `_compile_using_nvrtc_no_warning` the second. CuPy's
core.pyx also adds `-I` options for headers of CuPy and CUDA, which the kernels do not include."""

Grid = tuple[int, ...]
Launch = Callable[[Grid, Grid, list[Any], int, bool], None]
"""Launches a compiled kernel. Arguments: grid, block, the kernel's arguments in the order of its
signature with addresses for tensors, bytes of dynamic shared memory, `overlap`."""

Argument = Tensor | int | float | None

Loader = Callable[[str, str, tuple[tuple[str, int], ...]], Launch]
"""Returns the launch of a function. Arguments: a file in `kernels/`, the function's name, and
definitions."""


_number, _address = Tensor.get_device, Tensor.data_ptr
"""Unbound methods, which are faster to call. A launch calls both for about twenty tensors."""


def source(file: str) -> str:
    """Return the source text of `kernels/<file>`."""
    return (SOURCES / file).read_text(encoding="utf-8")


def included(text: str) -> list[str]:
    """Return the texts of all headers in `kernels/` that a source file includes, directly or
    indirectly."""
    found = []
    for name in re.findall(r'^#include "([\w/]+\.cuh)"', text, re.MULTILINE):
        found += [source(name), *included(source(name))]
    return found


def keyed(file: str) -> str:
    """Return the text of a source file, followed by a digest of its headers.

    CuPy caches machine code by the text of the source and the options. Without the digest, it would
    not notice a changed header.
    """
    text = source(file)
    return f"{text}\n// {_digest(*included(text))}\n"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def options(file: str, defines: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Return the compiler options of NVRTC for a source file. CuPy adds the architecture and
    further flags (`ADDED`)."""
    given = constants(file) | dict(defines)
    return (*OPTIONS, *(f"-D{key}={value}" for key, value in given.items()), f"-I{SOURCES}")


def warpgroups(device: torch.device) -> int:
    """Return the value of the macro `WARPGROUPS`: 1 if the device supports `wgmma` or is the
    emulator of the tests, else 0."""
    return int(device.type != "cuda" or torch.cuda.get_device_capability(device) == WARPGROUPS)


_signatures: dict[tuple[str, str], tuple[Path, Signature]] = {}


def signature_of(file: str, name: str) -> Signature:
    """Return the signature (parameters and their types) of a kernel. The source is parsed at the
    first call."""
    known = _signatures.get((file, name))
    if known is None or known[0] is not SOURCES:
        known = _signatures[file, name] = SOURCES, signature(source(file), name)
    return known[1]


def launch(
    file: str,
    name: str,
    grid: Grid,
    block: Grid,
    *,
    arguments: Mapping[str, Argument],
    shared_bytes: int = 0,
    overlap: bool | int = False,
    **defines: int,
) -> None:
    """Run a kernel on torch's current stream of the tensors' device.

    Args:
        file: Path of the source below `kernels/`.
        name: Name of the function.
        grid: Thread blocks in each dimension.
        block: Threads in each dimension.
        arguments: Values of the parameters by name: a tensor or None for a pointer, an int or a
            float for a number.
        shared_bytes: Dynamic shared memory.
        overlap: Allow the kernel to begin before the previous one ends (`after_previous` in
            common.cuh).
        **defines: Values of further macros for the source (`-Dname=value`).

    Raises:
        ImportError: CuPy is not installed.
        RuntimeError: The device cannot run the kernel.
        ValueError: Names or types of arguments are wrong, or tensors are on several devices.
    """
    takes = signature_of(file, name)
    if len(arguments) != len(takes.fields):
        raise takes.wrong_names(arguments)
    try:
        values = [arguments[name] for name in takes.names]
    except KeyError:
        raise takes.wrong_names(arguments) from None
    run(file, takes, values, grid, block, shared_bytes, overlap, tuple(defines.items()))


def run(
    file: str,
    takes: Signature,
    values: list[Any],
    grid: Grid,
    block: Grid,
    shared_bytes: int,
    overlap: bool | int,
    defines: tuple[tuple[str, int], ...],
) -> None:
    """Run a kernel like `launch`, but with a list of arguments in the order of the kernel's
    parameters."""
    device, passed = _passed(takes, values)
    if device.type not in LOADERS:
        raise ValueError(f"{takes.kernel}: got tensors on {device}, allowed is a CUDA device")
    if 0 in grid:
        return
    load, name = LOADERS[device.type], takes.kernel
    if device.type != "cuda" or device.index == raw_device():
        load(file, name, defines)(grid, block, passed, shared_bytes, bool(overlap))
        return
    with torch.cuda.device(device):
        load(file, name, defines)(grid, block, passed, shared_bytes, bool(overlap))


def load(file: str, name: str, device: torch.device, **defines: int) -> None:
    """Compile a kernel and load it on a device in advance, so that its first launch does not have
    to.

    The arguments and errors are those of `launch`. On a device that cannot run kernels, this does
    nothing.
    """
    if device.type not in LOADERS:
        return
    if device.type != "cuda":
        LOADERS[device.type](file, name, tuple(defines.items()))
        return
    with torch.cuda.device(device):
        LOADERS[device.type](file, name, tuple(defines.items()))


def _passed(takes: Signature, passed: list[Any]) -> tuple[torch.device, list[Any]]:
    """Replace each tensor in `arguments` by its address. Return the device of the tensors, and the
    new list."""
    device: torch.device | None = None
    number = -1  # number of the device, -1 for none; ints compare faster
    for i, kind in takes.numbers:
        if type(passed[i]) is not kind:
            raise takes.wrong_type(i, passed[i])
    for i in takes.pointers:
        part = passed[i]
        if part is None:
            passed[i] = 0
        elif type(part) is Tensor or isinstance(part, Tensor):
            if device is None:
                device, number = part.device, _number(part)
            elif _number(part) != number or (number < 0 and part.device != device):
                raise ValueError(
                    f"{takes.kernel}: got tensors on {device} and {part.device}, allowed is one "
                    "device"
                )
            passed[i] = _address(part)
        else:
            raise takes.wrong_type(i, part)
    if device is None:
        raise ValueError(
            f"{takes.kernel}: got no tensor; pass at least one, which determines the device"
        )
    return device, passed


@cache
def _compiled(file: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> _Kernel:
    """Return the kernel, compiled for and loaded on one device."""
    cupy, given = checked(device), options(file, defines)
    with cupy.cuda.Device(device), tempfile.TemporaryDirectory() as folder:
        if dict(defines).get("WARPGROUPS"):
            path = Path(folder, "kernel.cubin")
            path.write_bytes(_kept(cupy.cuda.nvrtc, file, given))
            module = cupy.RawModule(path=str(path))
        else:
            module = cupy.RawModule(code=keyed(file), options=given)
        return _Kernel(signature_of(file, name), module.get_function(name), device)


def _kept(nvrtc: Any, file: str, given: tuple[str, ...]) -> bytes:
    """Return the machine code of the source `file` for `sm_90a`. Read it from CuPy's cache folder,
    or compile the source and write the machine code to this folder."""
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    key = _digest(keyed(file), *given, *ADDED, str(nvrtc.getVersion()))
    path = Path(folder, f"kvindex-{key}.cubin")
    with suppress(OSError):
        return path.read_bytes()
    made = _assembled(nvrtc, file, given)
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            (part := Path(scratch, "part")).write_bytes(made)
            part.replace(path)
    return made


def _assembled(nvrtc: Any, file: str, given: tuple[str, ...]) -> bytes:
    """Compile a source to machine code for `sm_90a`, which CuPy cannot do (it compiles for
    `sm_90`)."""
    program = nvrtc.createProgram(source(file), file, (), ())
    try:
        nvrtc.compileProgram(program, (*given, *ADDED, "-arch=sm_90a"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{file}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _on_cuda(file: str, name: str, defines: tuple[tuple[str, int], ...]) -> Launch:
    return _compiled(file, name, defines, raw_device())


class _Kernel:
    """Launches a kernel that CuPy has loaded, on the current stream of its device. Each launch
    writes its arguments to the same memory, from which the driver reads them."""

    def __init__(self, takes: Signature, function: Any, device: int) -> None:
        self._name, self._function, self._device = takes.kernel, function, device
        self._static, self._allowed = function.shared_size_bytes, 48 * 1024
        overlaps = torch.cuda.get_device_capability(device) >= OVERLAPS
        self._attribute, self._attributes = Attribute(6, 1), int(overlaps)
        self._config = Config(attributes=ctypes.pointer(self._attribute))
        self._run: Any = driver().cuLaunchKernelEx
        self._fixed = ctypes.byref(self._config), ctypes.c_void_p(function.kernel.ptr)
        self._sizes: tuple[Grid, Grid, int] | None = None
        self._pack = takes.packing.pack_into
        self._values = (ctypes.c_longlong * (-(-takes.packing.size // 8) or 1))()
        start = ctypes.addressof(self._values)
        places = (0,) if takes.by_value else takes.places  # a struct is a single parameter
        self._pointers = (ctypes.c_void_p * len(places))(*(start + place for place in places))
        self._one_at_a_time = Lock()  # ctypes releases the GIL

    def __call__(
        self, grid: Grid, block: Grid, arguments: list[Any], shared_bytes: int, overlap: bool
    ) -> None:
        with self._one_at_a_time:
            if (sizes := (grid, block, shared_bytes)) != self._sizes:
                self._resize(*sizes)
            self._pack(self._values, 0, *arguments)
            config = self._config
            config.stream = raw_stream(self._device)
            config.count = self._attributes if overlap else 0
            failed = self._run(*self._fixed, self._pointers, None)
        if failed:
            raise RuntimeError(
                f"{self._name}: the driver could not launch this kernel, CUDA error {failed}"
            )

    def _resize(self, grid: Grid, block: Grid, shared_bytes: int) -> None:
        """Write grid size, block size and shared memory to the launch configuration if they differ
        from the previous launch."""
        if shared_bytes + self._static > self._allowed:
            self._function.max_dynamic_shared_size_bytes = shared_bytes
            self._allowed = shared_bytes + self._static
        config, self._sizes = self._config, (grid, block, shared_bytes)
        config.gx, config.gy, config.gz = (*grid, 1, 1)[:3]
        config.bx, config.by, config.bz = (*block, 1, 1)[:3]
        config.shared_bytes = shared_bytes


LOADERS: dict[str, Loader] = {"cuda": _on_cuda}
"""Type of device -> its loader. Tests add `cpu`, the emulator in `tests/cuda/`."""


@lru_cache
def checked(device: int) -> Any:
    """Return the module `cupy`. Raises ImportError if CuPy is not installed, and RuntimeError if
    the device or its driver cannot run the kernels."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            'backend="cuda" needs CuPy, which is not installed; install it with '
            f"{how_to_install('cuda13')}, for CUDA 13; the extra for CUDA 12 is cuda12"
        ) from error
    if not torch.cuda.is_available():
        raise RuntimeError(
            'backend="cuda" needs an NVIDIA GPU, but torch finds none (torch '
            f"{torch.__version__}, built for CUDA {torch.version.cuda}). If the machine has a GPU, "
            "install a driver for that CUDA version; nvidia-smi shows the version of the driver"
        )
    if (found := torch.cuda.get_device_capability(device)) < OLDEST:
        raise RuntimeError(
            f'backend="cuda": got a GPU of compute capability {found[0]}.{found[1]}, allowed is '
            f'{OLDEST[0]}.{OLDEST[1]} or newer; use backend="torch" on this GPU'
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
            "(pip install cupy-cuda12x)"
        )
    return cupy


def capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
