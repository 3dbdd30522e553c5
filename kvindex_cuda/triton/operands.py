"""Arguments of the Triton kernels (matrices, norms, tile sizes): their types, checks of them, and
the launch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest FP8 (e4m3) number."""

SMALLEST_EXPONENT = -126
"""Smallest exponent of a scale: that of the smallest normal float32."""

PIECE = 4096
"""Number of matrix rows that are rounded to FP8 at a time, to limit the size of float32 copies."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Allowed dtypes of activations."""

NARROWEST, ROWS = 8, 16
"""NARROWEST: number of sequences in the narrowest product of tensor cores. ROWS: largest number of
sequences."""

READS_FP8, OVERLAPS = (8, 9), (9, 0)
"""First compute capability that converts FP8, and first on which launches may overlap."""


class Matrix(NamedTuple):
    """A matrix `[N, K]` of weights, with an optional bias `[N]` and, for FP8 weights, a float32
    scale of each matrix row `[N]`.

    The bias has the dtype of the activations. The weights have the same dtype, or are
    float8_e4m3fn.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """Factors `[K]` of RMS normalization, and its epsilon."""

    weight: Tensor
    eps: float


class Tile(NamedTuple):
    """Tile sizes and options of a launch.

    With several sequences, the columns of a tile are divided into slices, one for each warp. The
    warp multiplies its slice of all matrix rows of the tile. A slice must have at least 32 columns;
    with 64 or more, prefetches cover whole memory lines.

    Attributes:
        rows: Matrix rows that a program reads at once, a power of two.
        columns: Columns that a program reads at once, a power of two.
        warps: Warps of a program.
        stages: Stages of its pipeline.
        overlap: Let the launch begin, and read its first weights, before the previous launch ends
            (programmatic dependent launch). This has no effect in Triton's interpreter.
        ahead: Only for one sequence: number of tiles that a program loads first and multiplies
            last.
    """

    rows: int = 16
    columns: int = 256
    warps: int = 4
    stages: int = 3
    overlap: bool = False
    ahead: int = 2


def stack(*matrices: Matrix) -> Matrix:
    """Join several weight matrices `[N, K]` into one, so that one matrix product replaces several.

    This is for matrices that are multiplied by the same activations, such as the Q, K and V
    projections of a layer, or the gate and up projections of an MLP.

    If only some matrices have a bias, the others get a bias of zeros. Raises ValueError if there is
    no matrix, or if only some matrices have a scale.
    """
    if not matrices:
        raise ValueError("matrices: got none, allowed is at least one")
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if len(scales) not in (0, len(matrices)):
        raise ValueError(
            f"scale: got {len(scales)} of {len(matrices)} matrices with a scale, allowed is all or "
            "none"
        )
    given = [matrix.bias for matrix in matrices if matrix.bias is not None]
    biases = [
        given[0].new_zeros(len(matrix.weight)) if matrix.bias is None else matrix.bias
        for matrix in matrices
        if given
    ]
    return Matrix(
        torch.cat([matrix.weight for matrix in matrices]),
        torch.cat(biases) if given else None,
        torch.cat(scales) if scales else None,
    )


def to_fp8(matrix: Matrix) -> Matrix:
    """Round the weights of a matrix to FP8 (e4m3), with a scale for each matrix row.

    A scale is the smallest power of two that brings the matrix row into FP8's range, so weight
    times scale is exact in bfloat16. A rounding error is at most 1/16 of the weight, or half of the
    smallest FP8 step. Raises ValueError for a matrix that already has a scale.
    """
    if matrix.scale is not None:
        raise ValueError(
            "scale: got a matrix that already has a scale, allowed is a matrix whose scale is None"
        )
    mantissa, exponent = torch.frexp(matrix.weight.abs().amax(1).float())
    exponent = exponent - 9 + (512 * mantissa > LARGEST)
    bits = (exponent.clamp_min(SMALLEST_EXPONENT) + 127) << 23  # bits of two to that power
    scale = bits.view(torch.float32)
    weight = torch.empty_like(matrix.weight, dtype=FP8)
    parts = (torch.split(whole, PIECE) for whole in (weight, matrix.weight, scale))
    for codes, wide, factors in zip(*parts, strict=True):
        codes.copy_(wide.float() / factors[:, None])
    return Matrix(weight, matrix.bias, scale)


def rows_of(name: str, tensor: Tensor, columns: int, batch: int | None = None) -> int:
    """Return the number of sequences `B` of activations `[B, columns]`. Raises ValueError if the
    kernels do not support the shape or dtype."""
    if tensor.ndim != 2 or tensor.shape[1] != columns or not 1 <= len(tensor) <= ROWS:
        allowed = f"[1 to {ROWS}, {columns}]" if batch is None else f"[{batch}, {columns}]"
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed is {allowed}")
    if batch not in (None, len(tensor)):
        raise ValueError(f"{name}: got {len(tensor)} sequences, allowed is {batch}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: got {tensor.dtype}, allowed is one of {DTYPES}")
    return gapless(name, tensor, tensor.dtype, tensor.device).shape[0]


def like(name: str, tensor: Tensor, model: Tensor, *shape: int) -> Tensor:
    """Return the tensor. Raises ValueError unless it has the given shape, the dtype and device of
    `model`, and a contiguous last dimension."""
    shaped(name, tensor, *shape)
    return gapless(name, tensor, model.dtype, model.device)


def shaped(name: str, tensor: Tensor, *shape: int) -> Tensor:
    """Return the tensor. Raises ValueError unless it has the given shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed is {list(shape)}")
    return tensor


