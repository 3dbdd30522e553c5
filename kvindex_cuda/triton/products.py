"""Products of a matrix with the activations of 1 to 16 sequences, fused with normalization, SwiGLU
or a residual sum."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import product
from kvindex_cuda.triton.operands import (
    NARROWEST,
    Matrix,
    Norm,
    Tile,
    launch,
    like,
    of_matrix,
    rows_of,
)

TILE = Tile()

SLICE = 32
"""Fewest columns that a warp multiplies at once: the size of a tensor core's product for FP8."""

BROUGHT = 16
"""The bytes of a prefetch into L2 must be a multiple of this (PTX, `cp.async.bulk.prefetch`)."""


def norm_linear(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    *,
    out: Tensor | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """Multiply RMS-normalized activations by a matrix, and add its bias.

    Sums are computed in float32 and rounded once.

    Args:
        x: Activations `[B, K]` of 1 to 16 sequences, float32, float16 or bfloat16.
        norm: RMS normalization with factors `[K]` of the activations' dtype.
        matrix: `[N, K]`.
        out: Tensor to which the result is written, or None for a new one.
        tile: Sizes of the launch.

    Returns:
        The product `[B, N]`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the device lacks a feature.
    """
    rows_of("x", x, matrix.weight.shape[-1])
    like("norm", norm.weight, x, x.shape[1])
    return _multiply(x, norm, matrix, None, out, tile)


def norm_swiglu(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    *,
    out: Tensor | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """Return `silu(gate) · up`, `[B, N]`, where gate and up are products of RMS-normalized
    activations with two matrices (SwiGLU; Shazeer, 2020).

    Each Triton program multiplies `tile.rows / 2` rows of the gate matrix, and as many rows of the
    up matrix. Other arguments and errors are those of `norm_linear`.

    matrix: `[2N, K]`, the rows of the matrix for gate, then those of the matrix for up.
    """
    rows_of("x", x, matrix.weight.shape[-1])
    like("norm", norm.weight, x, x.shape[1])
    if len(matrix.weight) % 2:
        raise ValueError(
            f"weight: got {len(matrix.weight)} rows, allowed is an even number (gate and up)"
        )
    if tile.rows < 2:
        raise ValueError(
            f"rows: got {tile.rows}, allowed is at least 2 (one matrix row of gate and one of up)"
        )
    return _multiply(x, norm, matrix, None, out, tile, paired=True)


def linear_residual(
    x: Tensor,
    matrix: Matrix,
    residual: Tensor,
    *,
    out: Tensor | None = None,
    tile: Tile = TILE,
    early: bool = False,
) -> Tensor:
    """Multiply activations `[B, K]` by a matrix `[N, K]`, and add a residual `[B, N]`.

    Other arguments and errors are those of `norm_linear`.

    Args:
        x: Activations `[B, K]`.
        matrix: `[N, K]`.
        residual: `[B, N]`.
        out: Tensor to which the result is written, or None for a new tensor. It may be the same
            tensor as `residual`.
        tile: Sizes of the launch.
        early: For one sequence, prefetch all weights of a program into L2 before it waits for the
            previous launch. This does not change results. It is faster if the previous launch does
            not saturate memory. It requires `Tile.overlap`, and matrix rows whose size is a
            multiple of 16 bytes.
    """
    rows_of("x", x, matrix.weight.shape[-1])
    return _multiply(x, None, matrix, residual, out, tile, early=early)


def swiglu_linear(
    gate_up: Tensor,
    matrix: Matrix,
    residual: Tensor,
    *,
    out: Tensor | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """Multiply `silu(gate) · up` by a matrix `[N, K]`, and add a residual `[B, N]` (SwiGLU;
    Shazeer, 2020).

    `gate_up`, `[B, 2K]`, contains first `gate` and then `up`. To compute it, call `norm_linear`
    with one matrix that contains the rows of the gate matrix and then those of the up matrix. The
    argument `out` is explained in `linear_residual`, and the other arguments and the errors are
    explained in `norm_linear`.
    """
    rows_of("gate_up", gate_up, 2 * matrix.weight.shape[-1])
    return _multiply(gate_up, None, matrix, residual, out, tile, gated=True)


def _multiply(
    x: Tensor,
    norm: Norm | None,
    matrix: Matrix,
    residual: Tensor | None,
    out: Tensor | None,
    tile: Tile,
    *,
    gated: bool = False,
    paired: bool = False,
    early: bool = False,
) -> Tensor:
    """Check the matrix, the residual and the output, and launch the kernel."""
    B, K = x.shape[0], matrix.weight.shape[1]
    N = of_matrix(matrix, x, K)
    wide = N // 2 if paired else N
    if residual is not None:
        like("residual", residual, x, B, N)
    output = torch.empty((B, wide), dtype=x.dtype, device=x.device) if out is None else out
    like("out", output, x, B, wide)
    launch(
        product.multiply,
        (cdiv(N, tile.rows) if not paired else cdiv(wide, tile.rows // 2),),
        tile,
        x.device,
        **of_product(x, norm, matrix, tile),
        residual=residual,
        residual_step=0 if residual is None else residual.stride(0),
        output=output,
        output_step=output.stride(0),
        GATED=gated,
        PAIRED=paired,
        EARLY=early and B == 1 and _brings(matrix.weight, tile),
    )
    return output


def _brings(weight: Tensor, tile: Tile) -> bool:
    """Return True if the kernel can prefetch weights.

    It prefetches the weights that follow the first tile of each matrix row. Their addresses and
    sizes must be multiples of 16 bytes.
    """
    columns = weight.shape[1] | tile.ahead * tile.columns
    return not (weight.data_ptr() | columns * weight.itemsize) % BROUGHT


def of_product(x: Tensor, norm: Norm | None, matrix: Matrix, tile: Tile) -> dict[str, object]:
    """Return the arguments that all kernels for matrix products have, keyed by name."""
    N, K = matrix.weight.shape
    return dict(
        x=x,
        x_step=x.stride(0),
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        weight=matrix.weight,
        scale=matrix.scale,
        bias=matrix.bias,
        B=x.shape[0],
        N=N,
        K=K,
        BATCH=1 if x.shape[0] == 1 else max(NARROWEST, next_power_of_2(x.shape[0])),
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        SLICES=max(1, min(tile.warps, tile.columns // SLICE)),
        STAGES=tile.stages,
        AHEAD=tile.ahead,
    )
