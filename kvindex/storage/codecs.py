"""Row codecs ("plain", "int8", "fp8", "int4", "int2"): the formats in which keys and values are
stored.

A row is the encoded key and value of one token for one KV head. Its size is a multiple of 16 bytes,
so that kernels can read it 16 bytes at a time. Padding bytes are zero, and a row of zero bytes
decodes to a key and a value of zeros. If the value is part of the key (`Geometry.value_in_key`), a
row contains only the key. Otherwise quantized keys are relative to a center (`storage/centers.py`).
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
"""Dtype in which rows are copied, because copies of large elements are fastest."""

ALIGNMENT_BYTES = 16
"""Bytes of the widest load of a GPU thread."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale. A subnormal number has fewer bits, and kernels may flush it to zero."""

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Codec with one scale per vector -> dtype of a code, and the largest value of a code."""

BITS = {"int4": 4, "int2": 2}
"""Codec with groups -> number of bits of a code."""


class CodecNumber(IntEnum):
    """The number of each row codec in compiled kernels.

    CUDA kernels get each number as a macro (`CODEC_INT8` is 1), and the number of the store's codec
    as the macro `CODEC`. A codec keeps its number when other codecs are added.
    """

    PLAIN = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    INT2 = 4


NAMES = tuple(number.name.lower() for number in CodecNumber)
"""Names of the codecs, as in the option `row_codec`."""

LARGEST_CODED = 2.0**56
"""Limit for numbers that codes represent, larger than any that occurs. The difference between a key
and a center is at most 2^49, and a rotation can increase a coordinate by a factor of `√D`."""

PIECE = 2**17
"""Number of rows that are encoded at a time, to limit the memory of float32 copies."""


class RowCodec(Protocol):
    """Encodes keys and values as rows of bytes, and decodes them."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row (key and value of one token), a multiple of 16."""
        ...

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys and values as rows.

        Args:
            keys: Finite, `[..., D]`.
            values: Finite, `[..., Dv]`.
            center: Vector to subtract from the keys before encoding, float32, with a shape that
                broadcasts to that of `keys`; None for zeros.

        Returns:
            Uint8 `[..., row_bytes]`.
        """
        ...

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode rows to keys and values.

        Args:
            rows: Uint8 `[B, G, N, row_bytes]`.
            center: The vector that `encode` subtracted from the keys, float32 `[B, G, 1, D]`; None
                for zeros.

        Returns:
            Keys `[B, G, N, D]` and values `[B, G, N, Dv]` in the geometry's dtype.
        """
        ...

    def wrong(self, rows: Tensor) -> Tensor:
        """Return True for rows with a damaged key (for example NaN), which `encode` never produces.

        Args:
            rows: Uint8 `[..., row_bytes]`.

        Returns:
            Bool `[...]`.
        """
        ...