def gapless(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor. Raises ValueError unless it has the given dtype and device, and a
    contiguous last dimension."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got {tensor.dtype}, allowed is {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, allowed is {device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: got a stride of {tensor.stride(-1)} in the last dimension, allowed is 1"
        )
    return tensor


def of_matrix(matrix: Matrix, x: Tensor, columns: int) -> int:
    """Return the number of rows `N` of a matrix `[N, columns]`. Raises ValueError if its weights,
    bias or scale do not fit the activations `x`."""
    weight, bias, scale = matrix
    if weight.ndim != 2 or weight.shape[1] != columns or not len(weight):
        raise ValueError(f"weight: got shape {list(weight.shape)}, allowed is [N, {columns}]")
    if not weight.is_contiguous():
        raise ValueError(f"weight: got strides {weight.stride()}, allowed is a contiguous tensor")
    gapless("weight", weight, FP8 if scale is not None else x.dtype, x.device)
    if scale is not None:
        gapless("scale", shaped("scale", scale, len(weight)), torch.float32, x.device)
    if bias is not None:
        like("bias", bias, x, len(weight))
    return len(weight)


def launch(
    kernel: Any, grid: tuple[int, ...], tile: Tile, device: torch.device, **named: Any
) -> None:
    """Launch a kernel on the device's current stream. Raises ValueError for tile sizes that are not
    allowed, or a device that cannot run the kernel."""
    for name, value in tile._asdict().items():
        if name in ("rows", "columns", "warps") and (value < 1 or value & (value - 1)):
            raise ValueError(f"{name}: got {value}, allowed is a power of two")
    if tile.ahead < 1:
        raise ValueError(f"ahead: got {tile.ahead}, allowed is at least 1")
    fp8 = any(_is_fp8(part) for part in named.values())
    overlap = runs_on(device, fp8, tile)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](
            **named,
            OVERLAP=overlap,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=overlap,
        )


def runs_on(device: torch.device, fp8: bool, tile: Tile) -> bool:
    """Return True if the launch of a kernel may overlap with the launches before and after it.

    Raises ValueError if FP8 weights or overlap are requested but the device does not support them.
    """
    if triton.knobs.runtime.interpret:
        return False
    if device.type != "cuda":
        raise ValueError(
            f"device: got {device}, allowed is a CUDA device; for other devices, set the "
            "environment variable TRITON_INTERPRET=1 before the start"
        )
    has = torch.cuda.get_device_capability(device)
    if fp8 and has < READS_FP8:
        raise ValueError(
            f"weight: got FP8 on compute capability {has}, allowed is {READS_FP8} or newer"
        )
    if tile.overlap and has < OVERLAPS:
        raise ValueError(
            f"overlap: got True on compute capability {has}, allowed is {OVERLAPS} or newer"
        )
    return tile.overlap


def _is_fp8(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == FP8
