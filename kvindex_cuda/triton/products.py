"""Products of a matrix with one to 16 rows of activations, and what is fused into them."""

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
"""Columns at least that a warp multiplies at once: what the matrix units take of FP8."""

BROUGHT = 16
"""Bytes, of which rows brought into L2 are multiples (PTX, `cp.async.bulk.prefetch`)."""


def norm_linear(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    *,
    out: Tensor | None = None,
    tile: Tile = TILE,
) -> Tensor:
    """The product of RMS-normalized activations with a matrix `[N, K]`, and its bias: `[B, N]`.

    x `[B, K]`, B of 1 to 16, float32, float16 or bfloat16; norm: factors `[K]` of that dtype; out:
    where the result goes. Sums are float32, rounded once. Raises ValueError for other shapes,
    dtypes, devices, or a device without what it takes.
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
    """`silu(gate) · up` of RMS-normalized activations: `[B, N]`.

    matrix `[2N, K]`: gate, then up, stacked (SwiGLU: Shazeer, 2020); a program has half of
    `tile.rows` of each. As many programs ask for `silu` as for the rows of one more product, where
    in `swiglu_linear` each program asks for all. Others and errors as of `norm_linear`.
    """
    rows_of("x", x, matrix.weight.shape[-1])
    like("norm", norm.weight, x, x.shape[1])
    if len(matrix.weight) % 2:
        raise ValueError(f"weight: got {len(matrix.weight)} rows, allowed is an even number")
    if tile.rows < 2:
        raise ValueError(f"rows: got {tile.rows}, allowed is at least 2, of gate and of up")
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
    """The product of activations `[B, K]` with a matrix `[N, K]`, plus a residual `[B, N]`.

    out: may be the residual; early: of one sequence, whether programs ask for all of their weights
    to be brought into L2 before they wait for the launch before, if that leaves memory idle: a hint
    that changes no result, and takes effect with `Tile.overlap`, where rows, and the pieces that a
    program reads ahead, are of a multiple of 16 bytes.
    Other arguments and errors as of `norm_linear`.
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
    """The product of `silu(gate) · up` with a matrix `[N, K]`, plus a residual `[B, N]`.

    gate_up `[B, 2K]`: gate, then up, as `norm_linear` of their stacked matrices gives them
    (SwiGLU: Shazeer, 2020). out: may be the residual. Others and errors as of `norm_linear`.
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
    """Check what is left to check, and launch."""
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
    """Whether a matrix lies so that all of a row behind its first tiles can be brought into L2."""
    columns = weight.shape[1] | tile.ahead * tile.columns
    return not (weight.data_ptr() | columns * weight.itemsize) % BROUGHT


def of_product(x: Tensor, norm: Norm | None, matrix: Matrix, tile: Tile) -> dict[str, object]:
    """The arguments of a kernel that takes a product, by name."""
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
