"""Compute inner products and weighted sums of float32 vectors, with LLVM's vector types.

LLVM compiles these types to the vector instructions of the CPU. Its automatic vectorization is not
used, because the vectors have only a few dozen to a few hundred numbers: the code that LLVM puts
before the loop would take longer than the loop.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import float32_at, inlined, int64_at

LANES = 16
"""Number of float32 numbers in a vector of 512 bits."""

FOUR = 4
"""Number of rows that are processed at a time."""

FREE = "reassoc", "contract", "nsz"
"""LLVM's fast-math flags for sums, as `compile.REORDERED`."""

FLOAT, INT64 = ir.FloatType(), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)


def element(builder: Any, address: Any, kind: Any, at: Any) -> Any:
    """Return a pointer to element `at` of an array at `address` with elements of type `kind`."""
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [at])


def chunk(builder: Any, address: Any, number: Any) -> Any:
    """Return a pointer to vector number `number` of a float32 array at `address`.

    The array is divided into vectors of `LANES` numbers.
    """
    at = builder.add(address, builder.mul(number, INT64(4 * LANES)))
    return builder.inttoptr(at, FLOATS.as_pointer())


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit `a · b + c` for vectors, which LLVM may compile to fused multiply-adds."""
    return builder.fadd(builder.fmul(a, b, flags=FREE), c, flags=FREE)


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Emit code that makes a vector of elements of `a` and `b`.

    `order` lists the elements: indices from 0 select from `a`, and indices from the length of `a`
    on select from `b`.
    """
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(a, b, mask)


def totals(builder: Any, vectors: list[Any]) -> Any:
    """Emit code that computes the sum of the elements of each of four vectors.

    The result is a vector of the four sums. The vectors are halved repeatedly: the upper half of a
    vector is added to its lower half.
    """
    first, second, third, fourth = vectors
    pairs = halved(builder, first, second, 8), halved(builder, third, fourth, 8)
    sums = halved(builder, *pairs, 4)
    for length in (2, 1):
        sums = halved(builder, sums, None, length)
    return sums


def halved(builder: Any, a: Any, b: Any, length: int) -> Any:
    """Emit code that adds pairs of elements of a vector, and so halves its length.

    The vector `a` is divided into runs of `2 · length` elements. In each run, the second half is
    added to the first half. The result contains the sums of `a`, followed by the sums of the vector
    `b` if it is not None.
    """
    count = a.type.count * (1 if b is None else 2)
    b = ir.Constant(a.type, ir.Undefined) if b is None else b
    lower = [i for i in range(count) if not i // length % 2]
    upper = [i + length for i in lower]
    return builder.fadd(shuffle(builder, a, b, lower), shuffle(builder, a, b, upper), flags=FREE)


def broadcast(builder: Any, number: Any, kind: Any) -> Any:
    """Emit code that makes a vector of the type `kind`, whose elements are all `number`."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _four_dots(_: Any, query: Any, rows: Any, chunks: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        query, rows, chunks, out = arguments
        places = [builder.load(element(builder, rows, INT64, INT64(r))) for r in range(FOUR)]
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in places]
        for place in sums:
            builder.store(ir.Constant(FLOATS, [0.0] * LANES), place)
        with cgutils.for_range(builder, chunks) as loop:
            own = builder.load(chunk(builder, query, loop.index), align=4)
            for row, place in zip(places, sums, strict=True):
                other = builder.load(chunk(builder, row, loop.index), align=4)
                builder.store(multiply_add(builder, own, other, builder.load(place)), place)
        dots = totals(builder, [builder.load(place) for place in sums])
        builder.store(dots, builder.inttoptr(out, dots.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def _add_four(_: Any, weights: Any, rows: Any, chunks: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weights, rows, chunks, out = arguments
        places = [builder.load(element(builder, rows, INT64, INT64(r))) for r in range(FOUR)]
        some = [builder.load(element(builder, weights, FLOAT, INT64(r))) for r in range(FOUR)]
        some = [broadcast(builder, weight, FLOATS) for weight in some]
        with cgutils.for_range(builder, chunks) as loop:
            here = chunk(builder, out, loop.index)
            stored = builder.load(here, align=4)
            for row, weight in zip(places, some, strict=True):
                other = builder.load(chunk(builder, row, loop.index), align=4)
                stored = multiply_add(builder, other, weight, stored)
            builder.store(stored, here, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def reaching(_: Any, numbers: Any, threshold: Any) -> Any:
    """Compare the 64 int32 numbers at an address with a threshold.

    Bit `i` of the result, a uint64, is 1 if number `i` is at least the threshold.
    """

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(ir.IntType(32), 64)
        own = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=4)
        ones = builder.icmp_signed(">=", own, broadcast(builder, arguments[1], kind))
        return builder.bitcast(ones, INT64)

    return types.uint64(types.int64, types.int32), code


@inlined
def four_dots(query: int, rows: int, D: int, out: int) -> None:
    """Compute the inner products of a query with four vectors.

    Args:
        query: Address of the query, float32 `[D]`.
        rows: Address of an int64 array with the addresses of the four vectors, float32 `[D]` each.
        D: Dimension.
        out: Address of the result, float32 `[4]`.
    """
    if D == 64:  # a constant length, so that LLVM unrolls the loop
        _four_dots(query, rows, 4, out)
    elif D == 128:
        _four_dots(query, rows, 8, out)
    else:
        _four_dots(query, rows, D // LANES, out)
    if D % LANES:
        own, dots, places = float32_at(query, D), float32_at(out, FOUR), int64_at(rows, FOUR)
        for r in range(FOUR):
            row = float32_at(places[r], D)
            for d in range(D - D % LANES, D):
                dots[r] += own[d] * row[d]


@inlined
def add_four(weights: int, rows: int, D: int, out: int) -> None:
    """Add the weighted sum of four vectors to `out`.

    Args:
        weights: Address of the four weights, float32 `[4]`.
        rows: Address of an int64 array with the addresses of the four vectors, float32 `[D]` each.
        D: Dimension.
        out: Address of the sum, float32 `[D]`.
    """
    if D == 64:  # a constant length, so that LLVM unrolls the loop
        _add_four(weights, rows, 4, out)
    elif D == 128:
        _add_four(weights, rows, 8, out)
    else:
        _add_four(weights, rows, D // LANES, out)
    if D % LANES:
        some, sums, places = float32_at(weights, FOUR), float32_at(out, D), int64_at(rows, FOUR)
        for r in range(FOUR):
            row = float32_at(places[r], D)
            for d in range(D - D % LANES, D):
                sums[d] += some[r] * row[d]
