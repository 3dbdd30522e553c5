"""What the layers' kernels are given: matrices, norms, sizes of tiles; and their checks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of FP8's numbers."""

SMALLEST_EXPONENT = -126
"""Of a scale: smaller ones are no normal float32."""

PIECE = 4096
"""Rows that are rounded at a time: bounds their float32 copies."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of activations."""

NARROWEST, ROWS = 8, 16
"""Sequences of the matrix units' narrowest product, and at most."""

READS_FP8, OVERLAPS = (8, 9), (9, 0)
"""Compute capabilities: the first that convert FP8, and whose launches may overlap."""


class Matrix(NamedTuple):
    """Weights `[N, K]`, a bias `[N]`, and a scale float32 `[N]` of each row where they are FP8.

    The bias has the activations' dtype, as the weights have unless they are float8_e4m3fn.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """Factors `[K]` of RMS normalization, and the number that keeps it from dividing by zero."""

    weight: Tensor
    eps: float


class Tile(NamedTuple):
    """How a matrix is cut: rows and columns that a program reads at once, powers of two.

    Of several sequences each warp multiplies a slice of the columns with all rows: 64 columns a
    warp and more are copied ahead in whole lines, 32 is the least.
    warps: of a program; stages: of its pipeline; overlap: a launch begins, and reads its first
    weights, before the launch before it ends (programmatic dependent launch). Every launch of the
    chain may have it. It has no effect under Triton's interpreter. ahead: of one sequence, pieces
    that a program reads before all others, into registers, and multiplies last.
    """

    rows: int = 16
    columns: int = 256
    warps: int = 4
    stages: int = 3
    overlap: bool = False
    ahead: int = 2


def stack(*matrices: Matrix) -> Matrix:
    """The matrices `[N, K]` one below the other: Q, K and V, or gate and up, in one product.

    Raises ValueError for no matrix, or where only some have a scale; rows of one without a bias
    get zeros.
    """
    if not matrices:
        raise ValueError("matrices: got none, allowed is at least one")
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if len(scales) not in (0, len(matrices)):
        raise ValueError(f"scale: got {len(scales)} of {len(matrices)}, allowed is all or none")
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
    """The matrix with weights rounded to FP8 e4m3, each row by its own scale.

    Scales are the least powers of two that bring a row into FP8's range, so that weight times scale
    is exact in bfloat16, too. Rounding is within 1/16 of a number, or half of the smallest step.
    Raises ValueError for a matrix that has a scale already.
    """
    if matrix.scale is not None:
        raise ValueError("scale: got a matrix that has one, allowed is None")
    mantissa, exponent = torch.frexp(matrix.weight.abs().amax(1).float())
    exponent = exponent - 9 + (512 * mantissa > LARGEST)
    bits = (exponent.clamp_min(SMALLEST_EXPONENT) + 127) << 23  # of two to that power, exactly
    scale = bits.view(torch.float32)
    weight = torch.empty_like(matrix.weight, dtype=FP8)
    parts = (torch.split(whole, PIECE) for whole in (weight, matrix.weight, scale))
    for codes, wide, factors in zip(*parts, strict=True):
        codes.copy_(wide.float() / factors[:, None])
    return Matrix(weight, matrix.bias, scale)


def rows_of(name: str, tensor: Tensor, columns: int, batch: int | None = None) -> int:
    """The batch `B` of activations `[B, columns]`. Raises ValueError for what no kernel takes."""
    if tensor.ndim != 2 or tensor.shape[1] != columns or not 1 <= len(tensor) <= ROWS:
        allowed = f"[1 to {ROWS}, {columns}]" if batch is None else f"[{batch}, {columns}]"
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed is {allowed}")
    if batch not in (None, len(tensor)):
        raise ValueError(f"{name}: got a batch of {len(tensor)}, allowed is {batch}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: got {tensor.dtype}, allowed is one of {DTYPES}")
    return gapless(name, tensor, tensor.dtype, tensor.device).shape[0]


def like(name: str, tensor: Tensor, model: Tensor, *shape: int) -> Tensor:
    """The tensor, of that shape and with the dtype and device of another. Raises ValueError."""
    shaped(name, tensor, *shape)
    return gapless(name, tensor, model.dtype, model.device)


def shaped(name: str, tensor: Tensor, *shape: int) -> Tensor:
    """The tensor, if it has that shape. Raises ValueError."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, allowed is {list(shape)}")
    return tensor


def gapless(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor, if it has this dtype and device and its last dimension no gaps.

    Raises ValueError.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got {tensor.dtype}, allowed is {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, allowed is {device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got a stride of {tensor.stride(-1)}, allowed is 1 at the end")
    return tensor


def of_matrix(matrix: Matrix, x: Tensor, columns: int) -> int:
    """The rows `N` of a matrix for activations `[B, columns]`. Raises ValueError."""
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
    """Launch a kernel on the device's current stream. Raises ValueError where it cannot run.

    A tile's sizes are checked; FP8 and overlap ask for a device that has them.
    """
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
    """Whether launches may overlap there: not under the interpreter. Raises ValueError."""
    if triton.knobs.runtime.interpret:
        return False
    if device.type != "cuda":
        raise ValueError(
            f"device: got {device}, allowed is a CUDA device, or TRITON_INTERPRET=1 at the start"
        )
    has = torch.cuda.get_device_capability(device)
    if fp8 and has < READS_FP8:
        raise ValueError(f"weight: got FP8 on compute capability {has}, allowed is {READS_FP8}")
    if tile.overlap and has < OVERLAPS:
        raise ValueError(f"overlap: got True on compute capability {has}, allowed is {OVERLAPS}")
    return tile.overlap


def _is_fp8(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == FP8
