"""Row codecs: how a token's key and value are stored as bytes (plain, int8, fp8, int4, int2).

A row has a multiple of 16 bytes, so that each row of an aligned block can be read 16 bytes at a
time. Padding is zero, and a row of zero bytes stands for a key and a value of zeros. If a geometry
says that the value is part of the key (`value_in_key`), a row contains only the key. Otherwise
quantized keys are relative to a center (`storage/centers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.storage.quantize import code_bytes, dequantize, groups, quantize

WORD = torch.int64
"""Element type for copies: a row has a multiple of its size, and large elements copy fastest."""

ALIGNMENT_BYTES = 16
"""Bytes of the widest load of a GPU thread."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale. A subnormal one has fewer bits, and kernels may flush it to zero."""

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Codec with one scale per vector -> dtype of a code, and the largest value of a code."""

BITS = {"int4": 4, "int2": 2}
"""Codec with groups -> number of bits of a code."""


class CodecNumber(IntEnum):
    """The number of each row codec, for compiled kernels.

    A codec keeps its number when others are added. CUDA kernels get each number as a macro
    (`CODEC_INT8` is 1), and compare the macro `CODEC` with these macros.
    """

    PLAIN = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    INT2 = 4


NAMES = tuple(number.name.lower() for number in CodecNumber)
"""The codecs' names, as options spell them."""

LARGEST_CODED = 2.0**56
"""Larger than any number that the codes of an allowed key represent. The difference of a key from
a center is at most 2^49, and a rotation can increase a coordinate by a factor of `√D`."""

PIECE = 2**17
"""Number of rows to encode at a time, which limits the memory of float32 copies."""


class RowCodec(Protocol):
    """Encodes keys and values as rows of bytes, and decodes them."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        ...

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode rows.

        Args:
            keys: Finite, `[..., D]`.
            values: Finite, `[..., Dv]`.
            center: Float32, with a shape that expands to that of `keys`; None for zeros.

        Returns:
            Uint8 `[..., row_bytes]`.
        """
        ...

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode rows.

        Args:
            rows: Uint8 `[B, G, N, row_bytes]`.
            center: The center of `encode`, float32 `[B, G, 1, D]`; None for zeros.

        Returns:
            Keys `[B, G, N, D]` and values `[B, G, N, Dv]` in the geometry's dtype.
        """
        ...

    def wrong(self, rows: Tensor) -> Tensor:
        """Return which rows have a key that `encode` never makes, for example NaN.

        Args:
            rows: Uint8 `[..., row_bytes]`.

        Returns:
            Bool `[...]`.
        """
        ...


def codec(name: str, geometry: Geometry) -> RowCodec:
    """Return a row codec.

    Args:
        name: One of `NAMES`.
        geometry: The index's geometry.

    Raises:
        ValueError: There is no such codec.
    """
    check.one_of("row_codec", name, NAMES)
    if name == "plain":
        return Plain(geometry)
    if not geometry.value_in_key:
        return Grouped(geometry, BITS[name]) if name in BITS else Scaled(geometry, name)
    D, Dv = geometry.head_dim, geometry.value_dim
    parts = replace(geometry, head_dim=Dv, value_dim=D - Dv, value_in_key=False)
    return InKey(
        geometry, Grouped(parts, BITS[name], True) if name in BITS else Scaled(parts, name)
    )


@dataclass(frozen=True)
class Plain:
    """Stores keys and values unchanged: `D` elements, then `Dv`, unless the value is in the key.

    A center is ignored.
    """

    geometry: Geometry

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return _aligned(self._used)

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as uint8 `[..., row_bytes]`."""
        parts = [keys.detach(), *([] if self.geometry.value_in_key else [values.detach()])]
        rows = torch.cat(_in_words(*parts), dim=-1).view(torch.uint8)
        padding = self.row_bytes - self._used
        return pad(rows, (0, padding)) if padding else rows  # `pad` copies even if it adds 0

    def put(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Like `encode`, but write to `rows`, uint8 `[..., row_bytes]`, with one copy."""
        held = self.decode(rows)
        held.keys.copy_(keys)
        if not self.geometry.value_in_key:
            held.values.copy_(values)
        rows[..., self._used :] = 0

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode to keys `[B, G, N, D]` and values `[B, G, N, Dv]`, as views if possible."""
        g, both = self.geometry, rows[..., : self._used].view(self.geometry.dtype)
        return Rows(both[..., : g.head_dim], both[..., g.value_start :][..., : g.value_dim])

    def wrong(self, rows: Tensor) -> Tensor:
        """Return which rows have a key that `encode` never makes, bool `[...]`."""
        keys = self.decode(rows).keys
        if check.in_range(keys):  # one operation, which is nearly always enough
            return torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device)
        return check.out_of_range(keys).any(-1)

    @property
    def _used(self) -> int:
        g = self.geometry
        return max(g.head_dim, g.value_start + g.value_dim) * g.dtype.itemsize


