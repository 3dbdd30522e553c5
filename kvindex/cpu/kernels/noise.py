"""Compute the random noise that is added to the estimated log weights of keys (`ops.priority`).

The estimated log weight of a key is an estimate of the logarithm of its attention weight. Variables
for it are named `size`. Its sum with the noise is the priority of the key. The keys with the
largest priorities are sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import Number, inlined
from kvindex.cpu.kernels.vectors import FLOATS, INT64, LANES, broadcast, chunk, shuffle
from kvindex.ops import priority

SPREAD = np.uint32(priority.SPREAD)
FIRST, SECOND = (np.uint64(factor) for factor in priority.FACTORS)
ADDED, LOWER, HALF = np.uint64(priority.ADDED), np.uint64(priority.BITS), np.uint64(32)
C0, C1, C2, C3 = (np.int32(coefficient) for coefficient in priority.CURVE)
UNIT, SIXTEEN = np.int32(priority.UNIT), np.int32(16)
NATS = np.float32(priority.NATS)

ABOVE = np.int32((32 + 127 - 8) << 16)
"""Constant of `bound_of`: the upper bound of the noise is this constant minus a float's exponent.

The float is the number formed by the upper 24 of the 32 hash bits. Its exponent is stored with an
offset of 127.
"""

INTS, PAIRS = (ir.VectorType(ir.IntType(512 // n), n) for n in (LANES, LANES // 2))
LARGEST = np.float32(priority.LARGEST)

EIGHT, SEVEN, ONE = np.uint32(8), np.int32(7), np.uint32(1)


@inlined
def number_of(position: int, seed: Number) -> Number:
    """Return the number whose hash gives the noise of the key at `position`, uint32.

    `seed` is the seed of the random numbers for the key's group (KV head of a sequence), uint32.
    """
    return np.uint32(np.uint32(position) * SPREAD + seed)


@inlined
def hashed(number: Number) -> Number:
    """Return the hash of a uint32, which is a uint32.

    This is the compiled version of `ops.priority.hashed`.
    """
    both = np.uint64(np.uint32(number)) * FIRST + ADDED
    both = ((both >> HALF) ^ (both & LOWER)) * SECOND + ADDED
    return np.uint32((both >> HALF) ^ (both & LOWER))


@inlined
def noise_of(number: Number) -> Number:
    """Return the noise `-log2 u`, where the random number `u` in (0, 1) is a hash of `number`.

    This is the compiled version of `ops.priority.noise_of`. The result is an int32, in units of
    `1 / priority.UNIT`.
    """
    bits = np.float64(hashed(number) | ONE).view(np.int64)  # exponent and mantissa are exact
    octave = np.int32(bits >> np.int64(52)) - np.int32(1023)
    t = np.int32(bits >> np.int64(36)) & np.int32(UNIT - 1)
    curve = np.int32(C2 + (np.int32(C3 * t) >> SIXTEEN))
    curve = np.int32(C1 + (np.int32(curve * t) >> SIXTEEN))
    curve = np.int32(C0 + (np.int32(curve * t) >> SIXTEEN))
    arc = np.int32(np.int32(t * np.int32(UNIT - t)) >> SIXTEEN)
    line = np.int32(np.int32(np.int32(32) - octave) * UNIT - t)
    return np.int32(line - (np.int32(arc * curve) >> SIXTEEN))


@inlined
def bound_of(number: Number) -> Number:
    """Return an upper bound of `noise_of(number)` that is faster to compute.

    The noise is `-log2 u` for a random number `u`. To approximate this logarithm, the function
    reads the bits of a float as an integer, which grows linearly between two powers of two. If the
    noise is below 8, the bound exceeds it by at most 0.09. The noise of one key in 256 is 8 or
    larger; for such a key, the bound exceeds the noise by more.
    """
    upper = np.float32(np.int32(hashed(number) >> EIGHT))
    return np.int32(ABOVE - (upper.view(np.int32) >> SEVEN))


def all_of(kind: Any, number: Any) -> Any:
    """Return a constant vector of the type `kind`, whose elements are all equal to `number`."""
    return ir.Constant(kind, [number] * kind.count)


def hashed_pairs(builder: Any, numbers: Any, odd: bool) -> Any:
    """Emit code that hashes every second element of a vector of the type `INTS`.

    If `odd`, the elements at odd positions are hashed, else those at even positions. The other
    elements of the result are undefined.
    """
    lower, half = all_of(PAIRS, priority.BITS), all_of(PAIRS, 32)
    both = builder.bitcast(numbers, PAIRS)
    both = builder.lshr(both, half) if odd else both
    for factor in priority.FACTORS:
        product = builder.mul(builder.and_(both, lower), all_of(PAIRS, factor))
        before = builder.add(product, all_of(PAIRS, priority.ADDED))
        both = builder.xor(builder.lshr(before, half), before)
    both = builder.xor(builder.shl(before, half), before) if odd else both
    return builder.bitcast(both, INTS)


def bounds_of(builder: Any, numbers: Any) -> Any:
    """Emit code that computes an upper bound of the random noise of each key.

    `numbers` is a vector of the type `INTS` with the numbers of the keys. For each of them, the
    result is the same as that of `bound_of`.
    """
    pairs = [hashed_pairs(builder, numbers, odd) for odd in (False, True)]
    hashes = shuffle(builder, pairs[0], pairs[1], [i + LANES * (i % 2) for i in range(LANES)])
    upper = builder.sitofp(builder.lshr(hashes, all_of(INTS, 8)), FLOATS)
    line = builder.ashr(builder.bitcast(upper, INTS), all_of(INTS, 7))
    return builder.sub(all_of(INTS, int(ABOVE)), line)


def rounded(builder: Any, sizes: Any) -> Any:
    """Emit code that rounds estimated log weights (sizes) to integers.

    `sizes` is a vector of the type `FLOATS`, and the result has the type `INTS`. Larger numbers
    than `LARGEST` become `LARGEST`.
    """
    most = all_of(FLOATS, float(LARGEST))
    bounded = builder.select(builder.fcmp_ordered("<", sizes, most), sizes, most)
    name = f"llvm.rint.v{LANES}f32"
    rint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS]), name)
    return builder.fptosi(builder.call(rint, [bounded]), INTS)


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _add_bounds(_: Any, number: Any, sizes: Any, chunks: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number, sizes, chunks, out = arguments
        steps = ir.Constant(INTS, [i * priority.SPREAD & priority.BITS for i in range(LANES)])
        more = all_of(INTS, LANES * priority.SPREAD & priority.BITS)
        numbers = cgutils.alloca_once(builder, INTS)
        builder.store(builder.add(broadcast(builder, number, INTS), steps), numbers)
        with cgutils.for_range(builder, chunks) as loop:
            own = builder.load(numbers)
            builder.store(builder.add(own, more), numbers)
            some = rounded(builder, builder.load(chunk(builder, sizes, loop.index), align=4))
            at = builder.add(out, builder.mul(loop.index, INT64(4 * LANES)))
            place = builder.inttoptr(at, INTS.as_pointer())
            builder.store(builder.add(some, bounds_of(builder, own)), place, align=4)
        return context.get_dummy_value()

    return types.void(types.uint32, types.int64, types.int64, types.int64), code


@inlined
def add_bounds(sizes: np.ndarray, number: Number, out: np.ndarray) -> None:
    """Compute upper bounds of the priorities of keys.

    A priority is the estimated log weight of a key plus random noise. To get an upper bound, an
    upper bound of the noise is added, which is faster to compute than the noise (`bound_of`).

    Args:
        sizes: Estimated log weights of consecutive keys, float32 `[n]`, where `n` is a multiple of
            16.
        number: Result of `number_of` for the first key.
        out: Result, int32 `[n]`.
    """
    _add_bounds(number, sizes.ctypes.data, len(out) // LANES, out.ctypes.data)
