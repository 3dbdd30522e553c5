"""Compiling kernels, and what LLVM offers beyond numpy: memory at an address, population counts.

Kernels run on one thread without Python's lock (`kvindex.cpu.threads` runs several); compiled code
is kept on disk where a folder can be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

try:
    import numba
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.compiler_lock import global_compiler_lock as global_compiler_lock
    from numba.extending import intrinsic
except ImportError as error:
    raise ImportError(
        "backend: got 'cpu', but numba is not installed; allowed is "
        "pip install 'kvindex-torch[cpu]'"
    ) from error

Number: TypeAlias = Any
"""A number of Python or of numpy: kernels' are machine numbers of either name."""

REORDERED = {"reassoc", "contract", "nsz"}
"""Freedoms of float arithmetic that sums need to be vectorized: infinities and NaN stay."""

_here = Path(__file__).parent

NUMBERS = "codes", "priority", "transform"
"""Files of `kvindex/ops` whose constants become a part of kernels."""

_files = [*sorted(_here.glob("*.py")), *(_here.parents[1] / "ops" / f"{n}.py" for n in NUMBERS)]
SOURCES = sha256(b"".join(file.read_bytes() for file in _files))


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is called first.

    Numba keeps code by a function's name and the date of its file; kernels of other files and
    constants are part of it, so that the name tells all of them.
    """
    return _compiled(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `kernel`, for one that becomes a part of each that calls it: a call takes as long."""
    return _compiled(function, forceinline=True)


class CodeFiles(IndexDataCacheFile):  # type: ignore[misc]  # Numba is not typed
    """Files of a function's code, to which no two processes give one name.

    Numba numbers them by an index that nothing locks: of two processes that compile a function at
    once, for arguments of other types, one would from then on run the other's code.
    """

    def _data_name(self, number: int) -> Any:
        return super()._data_name(uuid4().int)


class CodeCache(FunctionCache):  # type: ignore[misc]  # as above
    """What Numba keeps of a function, in `CodeFiles`; RuntimeError where no folder is to be had."""

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
    """Ones among the bits of a uint64, a uint64: LLVM vectorizes it where the machine can."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def lowest_bit(_: Any, word: Any) -> Any:
    """Position of the lowest 1 of a uint64, 64 for 0."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def prefetch(_: Any, address: Any) -> Any:
    """Ask for the memory at an address, an int64, to be read soon."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        type_of = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, type_of, name)
        place = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [place, number(0), number(3), number(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(types.int64), code


@inlined
def keep(*arrays: np.ndarray) -> None:
    """Have arrays live until here, whose addresses are used.

    Numba frees an array after the last use of its name; what was read or written at its address
    from then on would be somebody else's memory.
    """


@kernel
def uint8_at(address: int, count: int) -> np.ndarray:
    """Numbers that lie at an address, uint8 `[count]`."""
    return numba.carray(_pointer(address), (count,), np.uint8)  # type: ignore[no-any-return]


@kernel
def uint16_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, uint16."""
    return numba.carray(_pointer(address), (count,), np.uint16)  # type: ignore[no-any-return]


@kernel
def uint64_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, uint64."""
    return numba.carray(_pointer(address), (count,), np.uint64)  # type: ignore[no-any-return]


@kernel
def int32_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, int32."""
    return numba.carray(_pointer(address), (count,), np.int32)  # type: ignore[no-any-return]


@kernel
def int64_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, int64."""
    return numba.carray(_pointer(address), (count,), np.int64)  # type: ignore[no-any-return]


@kernel
def float32_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, float32."""
    return numba.carray(_pointer(address), (count,), np.float32)  # type: ignore[no-any-return]