@dataclass(frozen=True)
class Scaled:
    """Stores one byte per number, one float32 scale for a row's key, and one for its value.

    A row consists of `D` key codes, `Dv` value codes, zeros up to a multiple of 4, the key's scale
    and the value's scale. A number is `code · scale`, computed in float32, where `scale = absmax /
    largest code`. If the scale would not be a normal float32 (for zeros, for example), scale and
    codes are 0.

    Args:
        geometry: The index's geometry.
        codes: "int8" (rounded half to even, -127 to 127) or "fp8" (e4m3, up to 448).
    """

    geometry: Geometry
    codes: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return _aligned(self.scales_at + 8)

    @property
    def scales_at(self) -> int:
        """Position of the first byte of the two scales."""
        return _aligned(self.geometry.head_dim + self.geometry.value_dim, 4)

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as uint8 `[..., row_bytes]`."""
        return _in_pieces(self._row, keys, values, self.row_bytes, center)

    def _row(self, keys: Tensor, values: Tensor) -> Tensor:
        (key_codes, key_scale), (value_codes, value_scale) = (
            scaled(part, self.codes) for part in (keys, values)
        )
        codes = torch.cat([key_codes, value_codes], dim=-1)
        scales = torch.cat([key_scale, value_scale], dim=-1).view(torch.uint8)
        return torch.cat([pad(codes, (0, self.scales_at - codes.shape[-1])), scales], dim=-1)

    def wrong(self, rows: Tensor, *, values: bool = False) -> Tensor:
        """Return which rows have a key that `encode` never makes; values: or such a value."""
        D, largest = self.geometry.head_dim, CODES[self.codes][1]
        scales = rows[..., self.scales_at : self.scales_at + 8].contiguous().view(torch.float32)
        scales = scales if values else scales[..., :1]
        wrong = ~((scales >= 0) & (scales * largest <= LARGEST_CODED)).all(-1)
        if self.codes == "int8":
            return wrong
        codes = rows[..., : D + (self.geometry.value_dim if values else 0)]
        return wrong | (codes & 127 == 127).any(-1)  # these codes are NaN in e4m3

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode to keys `[B, G, N, D]` and values `[B, G, N, Dv]`."""
        D, Dv = self.geometry.head_dim, self.geometry.value_dim
        dtype, _ = CODES[self.codes]
        codes = rows[..., : D + Dv].view(dtype).float()
        scales = rows[..., self.scales_at : self.scales_at + 8].view(torch.float32)
        keys, values = codes[..., :D] * scales[..., :1], codes[..., D:] * scales[..., 1:]
        return Rows(_beside(center, keys, self.geometry), values.to(self.geometry.dtype))