def codec(name: str, geometry: Geometry) -> RowCodec:
    """Return the row codec with the given name.

    Args:
        name: One of `NAMES`.
        geometry: Geometry of the index.

    Raises:
        ValueError: There is no codec with this name.
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
    """Stores keys and values unchanged: `D` numbers of the key, then `Dv` numbers of the value.

    If the value is part of the key, a row contains only the key. The argument `center` of `encode`
    and `decode` is ignored.
    """

    geometry: Geometry

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row (key and value of one token), a multiple of 16."""
        return _aligned(self._used)

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as rows, uint8 `[..., row_bytes]`."""
        parts = [keys.detach(), *([] if self.geometry.value_in_key else [values.detach()])]
        rows = torch.cat(_in_words(*parts), dim=-1).view(torch.uint8)
        padding = self.row_bytes - self._used
        return pad(rows, (0, padding)) if padding else rows  # `pad` copies even if it adds 0

    def put(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Encode keys and values directly into `rows`, uint8 `[..., row_bytes]`, with a single
        copy.
        """
        held = self.decode(rows)
        held.keys.copy_(keys)
        if not self.geometry.value_in_key:
            held.values.copy_(values)
        rows[..., self._used :] = 0

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Return keys `[B, G, N, D]` and values `[B, G, N, Dv]` as views of the rows."""
        g, both = self.geometry, rows[..., : self._used].view(self.geometry.dtype)
        return Rows(both[..., : g.head_dim], both[..., g.value_start :][..., : g.value_dim])

    def wrong(self, rows: Tensor) -> Tensor:
        """Return True for rows with a key that is NaN, infinite or too large, bool `[...]`."""
        keys = self.decode(rows).keys
        if check.in_range(keys):  # a fast check, which nearly always succeeds
            return torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device)
        return check.out_of_range(keys).any(-1)

    @property
    def _used(self) -> int:
        g = self.geometry
        return max(g.head_dim, g.value_start + g.value_dim) * g.dtype.itemsize


@dataclass(frozen=True)
class Scaled:
    """Stores one byte per number, with one float32 scale for the key and one for the value of a
    row.

    A row consists of `D` codes of the key, `Dv` codes of the value, zeros up to a multiple of 4
    bytes, the scale of the key, and the scale of the value.

    A code stands for the number `code · scale`, computed in float32. The scale is the largest
    magnitude in the vector divided by the largest code. If this is not a normal float32 number, for
    example because all numbers are zero, scale and codes are 0.

    Args:
        geometry: Geometry of the index.
        codes: "int8" (rounded half to even, -127 to 127) or "fp8" (e4m3, up to 448).
    """

    geometry: Geometry
    codes: str

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row (key and value of one token), a multiple of 16."""
        return _aligned(self.scales_at + 8)

    @property
    def scales_at(self) -> int:
        """Number of bytes in a row before the two scales (of the key and of the value)."""
        return _aligned(self.geometry.head_dim + self.geometry.value_dim, 4)

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as rows, uint8 `[..., row_bytes]`."""
        return _in_pieces(self._row, keys, values, self.row_bytes, center)

    def _row(self, keys: Tensor, values: Tensor) -> Tensor:
        (key_codes, key_scale), (value_codes, value_scale) = (
            scaled(part, self.codes) for part in (keys, values)
        )
        codes = torch.cat([key_codes, value_codes], dim=-1)
        scales = torch.cat([key_scale, value_scale], dim=-1).view(torch.uint8)
        return torch.cat([pad(codes, (0, self.scales_at - codes.shape[-1])), scales], dim=-1)

    def wrong(self, rows: Tensor, *, values: bool = False) -> Tensor:
        """Return True for rows with a damaged key, such as NaN, which `encode` never produces.

        values: True to check the value of each row, too.
        """
        D, largest = self.geometry.head_dim, CODES[self.codes][1]
        scales = rows[..., self.scales_at : self.scales_at + 8].contiguous().view(torch.float32)
        scales = scales if values else scales[..., :1]
        wrong = ~((scales >= 0) & (scales * largest <= LARGEST_CODED)).all(-1)
        if self.codes == "int8":
            return wrong
        codes = rows[..., : D + (self.geometry.value_dim if values else 0)]
        return wrong | (codes & 127 == 127).any(-1)  # these codes are NaN in e4m3

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode rows, uint8 `[B, G, N, row_bytes]`, to keys `[B, G, N, D]` and values `[B, G, N,
        Dv]`.
        """
        D, Dv = self.geometry.head_dim, self.geometry.value_dim
        dtype, _ = CODES[self.codes]
        codes = rows[..., : D + Dv].view(dtype).float()
        scales = rows[..., self.scales_at : self.scales_at + 8].view(torch.float32)
        keys, values = codes[..., :D] * scales[..., :1], codes[..., D:] * scales[..., 1:]
        return Rows(_beside(center, keys, self.geometry), values.to(self.geometry.dtype))


