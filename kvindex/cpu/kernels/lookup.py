"""Compute votes (coarse scores of keys) with look-up tables, for 64 keys at a time.

A vote is mainly the inner product of a key's signs (±1) with a query that is rounded to integers.
For four coordinates, there are 16 combinations of signs, so a table of 16 bytes contains all
possible inner products. The table fits in a vector register. The instruction `pshufb` looks up the
entries of 64 keys at a time with AVX-512, or of 32 keys with AVX2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import FEATURES, inlined, kernel
from kvindex.cpu.kernels.vectors import broadcast, shuffle

KEYS = 64
"""Number of keys that are processed at a time."""

NIBBLES = 16
"""Number of nibbles (groups of four signs) in a 64-bit word."""

LARGEST = 31
"""Largest coordinate of a rounded query for which table entries fit in bytes."""

BIAS = 4 * LARGEST
"""Constant that is added to each table entry, so that no entry is negative."""

WIDE = "+avx512bw" in FEATURES
"""True if this machine has `pshufb` for vectors of 512 bits (AVX-512BW)."""

SERVED = WIDE or {"+avx2", "+fma"} <= FEATURES
"""True if this machine has `pshufb` for vectors of 256 bits at least, and fused multiply-add."""

INT16, INT32, INT64 = (ir.IntType(n) for n in (16, 32, 64))
BYTES = ir.VectorType(ir.IntType(8), KEYS)
HALF = ir.VectorType(ir.IntType(8), KEYS // 2)
QUARTER = ir.VectorType(ir.IntType(8), KEYS // 4)
SHORTS = ir.VectorType(INT16, KEYS // 2)
WORDS = ir.VectorType(INT64, 8)
SUMS = ir.VectorType(INT32, KEYS // 2)
SIZES = ir.VectorType(ir.FloatType(), KEYS // 2)


def loaded(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Emit code that loads a vector of the type `kind` from `address + offset`."""
    at = builder.add(address, INT64(offset))
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=1)


def transposed(builder: Any, words: Any) -> list[Any]:
    """Emit code that transposes the sign bits of 64 keys, from `[64, 8]` bytes to `[8, 64]`.

    `words` is the address of one 64-bit word for each key. The result is 8 vectors: vector `b`
    contains byte `b` of all words. In a vector, the bytes of keys `j` and `32 + j` are adjacent.
    """
    return _permuted_rows(builder, words) if WIDE else _interleaved(builder, words)


def _permuted_rows(builder: Any, words: Any) -> list[Any]:
    rows = []
    order = [(u * 4 + t) * 8 + b for b in range(8) for t in range(4) for u in range(2)]
    for i in range(8):
        lower_half, upper_half = (
            loaded(builder, words, 8 * (4 * i + 32 * u), HALF) for u in range(2)
        )
        eight = shuffle(builder, lower_half, upper_half, list(range(KEYS)))
        rows.append(builder.bitcast(shuffle(builder, eight, eight, order), WORDS))
    for d in (1, 2, 4):
        lower = [8 + k - d if k & d else k for k in range(8)]
        upper = [8 + k if k & d else k + d for k in range(8)]
        for i in (i for i in range(8) if not i & d):
            pair = rows[i], rows[i + d]
            rows[i], rows[i + d] = (shuffle(builder, *pair, order) for order in (lower, upper))
    return [builder.bitcast(row, BYTES) for row in rows]


def _interleaved(builder: Any, words: Any) -> list[Any]:
    """Emit code for AVX2 that transposes the sign bits of 64 keys, as `transposed` describes.

    The instructions interleave the bytes of two registers of 32 bytes: first the lower 16 bytes of
    both, then the upper 16 bytes.
    """
    halves = []
    for first in (0, 16):
        # Fill the list `groups` with vectors of 32 bytes. In the first 16 bytes of a vector, the
        # 8 bytes of key `j` and the 8 bytes of key `32 + j` alternate. In the last 16 bytes, the
        # bytes of keys `8 + j` and `40 + j` alternate.
        groups = []
        for j in range(first, first + 8, 2):
            a, b = (_four_keys(builder, words, start + j) for start in (0, 32))
            groups += [[_merged(builder, a, b, 1, upper)] for upper in (False, True)]
        for size in (2, 4, 8):
            pairs = zip(groups[::2], groups[1::2], strict=True)
            groups = [_all_merged(builder, one, other, size) for one, other in pairs]
        halves.append(groups[0])
    lanes = list(range(KEYS))
    return [shuffle(builder, a, b, lanes) for a, b in zip(*halves, strict=True)]


