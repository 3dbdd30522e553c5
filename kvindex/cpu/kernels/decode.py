"""Decode a key's quantized direction from sign and magnitude bits, 64 coordinates at a time.

The 64 bits of a word are used as a mask of vector instructions. The levels, which are the possible
absolute values of a coordinate, are looked up in vector registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import FEATURES, inlined
from kvindex.cpu.kernels.vectors import FLOAT, FLOATS, LANES, broadcast, chunk, shuffle

WORD = 64
"""Number of coordinates whose bits are in one word."""

PERMUTES = "+avx2" in FEATURES and "+avx512f" not in FEATURES
"""True on CPUs with AVX2 but without AVX-512.

There, a register contains 8 levels, which the instruction `vpermps` looks up. With AVX-512, it
contains 16 levels.
"""

ENTRIES = 8 if PERMUTES else LANES
"""Levels in a register."""

BIT, BYTE, INT32, INT64 = (ir.IntType(n) for n in (1, 8, 32, 64))
BITS, BYTES, LANES_OF = (
    ir.VectorType(BIT, WORD),
    ir.VectorType(BYTE, WORD),
    ir.VectorType(INT32, LANES),
)
HALF_FLOATS, HALF_INTS = ir.VectorType(FLOAT, LANES // 2), ir.VectorType(INT32, LANES // 2)


def repeat(builder: Any, start: int, stop: Any, step: Callable[[Any], None]) -> None:
    """Emit the code of `for i in range(start, stop): step(i)`, where `step(i)` emits code.

    If `stop` is a Python int, the loop is unrolled. If it is an LLVM value, which is known only
    when the kernel runs, the code contains a loop.
    """
    if isinstance(stop, int):
        for i in range(start, stop):
            step(INT64(i))
        return
    with cgutils.for_range(builder, stop, start=INT64(start)) as loop:
        step(loop.index)


def bits_at(builder: Any, address: Any) -> Any:
    """Emit code that loads a 64-bit word from an address as a vector of 64 bits."""
    word = builder.load(builder.inttoptr(address, INT64.as_pointer()), align=1)
    return builder.bitcast(word, BITS)


def level_indices(builder: Any, planes: Any, step: Any, bits: Any) -> Any:
    """Emit code that combines bit planes into the level indices of 64 coordinates.

    Plane `p` contains bit `p` of each coordinate's index, as one 64-bit word. There are `bits`
    planes, whose words are `step` bytes apart in memory.
    """
    stored = cgutils.alloca_once(builder, BYTES)
    builder.store(ir.Constant(BYTES, [0] * WORD), stored)

    def add(plane: Any) -> None:
        ones = bits_at(builder, builder.add(planes, builder.mul(plane, step)))
        up = broadcast(builder, builder.trunc(plane, BYTE), BYTES)
        own = builder.shl(builder.zext(ones, BYTES), up)
        builder.store(builder.or_(builder.load(stored), own), stored)

    repeat(builder, 0, bits, add)
    return builder.load(stored)


def looked_up(builder: Any, table: Any, indices: Any) -> Any:
    """Emit code that looks up 16 numbers in a table that fits in one vector register.

    `table` is the address of the table, and `indices` is a vector of 16 integers. Only their lowest
    bits are used.
    """
    if PERMUTES:
        return _permuted(builder, table, indices)
    entries = builder.load(builder.inttoptr(table, FLOATS.as_pointer()), align=4)
    low = builder.and_(indices, ir.Constant(LANES_OF, [LANES - 1] * LANES))
    found = ir.Constant(FLOATS, ir.Undefined)
    for i in range(LANES):  # LLVM uses one permute instruction if the machine has it
        entry = builder.extract_element(entries, builder.extract_element(low, INT32(i)))
        found = builder.insert_element(found, entry, INT32(i))
    return found


def _permuted(builder: Any, table: Any, indices: Any) -> Any:
    entries = builder.load(builder.inttoptr(table, HALF_FLOATS.as_pointer()), align=4)
    kind = ir.FunctionType(HALF_FLOATS, [HALF_FLOATS, HALF_INTS])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
    lanes, found = list(range(LANES)), []
    for half in (lanes[:ENTRIES], lanes[ENTRIES:]):
        own = shuffle(builder, indices, indices, half)
        found.append(builder.call(permute, [entries, own]))
    return shuffle(builder, found[0], found[1], lanes)


def levels_of(builder: Any, levels: Any, tables: Any, indices: Any) -> Any:
    """Emit code that looks up 16 levels (absolute values of coordinates) by their indices.

    There may be more levels than fit in one register. So they are stored as consecutive tables of
    `ENTRIES` levels each, which begin at the address `levels`. `tables` is the number of tables.
    """
    stored = cgutils.alloca_once(builder, FLOATS)
    builder.store(looked_up(builder, levels, indices), stored)
    low = builder.and_(indices, ir.Constant(LANES_OF, [MINUS - 1] * LANES))
    upper = builder.lshr(low, ir.Constant(LANES_OF, [ENTRIES.bit_length() - 1] * LANES))

    def select(table: Any) -> None:
        number = broadcast(builder, builder.trunc(table, INT32), LANES_OF)
        own = builder.icmp_unsigned("==", upper, number)
        at = builder.add(levels, builder.mul(table, INT64(4 * ENTRIES)))
        found = looked_up(builder, at, indices)
        builder.store(builder.select(own, found, builder.load(stored)), stored)

    repeat(builder, 1, tables, select)
    return builder.load(stored)


MINUS = 128
"""Added to the level index of a negative coordinate, where `PERMUTES` is True."""


def marked(builder: Any, indices: Any, positive: Any) -> Any:
    """Emit code that marks the level indices of negative coordinates with the bit `MINUS`.

    `indices` has one byte for each of 64 coordinates. A coordinate is negative if its bit in
    `positive` is 0.
    """
    minus = builder.zext(builder.not_(positive), BYTES)
    return builder.or_(indices, builder.shl(minus, ir.Constant(BYTES, [7] * WORD)))


def signed(builder: Any, levels: Any, indices: Any) -> Any:
    """Emit code that gives each decoded coordinate of a key its sign.

    `levels` contains the absolute values of the coordinates. The code negates a level if the bit
    `MINUS` is set in the coordinate's level index. The function `marked` has set these bits.
    """
    up = builder.shl(indices, ir.Constant(LANES_OF, [24] * LANES))
    signs = builder.and_(up, ir.Constant(LANES_OF, [1 << 31] * LANES))
    return builder.bitcast(builder.xor(builder.bitcast(levels, LANES_OF), signs), FLOATS)


def put_levels(
    builder: Any, signs: Any, planes: Any, step: Any, bits: Any, levels: Any, tables: Any, out: Any
) -> None:
    """Emit the code of `put_word`, which decodes 64 coordinates of a key.

    `bits` and `tables` are Python ints, or LLVM values that are known only when the kernel runs.
    With ints, loops are unrolled.
    """
    indices = level_indices(builder, planes, step, bits)
    positive = bits_at(builder, signs)
    if PERMUTES:  # without the masks of AVX-512, a selection by bits is slow
        indices = marked(builder, indices, positive)
    for c in range(WORD // LANES):
        lanes = list(range(c * LANES, (c + 1) * LANES))
        own = builder.zext(shuffle(builder, indices, indices, lanes), LANES_OF)
        found = levels_of(builder, levels, tables, own)
        if PERMUTES:
            found = signed(builder, found, own)
        else:
            up = shuffle(builder, positive, positive, lanes)
            found = builder.select(up, found, builder.fneg(found))
        builder.store(found, chunk(builder, out, INT64(c)), align=4)


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _put_word(
    _: Any, signs: Any, planes: Any, step: Any, bits: Any, levels: Any, tables: Any, out: Any
) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        put_levels(builder, *arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def _put_word_of_3(_: Any, signs: Any, planes: Any, step: Any, levels: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        signs, planes, step, levels, out = arguments
        put_levels(builder, signs, planes, step, 3, levels, 1, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


@intrinsic  # type: ignore[untyped-decorator]  # as above
def _put_word_of_5(_: Any, signs: Any, planes: Any, step: Any, levels: Any, out: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        signs, planes, step, levels, out = arguments
        put_levels(builder, signs, planes, step, 5, levels, 2**5 // ENTRIES, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


@inlined
def put_word(signs: int, planes: int, step: int, bits: int, levels: int, out: int) -> None:
    """Decode 64 coordinates of a key from their sign bits and magnitude bits.

    The magnitude bits select a level, which is the absolute value of the coordinate.

    Args:
        signs: Address of 64 sign bits.
        planes: Address of the magnitude bits, one 64-bit word for each bit plane.
        step: Distance in bytes from one bit plane to the next.
        bits: Number of bit planes.
        levels: Address of the levels, float32 `[2^bits]`, padded to at least 16.
        out: Address of the result, float32 `[64]`.
    """
    if bits == 3:  # unrolled
        _put_word_of_3(signs, planes, step, levels, out)
    elif bits == 5:
        _put_word_of_5(signs, planes, step, levels, out)
    else:
        _put_word(signs, planes, step, bits, levels, max(1, (1 << bits) // ENTRIES), out)