@dataclass(frozen=True)
class Grouped:
    """Stores 2 or 4 bits per number, with a minimum and a step size for each group of up to 32
    numbers.

    A row consists of the codes of the key, the codes of the value, a zero byte if the codes have an
    odd number of bytes, the minima and step sizes of the key, and the minima and step sizes of the
    value (`storage/quantize.py`).

    Keys are rotated before they are quantized (`rotated`), so that an outlier in one channel does
    not enlarge the step size of the other channels in its group. Values are not rotated, because
    they have no such outliers (KIVI, arXiv 2402.02750). KIVI itself does not rotate keys. There,
    each group contains one channel of several tokens, so rows depend on each other.

    Args:
        geometry: Geometry of the index.
        bits: 4 or 2.
        rotates_values: True to rotate values as well. `InKey` needs this, because it passes the
            second part of a key as the value.
    """

    geometry: Geometry
    bits: int
    rotates_values: bool = False

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row (key and value of one token), a multiple of 16."""
        return _aligned(self._ends[-1])

    @property
    def _ends(self) -> tuple[int, int, int, int, int]:
        """Byte offsets of the parts of a row, in this order: the end of the key's codes, the end of
        the value's codes, the start of the scales, the end of the key's scales, and the end of the
        value's scales.
        """
        D, Dv = self.geometry.head_dim, self.geometry.value_dim
        keys, both = code_bytes(D, self.bits), code_bytes(D, self.bits) + code_bytes(Dv, self.bits)
        scales = _aligned(both, 2)
        key_scales = scales + 4 * groups(D)[0]
        return keys, both, scales, key_scales, key_scales + 4 * groups(Dv)[0]

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` and values `[..., Dv]` as rows, uint8 `[..., row_bytes]`."""
        return _in_pieces(self._row, keys, values, self.row_bytes, center)

    def _row(self, keys: Tensor, values: Tensor) -> Tensor:
        parts = rotated(keys.float()), rotated(values.float()) if self.rotates_values else values
        codes, scales = zip(*(quantize(part, self.bits) for part in parts), strict=True)
        _, both, first, *_ = self._ends
        of_scales = [part.flatten(-2).view(torch.uint8) for part in scales]
        return torch.cat([pad(torch.cat(codes, -1), (0, first - both)), *of_scales], dim=-1)

    def wrong(self, rows: Tensor, *, values: bool = False) -> Tensor:
        """Return True for rows with a damaged key, such as NaN, which `encode` never produces.

        values: True to check the value of each row, too.
        """
        _, _, first, middle, last = self._ends
        stop = last if values else middle
        scales = rows[..., first:stop].contiguous().view(torch.bfloat16)
        return _beyond(scales.reshape(*scales.shape[:-1], -1, 2), 2**self.bits - 1)

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode rows, uint8 `[B, G, N, row_bytes]`, to keys `[B, G, N, D]` and values `[B, G, N,
        Dv]`.
        """
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
    """Quantize vectors with one scale per vector, as the codec `Scaled` does.

    Args:
        vectors: Finite, `[..., D]`.
        codes: "int8" or "fp8".

    Returns:
        Codes uint8 `[..., D]`, and scales float32 `[..., 1]`.
    """
    dtype, largest = CODES[codes]
    vectors = vectors.float()
    scale = vectors.abs().amax(dim=-1, keepdim=True) / largest
    # If a vector has a number near the largest float32, rounding may make its scale so large that
    # `scale * largest` is infinite. Then use the next smaller scale.
    scale = torch.where((scale * largest).isinf(), scale.nextafter(scale * 0), scale)
    scale = torch.where(scale < SMALLEST_SCALE, 0, scale)
    numbers = torch.where(scale > 0, vectors / scale, 0)
    numbers = numbers.round() if dtype == torch.int8 else numbers
    return numbers.to(dtype).view(torch.uint8), scale


@dataclass(frozen=True)
class InKey:
    """Stores keys whose first `Dv` coordinates are the value, as in multi-head latent attention.

    Another codec stores the first `Dv` coordinates (the latent) as its "key" and the other `D - Dv`
    coordinates (after the rotary embedding) as its "value". The two parts have different
    magnitudes, and so get separate scales. The argument `center` of `encode` and `decode` is
    ignored, because it would change the values.

    Args:
        geometry: Geometry of the index.
        parts: The codec that stores the two parts.
    """

    geometry: Geometry
    parts: Scaled | Grouped

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a stored row (the key of one token), a multiple of 16."""
        return self.parts.row_bytes

    def encode(self, keys: Tensor, values: Tensor, center: Tensor | None = None) -> Tensor:
        """Encode keys `[..., D]` as rows, uint8 `[..., row_bytes]`.

        The argument `values` is not read.
        """
        return self.parts.encode(*keys.tensor_split([self.geometry.value_dim], dim=-1))

    def wrong(self, rows: Tensor) -> Tensor:
        """Return True for rows whose key is damaged, for example NaN. `encode` never produces such
        rows.
        """
        return self.parts.wrong(rows, values=True)

    def decode(self, rows: Tensor, center: Tensor | None = None) -> Rows:
        """Decode rows to keys `[B, G, N, D]`, and values `[B, G, N, Dv]` that are views of the
        keys.
        """
        parts = self.parts.decode(rows)
        keys = torch.cat([parts.keys, parts.values], dim=-1)
        return Rows(keys, keys[..., : self.geometry.value_dim])