def _four_keys(builder: Any, words: Any, key: int) -> Any:
    """Emit code that loads the sign bits of four keys as a vector of 32 bytes, 8 bytes per key.

    These are the keys number `key`, `key + 1`, `key + 8` and `key + 9` of the array at the address
    `words`.
    """
    a, b = (loaded(builder, words, 8 * (key + more), QUARTER) for more in (0, 8))
    return shuffle(builder, a, b, list(range(HALF.count)))


def _all_merged(builder: Any, some: list[Any], others: list[Any], size: int) -> list[Any]:
    """Emit code that merges each vector in `some` with the vector at the same position in `others`.

    For each pair, `_merged` is called twice: for the lower and for the upper halves of the lanes.
    """
    pairs = zip(some, others, strict=True)
    return [_merged(builder, a, b, size, upper) for a, b in pairs for upper in (False, True)]


def _merged(builder: Any, a: Any, b: Any, size: int, upper: bool) -> Any:
    """Emit code that interleaves the bytes of the vectors `a` and `b`, of 32 bytes each.

    The vectors consist of two lanes of 16 bytes. In each lane, the code takes the upper 8 bytes of
    `a` and of `b` if `upper` is True, otherwise the lower 8 bytes. The result alternates between
    `size` bytes of `a` and `size` bytes of `b`.
    """
    order = []
    for start in range(0, HALF.count, 16):
        for run in range(start + 8 * upper, start + 8 * upper + 8, size):
            order += [*range(run, run + size), *range(HALF.count + run, HALF.count + run + size)]
    return shuffle(builder, a, b, order)


