"""Decode a key's quantized direction from sign and magnitude bits, 64 coordinates at a time.

The 64 bits of a word are used as a mask of vector instructions. The levels, which are the possible
absolute values of a coordinate, are looked up in vector registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvindex.cpu.kernels.compile import inlined
from kvindex.cpu.kernels.vectors import FLOATS, LANES, broadcast, chunk, shuffle

WORD = 64
"""Number of coordinates whose bits are in one word."""

BIT, BYTE, INT32, INT64 = (ir.IntType(n) for n in (1, 8, 32, 64))
BITS, BYTES, LANES_OF = (
    ir.VectorType(BIT, WORD),
    ir.VectorType(BYTE, WORD),
    ir.VectorType(INT32, LANES),
)


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
    with cgutils.for_range(builder, bits) as loop:
        ones = bits_at(builder, builder.add(planes, builder.mul(loop.index, step)))
        up = broadcast(builder, builder.trunc(loop.index, BYTE), BYTES)
        own = builder.shl(builder.zext(ones, BYTES), up)
        builder.store(builder.or_(builder.load(stored), own), stored)
    return builder.load(stored)


def looked_up(builder: Any, table: Any, indices: Any) -> Any:
    """Emit code that looks up entries of a vector: one permute instruction if the CPU has it."""
    low = builder.and_(indices, ir.Constant(LANES_OF, [LANES - 1] * LANES))
    found = ir.Constant(FLOATS, ir.Undefined)
    for i in range(LANES):
        entry = builder.extract_element(table, builder.extract_element(low, INT32(i)))
        found = builder.insert_element(found, entry, INT32(i))
    return found


def levels_of(builder: Any, levels: Any, tables: Any, indices: Any) -> Any:
    """Emit code that looks up levels by their indices, where the levels fill several vectors."""
    stored = cgutils.alloca_once(builder, FLOATS)
    upper = builder.lshr(indices, ir.Constant(LANES_OF, [LANES.bit_length() - 1] * LANES))
    with cgutils.for_range(builder, tables) as loop:
        found = looked_up(
            builder, builder.load(chunk(builder, levels, loop.index), align=4), indices
        )
        number = broadcast(builder, builder.trunc(loop.index, INT32), LANES_OF)
        own = builder.icmp_unsigned("==", upper, number)
        builder.store(builder.select(own, found, builder.load(stored)), stored)
    return builder.load(stored)


@intrinsic  # type: ignore[untyped-decorator]  # Numba is not typed
def _put_word(
    _: Any, signs: Any, planes: Any, step: Any, bits: Any, levels: Any, tables: Any, out: Any
) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        signs, planes, step, bits, levels, tables, out = arguments
        positive, indices = bits_at(builder, signs), level_indices(builder, planes, step, bits)
        for c in range(WORD // LANES):
            lanes = list(range(c * LANES, (c + 1) * LANES))
            own = builder.zext(shuffle(builder, indices, indices, lanes), LANES_OF)
            found = levels_of(builder, levels, tables, own)
            up = shuffle(builder, positive, positive, lanes)
            value = builder.select(up, found, builder.fneg(found))
            builder.store(value, chunk(builder, out, INT64(c)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), code


@inlined
def put_word(signs: int, planes: int, step: int, bits: int, levels: int, out: int) -> None:
    """Decode 64 coordinates of a key: the level that the magnitude bits select, with the sign.

    Args:
        signs: Address of 64 sign bits.
        planes: Address of the magnitude bits, one 64-bit word for each bit plane.
        step: Distance in bytes from one bit plane to the next.
        bits: Number of bit planes.
        levels: Address of the levels, float32 `[2^bits]`, padded to at least 16.
        out: Address of the result, float32 `[64]`.
    """
    if bits == 3:  # a constant number of planes, so that LLVM unrolls the loop
        _put_word(signs, planes, step, 3, levels, 1, out)
    elif bits == 5:
        _put_word(signs, planes, step, 5, levels, 2, out)
    else:
        _put_word(signs, planes, step, bits, levels, max(1, (1 << bits) // LANES), out)