@dataclass(frozen=True)
class Grouped:
    """Stores 2 or 4 bits per number, and a lowest value and a step per group of up to 32 numbers.

    A row consists of the codes of the key and of the value, a zero byte if their number of bytes is
    odd, the scales of the key, and those of the value (`storage/quantize.py`). Keys are rotated
    first (`rotated`), so that an outlier in one channel does not enlarge the step of the other
    channels in its group. Values have no such outliers (KIVI, arXiv 2402.02750). KIVI does not
    rotate: its groups have the numbers of one channel for several tokens, so that rows depend on
    each other.

    Args:
        geometry: The index's geometry.
        bits: 4 or 2.
        rotates_values: Whether to rotate values, too. This is for `InKey`, where the "value" is a
            part of a key.
    """

    geometry: Geometry
    bits: int
    rotates_values: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return _aligned(self._ends[-1])

    @property
    def _ends(self) -> tuple[int, int, int, int, int]:
        """Positions: end of key codes and value codes, start of scales, end of both scales."""
        D, Dv = self.geometry.head_dim, self.geometry.value_dim
        keys, both = code_bytes(D, self.bits), code_bytes(D, self.bits) + code_bytes(Dv, self.bits)
        scales = _aligned(both, 2)
        key_scales = scales + 4 * groups(D)[0]
        return keys, both, scales, key_scales, key_scales + 4 * groups(Dv)[0]

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as uint8 `[..., row_bytes]`."""
        return _in_pieces(self._row, keys, values, self.row_bytes, center)

    def _row(self, keys: Tensor, values: Tensor) -> Tensor:
        parts = rotated(keys.float()), rotated(values.float()) if self.rotates_values else values
        codes, scales = zip(*(quantize(part, self.bits) for part in parts), strict=True)
        _, both, first, *_ = self._ends
        of_scales = [part.flatten(-2).view(torch.uint8) for part in scales]
        return torch.cat([pad(torch.cat(codes, -1), (0, first - both)), *of_scales], dim=-1)

    def wrong(self, rows: Tensor, *, values: bool = False) -> Tensor:
        """Return which rows have a key that `encode` never makes; values: or such a value."""
        _, _, first, middle, last = self._ends
        stop = last if values else middle
        scales = rows[..., first:stop].contiguous().view(torch.bfloat16)
        return _beyond(scales.reshape(*scales.shape[:-1], -1, 2), 2**self.bits - 1)

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode to keys `[B, G, N, D]` and values `[B, G, N, Dv]`."""
        keys, both, first, middle, last = self._ends
        key = self._part(rows[..., :keys], rows[..., first:middle], self.geometry.head_dim)
        value = self._part(rows[..., keys:both], rows[..., middle:last], self.geometry.value_dim)
        value = rotated(value) if self.rotates_values else value
        g = self.geometry
        return Rows(_beside(center, rotated(key), g), _of_dtype(value, g))

    def _part(self, codes: Tensor, scales: Tensor, count: int) -> Tensor:
        pairs = scales.contiguous().view(torch.bfloat16)
        pairs = pairs.reshape(*pairs.shape[:-1], groups(count)[0], 2)
        return dequantize(codes, pairs, count, self.bits)


def scaled(vectors: Tensor, codes: str) -> tuple[Tensor, Tensor]:
    """Quantize finite vectors `[..., D]` with one scale each, as `Scaled` explains.

    Args:
        vectors: Finite, `[..., D]`.
        codes: "int8" or "fp8".

    Returns:
        Codes uint8 `[..., D]`, and scales float32 `[..., 1]`.
    """
    dtype, largest = CODES[codes]
    vectors = vectors.float()
    scale = vectors.abs().amax(dim=-1, keepdim=True) / largest
    # for the largest float32, the scale may be rounded up so that scale * largest is infinite
    scale = torch.where((scale * largest).isinf(), scale.nextafter(scale * 0), scale)
    scale = torch.where(scale < SMALLEST_SCALE, 0, scale)
    numbers = torch.where(scale > 0, vectors / scale, 0)
    numbers = numbers.round() if dtype == torch.int8 else numbers
    return numbers.to(dtype).view(torch.uint8), scale


