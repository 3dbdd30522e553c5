"""Encode blocks of keys as centers and codes, with one kernel (`append/encode.cu`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvindex.ops import transform
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.runtime.arguments import (
    CODES,
    busy,
    contiguous_rows,
    multiprocessors,
    of_shape,
    of_type,
    strides,
    wide,
)
from kvindex_cuda.runtime.constants import ENCODE_WARPS, MOST_BITS
from kvindex_cuda.runtime.launch import launch

WIDEST, LATENT, MOST_ODD = 256, 576, 31
"""WIDEST: largest head dimension. LATENT: head dimension of latents (512 coordinates and 64 rotary
ones), which is allowed if its odd factor is at most MOST_ODD."""

NO_PAGES = dict(
    due=None,
    bases=None,
    layers=0,
    parts=0,
    codes_page=0,
    codes_part=0,
    rows_page=0,
    rows_part=0,
    key_scales=None,
)
"""Values of the kernel's arguments for an engine's pages, if keys are a tensor."""

ROOM = 2.0**-10
"""The largest magnitude in the tables exceeds the last edge between levels by this fraction."""


RECENT = 8
"""Number of rotations whose lookups are kept for further encoders."""


class Lookups(NamedTuple):
    """What the kernel reads instead of a rotation and levels, on their device.

    Attributes:
        flips: Result of `_flips`.
        hartley: Matrix `Q` of the rotation (`_factors`).
        largest: Largest magnitude in the range of the tables (`_tables`).
        tables: Tables to find the level of a magnitude.
    """

    flips: Tensor
    hartley: Tensor
    largest: float
    tables: Tensor


class Encoder:
    """Encodes keys with one kernel.

    The constructor computes the kernel's lookup tables from the rotation and the magnitude levels.
    It copies tensors to the host and so waits for the device; do not call it in a decode step.

    Args:
        layout: Layout of the blocks of codes, with one weight per key.
        rotation: Result of `ops.transform.rotation`, float32 `[D, D]`.
        levels: Result of `ops.codes.levels(D, bits)`, float32 `[2^bits]`.
        centered: Whether to compute the center of each block and subtract it from the block's keys.

    Raises:
        ValueError: `rotation` or `levels` are not such results, or the kernel does not support the
            head dimension, the number of bits or the layout.
    """

    def __init__(
        self, layout: Layout, rotation: Tensor, levels: Tensor, *, centered: bool = True
    ) -> None:
        D, bits = layout.head_dim, layout.magnitude_bits
        if not serves(D) or not 0 <= bits <= MOST_BITS:
            raise ValueError(
                f"layout: got D = {D} and {bits} bits per magnitude, allowed are 0 to {MOST_BITS} "
                f"bits; D must be a multiple of 8, and at most {WIDEST} (at most {LATENT} if the "
                f"largest odd divisor of D is at most {MOST_ODD})"
            )
        if isinstance(layout, SubspaceLayout):
            raise ValueError(
                "layout: got a SubspaceLayout, allowed is a Layout (one weight per key)"
            )
        of_shape("rotation", of_type("rotation", rotation, torch.float32), D, D)
        of_shape("levels", of_type("levels", levels, torch.float32), 2**bits)
        self.layout, self.device, self.centered = layout, rotation.device, centered
        self._flips, self._hartley, self.largest, self._tables = _lookups(rotation, levels)
        self._taken: Tensor | None = None
        self._defines = dict(D=D, BITS=bits, CENTERED=int(centered))

    def __call__(
        self,
        keys: Tensor,
        table: Tensor,
        *,
        first: int,
        valid: Tensor | None = None,
        wrong: Tensor | None = None,
    ) -> None:
        """Encode keys. Write their codes, and the center of each block, to the memory blocks whose
        addresses are in `table`.

        A center equals that of `kvindex.ops.codes.centers` except for rounding, because the kernel
        sums in float32, 32 keys at a time. Invalid keys do not contribute to a center. An invalid
        key is encoded as the zero vector minus the center, with weight 0. Other entries of the
        blocks stay unchanged.

        Args:
            keys: `[B, G, N, D]`.
            table: Addresses of blocks, int64 `[B, S]`.
            first: Number of the block that begins with the first key.
            valid: True for valid keys, bool `[B, N]`; None if all keys are valid.
            wrong: int32 of one element, set to 1 if a valid key is not finite or far above
                `check.LARGEST`, or None.

        Raises:
            ValueError: Dtypes or shapes are wrong, or the table has too few blocks.
        """
        D = self.layout.head_dim
        B, G, N, _ = of_type("keys", keys, *CODES).shape
        of_shape("keys", keys, B, G, N, D)
        of_shape("table", of_type("table", table, torch.int64), B, table.shape[-1])
        blocks = -(-N // BLOCK)
        if not 0 <= first <= table.shape[1] - blocks:
            last = table.shape[1] - blocks
            raise ValueError(
                f"first: got {first} for {blocks} blocks of keys, allowed is 0 to {last}"
            )
        if valid is not None:
            valid = contiguous_rows(of_shape("valid", of_type("valid", valid, torch.bool), B, N), 1)
        if wrong is not None and of_type("wrong", wrong, torch.int32).numel() != 1:
            raise ValueError(f"wrong: got {wrong.numel()} elements, allowed is 1")
        keys = contiguous_rows(keys, 1)
        segments, begins = blocks * G * B, wide(keys)
        resident = _resident(D, keys.element_size(), begins)
        grid = busy(keys.device, 1, segments, 1, resident) if segments else 0
        more = segments > grid  # a thread block then processes several segments
        launch(
            "append/encode.cu",
            "encode",
            (grid,),
            (32 * ENCODE_WARPS,),
            arguments=dict(
                **strides("keys", keys, "batch", "head", "token"),
                **strides("valid", valid, "batch"),
                keys=keys,
                valid=valid,
                codes=table.contiguous(),
                wrong=wrong,
                taken=torch.zeros(1, dtype=torch.int32, device=keys.device) if more else None,
                count=N,
                first=first,
                blocks=blocks,
                kv_heads=G,
                batches=B,
                row=table.shape[1],
                **self._constants(),
                **NO_PAGES,
            ),
            shared_bytes=_staged(D, keys.element_size(), begins, resident),
            DTYPE=CODES[keys.dtype],
            WIDE=int(begins),
            RESIDENT=resident,
            PAGED=0,
            FP8_KEYS=0,
            **self._defines,
        )

    def of_pages(
        self,
        rows: Tensor,
        *,
        due: Tensor,
        bases: Tensor,
        layers: int,
        parts: int,
        codes_page: int,
        codes_part: int,
        rows_page: int,
        rows_part: int,
        fp8: tuple[torch.dtype, Tensor] | None = None,
    ) -> None:
        """Encode full segments (256 tokens) in the pages of an inference engine, for all layers.

        Args:
            rows: Rows of one of the layers, `[pages, G, tokens, 2 D]`, for their shape and dtype.
                The kernel finds the rows of each layer by `bases`.
            due: Int64 `[1 + n]`: the number of segments to encode, then the numbers of these
                segments, counted over all pages. The kernel reads them on the device.
            bases: Addresses of codes and rows of each layer, int64 `[layers, 2]`.
            layers: Number of layers.
            parts: Segments of a page.
            codes_page: Bytes from a page of codes to the next one.
            codes_part: Bytes from a segment's codes to the next one's.
            rows_page: Bytes from a page of rows to the next one.
            rows_part: Bytes from a segment's rows to the next one's.
            fp8: If rows are uint8, for numbers in FP8: the dtype to which keys are converted before
                they are encoded, and the address of the scale of each layer's keys, int64
                `[layers]`.
        """
        D, device = self.layout.head_dim, due.device
        keys = of_type("rows", rows, *(CODES if fp8 is None else [torch.uint8]))[..., :D]
        dtype, scales = (keys.dtype, None) if fp8 is None else fp8
        begins = wide(keys)
        resident = _resident(D, dtype.itemsize, begins)
        if self._taken is None:
            self._taken = torch.zeros(1, dtype=torch.int32, device=device)
        launch(
            "append/encode.cu",
            "encode",
            (resident * multiprocessors(device),),
            (32 * ENCODE_WARPS,),
            arguments=dict(
                **strides("keys", keys, "batch", "head", "token"),
                valid_batch=0,
                keys=None,
                valid=None,
                codes=None,
                wrong=None,
                taken=self._taken,
                count=BLOCK,
                first=0,
                blocks=1,
                kv_heads=keys.shape[1],
                batches=1,
                row=0,
                **self._constants(),
                due=due,
                bases=bases,
                layers=layers,
                parts=parts,
                codes_page=codes_page,
                codes_part=codes_part,
                rows_page=rows_page,
                rows_part=rows_part,
                key_scales=scales,
            ),
            shared_bytes=0 if fp8 else _staged(D, keys.element_size(), begins, resident),
            DTYPE=CODES[dtype],
            WIDE=int(begins),
            RESIDENT=resident,
            PAGED=1,
            FP8_KEYS=int(fp8 is not None),
            **self._defines,
        )

    def _constants(self) -> dict[str, Tensor | float]:
        L = self.layout
        return dict(
            flips=self._flips,
            hartley=self._hartley,
            tables=self._tables,
            head_bytes=L.head_bytes,
            weights=L.weights,
            logs=L.logs,
            magnitudes=L.magnitudes,
            center=L.center,
            size_scale=1 / self.largest,
            root=L.head_dim**-0.5,
        )


def serves(D: int) -> bool:
    """Return True if the kernel supports the head dimension `D`."""
    widest = WIDEST if D // (D & -D) > MOST_ODD else LATENT
    return D % 8 == 0 and 8 <= D <= widest


def encoder_of(
    config: ParisKVConfig, layout: Layout, rotation: Tensor, levels: Tensor
) -> Encoder | None:
    """Return the encoder for a ParisKV index with fused kernels, or None if `encode.cu` does not
    support the index.

    There is no encoder for codes with one weight per subspace. Those codes are computed one
    operation at a time, because the index must also count the keys per centroid.
    """
    if config.block != "key" or not serves(layout.head_dim):
        return None
    return Encoder(layout, rotation, levels, centered=bool(config.center))


_recent: list[tuple[Tensor, Tensor, Lookups]] = []
"""The arguments and results of the last calls of `_lookups`, newest first."""


def _lookups(rotation: Tensor, levels: Tensor) -> Lookups:
    """Return what the kernel reads instead of a rotation and levels.

    The layers of a model have the same tensors, and to compute the result for each of them would
    make the host wait for the device.
    """
    for known, others, found in tuple(_recent):
        if known is rotation and others is levels:
            return found
    device = rotation.device
    signs, hartley = _factors(rotation.cpu())
    largest, tables = _tables(levels.cpu())
    made = Lookups(_flips(signs).to(device), hartley.to(device), largest, tables.to(device))
    _recent[:] = [(rotation, levels, made), *_recent[: RECENT - 1]]
    return made


def _factors(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors of a rotation `R = (Q ⊗ H) diag(s) / √D`. Return its signs `s` `[D]`, and
    its matrix `Q`, padded with zeros."""
    D = len(rotation)
    power = D & -D
    odd = D // power
    plain = transform.rotation(D, 0)
    plain = plain * plain[0].sign()  # the first matrix rows of Q and H are ones
    signs = rotation[0].sign()
    if not torch.allclose(plain * signs, rotation, rtol=0, atol=1e-6):
        raise ValueError(
            "rotation: got a matrix that ops.transform.rotation cannot return, allowed is a result "
            "of this function"
        )
    order = odd if power >= 32 else -(-D // 32) * 32 // power
    hartley = torch.zeros(order, order)
    hartley[:odd, :odd] = plain[::power, ::power] * D**0.5
    return signs, hartley


def _flips(signs: Tensor) -> Tensor:
    """Convert the random signs of a rotation to bit masks that flip the signs of 16-bit floats.

    Each int32 is the mask for two coordinates. The result `[D / 2]` is padded to a multiple of 32
    coordinates.
    """
    D = len(signs)
    bits = np.zeros(-(-D // 32) * 32, dtype=np.uint32)
    bits[:D] = (signs < 0).numpy() * np.uint32(0x8000)
    pairs = bits[0::2] | bits[1::2] << 16
    return torch.from_numpy(pairs.view(np.int32))


def _tables(levels: Tensor) -> tuple[float, Tensor]:
    """Compute the lookup tables with which encode.cu finds the level of a magnitude. Return the
    largest magnitude in the range of the tables, and the tables.

    The range of magnitudes is divided into equal cells, each with at most one boundary between two
    levels. The tables are one tensor, which contains three things in this order: the boundary in
    each cell, the indices of the levels below and above this boundary, and all levels.

    Raises ValueError if a cell contains two boundaries, or if levels are not float16 numbers.
    """
    bits, edges = len(levels).bit_length() - 1, (levels[1:] + levels[:-1]) / 2
    cells = 16 if bits <= 3 else 4 << bits
    largest = float(edges[-1]) * (1 + ROOM) if bits else 1.0
    places = (edges.double() / largest).float()
    found = (places.double() * (cells - 1)).round().long()  # ties to even, as the kernel
    if (found.diff() < 1).any() or (levels != levels.half()).any():
        raise ValueError(f"levels: got {levels.tolist()}, allowed is a result of ops.codes.levels")
    scaled = torch.full((cells,), torch.inf)
    scaled[found] = places
    below = torch.searchsorted(found, torch.arange(cells))
    indices = torch.stack([below, (below + 1).clamp_max(len(edges))], dim=1)
    return largest, torch.cat([scaled, indices.flatten().float(), levels])


def _resident(D: int, size: int, wide: bool) -> int:
    """Return how many thread blocks of encode.cu run on a multiprocessor of an H100 at a time.

    size: Bytes of a coordinate.
    wide: True if each key begins at a multiple of 16 bytes.
    """
    held, odd = -(-D // 32) * 2 * size, D // (D & -D)  # words for the coordinates of a lane
    if wide and held <= 16 and odd <= 3:
        return 4 if D * size <= 128 else 3
    return 2 if D <= 128 else 1


def _staged(D: int, size: int, wide: bool, resident: int) -> int:
    """Return the bytes of shared memory for the 256 keys of a segment, or 0 if the kernel does not
    copy keys to shared memory.

    The condition for copying must be the same as for `STAGED` in encode.cu. Keys use up to 200 of
    the 228 KB of an H100, which leaves room for the other variables of a thread block.
    """
    row = -(-D * size // 128) * 128
    return BLOCK * row if wide and row <= 256 and BLOCK * row * resident <= 200 * 1024 else 0