def _beyond(scales: Tensor, levels: int) -> Tensor:
    """Return True for vectors whose codes can represent a number above `LARGEST_CODED`.

    Args:
        scales: Minimum and step size of each group, bfloat16 `[..., groups, 2]`.
        levels: The largest code.

    Returns:
        Bool `[...]`.
    """
    low, step = scales.float().unbind(-1)
    return ~((step >= 0) & (low.abs() + levels * step <= LARGEST_CODED)).all(-1)


def check_rows(name: str, geometry: Geometry, rows: Tensor, valid: Tensor | None) -> None:
    """Raise ValueError if an encoded key is NaN, infinite or too large.

    Args:
        name: Name of the codec.
        geometry: Geometry of the index.
        rows: Uint8 `[B, G, N, row_bytes]`.
        valid: Which tokens to check, bool `[B, N]`; None for all.

    Raises:
        ValueError: A key is damaged. The message names sequence, KV head and token.
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
                f"state['rows']: got a key with a number that is NaN, infinite or too large "
                f"(sequence {b}, KV head {g}, token {start + token}), allowed is "
                f"{check.ALLOWED_NUMBER}"
            )


def rotated(vectors: Tensor) -> Tensor:
    """Rotate vectors by a block-diagonal Hadamard matrix, which is its own inverse.

    The block size is the largest power of two that divides `D`. The blocks are normalized Hadamard
    matrices of Sylvester's construction. The product is computed as a fast Walsh-Hadamard
    transform, so the result for a row does not depend on the other rows.

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
    """Add the center (mean key) to decoded keys, float32 `[B, G, N, D]`. Return the sum in the
    dtype of `geometry`."""
    return _of_dtype(keys if center is None else center + keys, geometry)


def _of_dtype(part: Tensor, geometry: Geometry) -> Tensor:
    largest = torch.finfo(geometry.dtype).max  # a decoded number may exceed it by half a step
    return part.clamp(-largest, largest).to(geometry.dtype)


def _in_pieces(
    row: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    row_bytes: int,
    center: Tensor | None,
) -> Tensor:
    """Encode rows with the function `row`, `PIECE` rows at a time, after subtracting the center."""
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
    """Return views of the tensors as int64, or the tensors themselves if one of them is not
    aligned.
    """
    for part in parts:
        elements = [part.shape[-1], part.storage_offset(), *part.stride()[:-1]]
        offsets = [part.data_ptr(), *(count * part.element_size() for count in elements)]
        if part.stride(-1) != 1 or any(offset % WORD.itemsize for offset in offsets):
            return parts
    return tuple(part.view(WORD) for part in parts)


def _aligned(count: int, multiple: int = ALIGNMENT_BYTES) -> int:
    return -(-count // multiple) * multiple