@dataclass(frozen=True)
class InKey:
    """Stores keys that begin with their value, once, by another codec.

    For that codec the "key" is the first `Dv` coordinates and the "value" the other `D - Dv`,
    because a latent and a rotated key have different magnitudes, and so need scales of their own. A
    center is ignored, because it would change the values.

    Args:
        geometry: The index's geometry.
        parts: The codec of the two parts.
    """

    geometry: Geometry
    parts: Scaled | Grouped

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 16."""
        return self.parts.row_bytes

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` as uint8 `[..., row_bytes]`. The values are not read."""
        return self.parts.encode(*keys.tensor_split([self.geometry.value_dim], dim=-1))

    def wrong(self, rows: Tensor) -> Tensor:
        """Return which rows have a key that `encode` never makes, bool `[...]`."""
        return self.parts.wrong(rows, values=True)

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode to keys `[B, G, N, D]` and values `[B, G, N, Dv]`, which are views of the keys."""
        parts = self.parts.decode(rows)
        keys = torch.cat([parts.keys, parts.values], dim=-1)
        return Rows(keys, keys[..., : self.geometry.value_dim])


def _beyond(scales: Tensor, levels: int) -> Tensor:
    """Return which vectors have a number above `LARGEST_CODED`, bool `[...]`.

    scales: lowest values and steps, bfloat16 `[..., groups, 2]`; levels: the highest code.
    """
    low, step = scales.float().unbind(-1)
    return ~((step >= 0) & (low.abs() + levels * step <= LARGEST_CODED)).all(-1)


def check_rows(name: str, geometry: Geometry, rows: Tensor, valid: Tensor | None) -> None:
    """Check the keys of encoded rows.

    Args:
        name: Name of the codec.
        geometry: The index's geometry.
        rows: Uint8 `[B, G, N, row_bytes]`.
        valid: Bool `[B, N]`, the tokens to check; None for all.

    Raises:
        ValueError: A key is NaN, infinite or too large.
    """
    of_rows = codec(name, geometry)
    for start in range(0, rows.shape[2], PIECE):
        piece = slice(start, start + PIECE)
        wrong = of_rows.wrong(rows[:, :, piece].contiguous())
        if valid is not None:
            wrong = wrong & valid[:, None, piece].to(wrong.device)
        if bool(wrong.any()):
            b, g, token = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"state['rows']: got a key that is not finite, or too large (sequence {b}, KV head "
                f"{g}, token {start + token}), allowed is {check.ALLOWED_NUMBER}"
            )


def rotated(vectors: Tensor) -> Tensor:
    """Multiply vectors by a block-diagonal Hadamard matrix, which is its own inverse.

    The size of a block is the largest power of two that divides `D` (Sylvester's construction,
    normalized). The product is computed by butterflies, so that the bits of a row do not depend on
    other rows.

    Args:
        vectors: Float32 `[..., D]`.

    Returns:
        Float32 `[..., D]`.
    """
    D = vectors.shape[-1]
    block, size = D & -D, 1
    while size < block:
        pairs = vectors.reshape(*vectors.shape[:-1], D // (2 * size), 2, size)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        vectors = torch.stack([first + second, first - second], dim=-2).reshape(vectors.shape)
        size *= 2
    return vectors * float(block**-0.5)


def _beside(center: Tensor | None, keys: Tensor, geometry: Geometry) -> Tensor:
    """Add the center to keys float32 `[B, G, N, D]`, and convert them to the geometry's dtype."""
    return _of_dtype(keys if center is None else center + keys, geometry)


def _of_dtype(part: Tensor, geometry: Geometry) -> Tensor:
    largest = torch.finfo(geometry.dtype).max  # rounding may exceed it by half a step
    return part.clamp(-largest, largest).to(geometry.dtype)


def _in_pieces(
    row: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    row_bytes: int,
    center: Tensor | None,
) -> Tensor:
    """Encode keys (relative to a center) and values with `row`, `PIECE` rows at a time."""
    center = None if center is None else center.expand(keys.shape)
    outer = keys.shape[:-1]
    rows = torch.zeros((*outer, row_bytes), dtype=torch.uint8, device=keys.device)
    axis = outer.index(max(outer))
    step = max(1, PIECE * outer[axis] // max(1, math.prod(outer)))
    for start in range(0, outer[axis], step):
        cut = (*[slice(None)] * axis, slice(start, start + step))
        some = keys[cut].detach()
        some = some if center is None else some.float() - center[cut]
        made = row(some, values[cut].detach())
        rows[cut][..., : made.shape[-1]] = made
    return rows


def _in_words(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return the parts viewed as words, or unchanged if one is not aligned to words."""
    for part in parts:
        elements = [part.shape[-1], part.storage_offset(), *part.stride()[:-1]]
        offsets = [part.data_ptr(), *(count * part.element_size() for count in elements)]
        if part.stride(-1) != 1 or any(offset % WORD.itemsize for offset in offsets):
            return parts
    return tuple(part.view(WORD) for part in parts)


def _aligned(count: int, multiple: int = ALIGNMENT_BYTES) -> int:
    return -(-count // multiple) * multiple