def nibbles_of(builder: Any, row: Any) -> list[Any]:
    """Emit code that splits each byte of a vector into its lower and its upper four bits."""
    low = ir.Constant(BYTES, [15] * KEYS)
    up = builder.lshr(builder.bitcast(row, SHORTS), ir.Constant(SHORTS, [4] * (KEYS // 2)))
    return [builder.and_(row, low), builder.and_(builder.bitcast(up, BYTES), low)]


def looked_up(builder: Any, table: Any, offset: int, indices: Any) -> Any:
    """Emit code that looks up one byte for each of 64 keys in a table of 16 bytes.

    The table is at the address `table + offset`. `indices` is a vector of 64 bytes from 0 to 15.
    The result is a vector of 32 numbers of 16 bits, each with the bytes of two keys.
    """
    sixteen = loaded(builder, table, offset, ir.VectorType(ir.IntType(8), 16))
    wide = shuffle(builder, sixteen, sixteen, list(range(16)) * 4)
    if WIDE:
        return builder.bitcast(permuted(builder, "avx512.pshuf.b.512", wide, indices), SHORTS)
    lanes, found = list(range(KEYS)), []
    for half in (lanes[: KEYS // 2], lanes[KEYS // 2 :]):
        parts = [shuffle(builder, part, part, half) for part in (wide, indices)]
        found.append(permuted(builder, "avx2.pshuf.b", parts[0], parts[1]))
    return builder.bitcast(shuffle(builder, found[0], found[1], lanes), SHORTS)


def permuted(builder: Any, instruction: str, table: Any, indices: Any) -> Any:
    """Emit a call of `pshufb`, the x86 instruction that looks up bytes in a table of 16 bytes.

    `instruction` is LLVM's name of the instruction for a vector length. The vector `table` contains
    the table of 16 bytes several times, as often as it fits.
    """
    kind = ir.FunctionType(table.type, [table.type, table.type])
    name = f"llvm.x86.{instruction}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [table, indices])


def sums_of(builder: Any, nibbles: Any, words: Any, table: Any) -> list[Any]:
    """Emit code that looks up and adds the table entries of each of 64 keys.

    The result is two vectors of sums, for keys 0 to 31 and for keys 32 to 63.
    """
    none, eight = (ir.Constant(SHORTS, [n] * (KEYS // 2)) for n in (0, 8))
    both, odd = (cgutils.alloca_once(builder, SHORTS) for _ in range(2))
    builder.store(none, both)
    builder.store(none, odd)
    with cgutils.for_range(builder, words) as loop:
        own = builder.add(table, builder.mul(loop.index, INT64(16 * NIBBLES)))
        some = builder.add(nibbles, builder.mul(loop.index, INT64(KEYS * NIBBLES)))
        sums = builder.load(both), builder.load(odd)
        for n in range(NIBBLES):
            pairs = looked_up(builder, own, 16 * n, loaded(builder, some, KEYS * n, BYTES))
            upper = builder.lshr(pairs, eight)
            sums = builder.add(sums[0], pairs), builder.add(sums[1], upper)
        builder.store(sums[0], both)
        builder.store(sums[1], odd)
    last = builder.load(odd)
    return [builder.sub(builder.load(both), builder.shl(last, eight)), last]


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _put_nibbles(_: Any, words: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        words, out = arguments
        for b, row in enumerate(transposed(builder, words)):
            for i, own in enumerate(nibbles_of(builder, row)):
                at = builder.add(out, INT64(KEYS * (2 * b + i)))
                builder.store(own, builder.inttoptr(at, BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def votes_of(builder: Any, arguments: Any) -> list[Any]:
    """Emit code that computes the votes (coarse scores) of 64 keys for one query head.

    Returns two vectors of votes, for keys 0 to 31 and for keys 32 to 63. The arguments are those of
    `_raise_votes` without `out`. If the CPU lacks the necessary instructions (`SERVED` is False),
    this function emits nothing, because LLVM could not compile the code. Kernels then compute votes
    in another way.
    """
    if not SERVED:
        return []
    nibbles, words, table, bias, factors, offset = arguments
    low, more = (broadcast(builder, number, SUMS) for number in (bias, offset))
    votes = []
    for i, sums in enumerate(sums_of(builder, nibbles, words, table)):
        own = loaded(builder, factors, i * 4 * KEYS // 2, SUMS)
        dots = builder.sub(builder.zext(sums, SUMS), low)
        votes.append(builder.add(builder.mul(dots, own), more))
    return votes


def place_of(builder: Any, out: Any, part: int, kind: Any) -> Any:
    """Return a pointer to the part of `out` for keys 0 to 31 (`part` 0) or 32 to 63 (`part` 1)."""
    at = builder.add(out, INT64(part * 4 * KEYS // 2))
    return builder.inttoptr(at, kind.as_pointer())


NUMBERS = types.int64, types.int64, types.int64, types.int32, types.int64, types.int32


@intrinsic  # type: ignore[untyped-decorator]  # as above
def _raise_votes(
    _: Any, nibbles: Any, words: Any, table: Any, bias: Any, factors: Any, offset: Any, out: Any
) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        for i, votes in enumerate(votes_of(builder, arguments[:6])):
            place = place_of(builder, arguments[6], i, SUMS)
            stored = builder.load(place, align=4)
            above = builder.icmp_signed(">", votes, stored)
            builder.store(builder.select(above, votes, stored), place, align=4)
        return context.get_dummy_value()

    return types.void(*NUMBERS, types.int64), code


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit LLVM code for `a · b + c` as a fused multiply-add, which rounds only the final result.

    `a`, `b` and `c` are vectors of the LLVM type `SIZES`.
    """
    kind = ir.FunctionType(SIZES, [SIZES] * 3)
    name = f"llvm.fma.v{SIZES.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


@intrinsic  # type: ignore[untyped-decorator]  # as above
def _raise_sizes(
    _: Any,
    nibbles: Any,
    words: Any,
    table: Any,
    bias: Any,
    factors: Any,
    offset: Any,
    gain: Any,
    total: Any,
    out: Any,
) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        gain, total = (broadcast(builder, number, SIZES) for number in arguments[6:8])
        for i, votes in enumerate(votes_of(builder, arguments[:6])):
            sizes = fused(builder, builder.sitofp(votes, SIZES), gain, total)
            place = place_of(builder, arguments[8], i, SIZES)
            stored = builder.load(place, align=4)
            above = builder.fcmp_ordered(">", sizes, stored)
            builder.store(builder.select(above, sizes, stored), place, align=4)
        return context.get_dummy_value()

    return types.void(*NUMBERS, types.float32, types.float32, types.int64), code


@inlined
def raise_votes(
    words: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    nibbles: np.ndarray,
    out: np.ndarray,
) -> None:
    """Compute the largest vote (coarse score) of each key over all query heads.

    `out[i]` becomes the largest of its old value and the votes of key `i` for the query heads.

    Args:
        words: Signs of the keys, 64 coordinates per word, uint64 `[W, n]`; `n` is a multiple of 64.
        tables: Result of `put_tables`, uint8 `[g, W, 16, 16]`.
        totals: Constants that `put_tables` returned, int32 `[g]`.
        factors: Integer by which the vote of each key is multiplied, in proportion to the key's
            weight, int32 `[n]`.
        offsets: Number that the block's center adds to votes, for each query head, int32 `[g]`.
        nibbles: Buffer, uint8 `[W, 16, 64]`.
        out: Int32 `[n]`. The caller fills it with a number below all votes, or with earlier maxima.
    """
    (g, W), n = tables.shape[:2], len(out)
    table, signs, to = tables.ctypes.data, words.ctypes.data, out.ctypes.data
    own, room, size = factors.ctypes.data, nibbles.ctypes.data, NIBBLES * KEYS
    for start in range(0, n, KEYS):
        for w in range(W):
            _put_nibbles(signs + (w * words.shape[1] + start) * 8, room + w * size)
        for h in range(g):
            entries = table + h * W * NIBBLES * 16
            some, place = own + start * 4, to + start * 4
            _raise_votes(room, W, entries, totals[h], some, offsets[h], place)


@inlined
def raise_sizes(
    words: np.ndarray,
    tables: np.ndarray,
    totals: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    scales: np.ndarray,
    nibbles: np.ndarray,
    out: np.ndarray,
) -> None:
    """Estimate the log attention weights of keys, and compute the maximum over the query heads.

    `out[i]`, float32, becomes the maximum of `out[i]` and the estimates for key `i` and all query
    heads. An estimate, called size in code, is `vote * gain + total`, where `vote` is the coarse
    score of the key. `scales` contains `gain` and `total` of each query head (`ops.priority`),
    float32 `[g, 2]`. All other arguments are those of `raise_votes`.
    """
    (g, W), n = tables.shape[:2], len(out)
    table, signs, to = tables.ctypes.data, words.ctypes.data, out.ctypes.data
    own, room, size = factors.ctypes.data, nibbles.ctypes.data, NIBBLES * KEYS
    for start in range(0, n, KEYS):
        for w in range(W):
            _put_nibbles(signs + (w * words.shape[1] + start) * 8, room + w * size)
        for h in range(g):
            entries, gain, total = table + h * W * NIBBLES * 16, scales[h, 0], scales[h, 1]
            some, place = own + start * 4, to + start * 4
            _raise_sizes(room, W, entries, totals[h], some, offsets[h], gain, total, place)


@kernel
def put_tables(integers: np.ndarray, out: np.ndarray) -> int:
    """Write the look-up tables of a query that is rounded to integers.

    An entry is the inner product of four coordinates with one of the 16 combinations of signs. A
    constant is added to each entry, so that no entry is negative. The sum of a key's entries is
    therefore too large by a constant.

    Args:
        integers: Coordinates of the query, from -31 to 31, int64 `[D]`.
        out: Result, a table of 16 entries for each four coordinates, uint8 `[W, 16, 16]`.

    Returns:
        The constant to subtract from the sum of a key's entries.
    """
    W = len(out)
    for n in range(W * NIBBLES):
        own = out[n // NIBBLES, n % NIBBLES]
        some = integers[n * 4 : n * 4 + 4]
        own[:] = BIAS - some.sum()
        for j in range(len(some)):
            for c in range(1 << j):
                own[(1 << j) + c] = own[c] + 2 * some[j]
    return W * NIBBLES * BIAS
