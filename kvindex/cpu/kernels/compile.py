"""Compile kernels with Numba, and give kernels access to LLVM instructions that numpy lacks.

A kernel runs on one thread and releases Python's global interpreter lock, so that
`kvindex.cpu.threads` can run it on several threads. Compiled code is stored on disk if Numba finds
a writable folder for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from kvindex.core.extras import how_to_install

try:
    import numba
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.compiler_lock import global_compiler_lock as global_compiler_lock
    from numba.core.registry import cpu_target
    from numba.extending import intrinsic
except ImportError as error:
    raise ImportError(
        f"backend: got 'cpu', but numba is not installed; install it with {how_to_install('cpu')}"
    ) from error

Number: TypeAlias = Any
"""A number of Python or numpy. In compiled code, it is a number in a register of the CPU."""

REORDERED = {"reassoc", "contract", "nsz"}
"""LLVM's fast-math flags that allow it to vectorize sums. Infinities and NaN still work."""

FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
"""Names of the instruction sets of this machine, each with + or - before it."""

_here = Path(__file__).parent

NUMBERS = "codes", "priority", "transform"
"""Files of `kvindex/ops` whose constants are compiled into kernels."""

_files = [*sorted(_here.glob("*.py")), *(_here.parents[1] / "ops" / f"{n}.py" for n in NUMBERS)]
SOURCES = sha256(b"".join(file.read_bytes() for file in _files))


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that Numba compiles it at its first call.

    Numba's cache finds compiled code by the function's name and the date of its file. The compiled
    code also contains kernels and constants of other files, so a hash of all these files is added
    to the function's name.
    """
    return _compiled(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function as `kernel` does, and inline it into the kernels that call it.

    Inlining saves the time of the calls.
    """
    return _compiled(function, forceinline=True)


class CodeFiles(IndexDataCacheFile):  # type: ignore[misc]  # Numba is not typed
    """Files of Numba's cache, with random names so that processes never share a file by accident.

    Numba itself names the files by consecutive numbers, and takes the next number from a file that
    it does not lock. If two processes compiled a function at the same time for different argument
    types, both would use the same file name. Then one process would later run the code of the
    other process.
    """

    def _data_name(self, number: int) -> Any:
        return super()._data_name(uuid4().int)


class CodeCache(FunctionCache):  # type: ignore[misc]  # as above
    """Numba's cache of compiled code, with files named by `CodeFiles`.

    Raises:
        RuntimeError: Numba finds no writable folder for the files.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = CodeFiles(self.cache_path, self._impl.filename_base, stamp)


def _compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    function.__qualname__ += "_" + SOURCES.hexdigest()[:16]
    options = dict(nogil=True, error_model="numpy", fastmath=REORDERED, **more)
    compiled = numba.njit(**options)(function)
    with suppress(RuntimeError):
        compiled._cache = CodeCache(function)
    return compiled  # type: ignore[no-any-return]  # Numba is not typed


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _pointer(_: Any, address: Any) -> Any:
    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def popcount(_: Any, word: Any) -> Any:
    """Count the 1 bits of a uint64. LLVM vectorizes this if the CPU has an instruction for it."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def lowest_bit(_: Any, word: Any) -> Any:
    """Return the position of the lowest 1 bit of a uint64, or 64 for 0."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def prefetch(_: Any, address: Any) -> Any:
    """Prefetch the memory at an address (int64) for reading."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        type_of = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, type_of, name)
        place = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [place, number(0), number(3), number(1)])  # read, all caches, data
        return context.get_dummy_value()

    return types.void(types.int64), code


@inlined
def keep(*arrays: np.ndarray) -> None:
    """Do nothing. A function calls this last, so that Numba does not free its arrays earlier.

    Numba frees an array after the last use of its name. If a function uses only the address of an
    array from then on, the memory could be reused before it is read.
    """


@kernel
def uint8_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, uint8 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.uint8)  # type: ignore[no-any-return]


@kernel
def uint16_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, uint16 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.uint16)  # type: ignore[no-any-return]


@kernel
def uint64_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, uint64 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.uint64)  # type: ignore[no-any-return]


@kernel
def int32_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, int32 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.int32)  # type: ignore[no-any-return]


@kernel
def int64_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, int64 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.int64)  # type: ignore[no-any-return]


@kernel
def float32_at(address: int, count: int) -> np.ndarray:
    """Return the numbers at an address as an array, float32 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.float32)  # type: ignore[no-any-return]
