"""Compiling kernels, and what LLVM offers beyond numpy: memory at an address, population counts.

Kernels run on one thread without Python's lock (`kvindex.cpu.threads` runs several); compiled code
is kept on disk where a folder can be written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

try:
    import numba
    from numba.core import cgutils, types
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


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is called first."""
    options: dict[str, Any] = dict(nogil=True, error_model="numpy", fastmath=REORDERED)
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        compiled = numba.njit(**options)(function)
    return compiled


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
def float32_at(address: int, count: int) -> np.ndarray:
    """As `uint8_at`, float32."""
    return numba.carray(_pointer(address), (count,), np.float32)  # type: ignore[no-any-return]
