"""Product of a matrix with 2 to 16 vectors on tensor cores, limited by memory. Reference:
`multiply` in `kvindex_cuda/triton/reference.py`.

A program computes some rows of the product. It reads their weights once, and all activations. Each
tile of columns is divided into one slice per warp: a warp computes the product `[rows, slice] ·
[slice, batch]`, and the slices are added up at the end. So only one warp converts each number, and
tiles can arrive by asynchronous copies.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous, bring_rows


@triton.jit
def read_weights(weight, rows, columns, N, K):
    """Load a tile of the matrix `[N, K]` as `[slices, rows, slice]`, with zeros outside of the
    matrix. A slice is a range of columns."""
    inside = (rows[None, :, None] < N) & (columns[:, None, :] < K)
    at = weight + rows[None, :, None].to(tl.int64) * K + columns[:, None, :]
    return tl.load(at, inside, other=0.0)


@triton.jit
def read_vectors(x, x_step, columns, batch, K, B, GATED: tl.constexpr):
    """Load activations as float32 `[slices, slice, batch]`. A slice is a range of columns.

    If GATED, a vector in memory is K numbers of gate, then K numbers of up. The function then
    returns `silu(gate) · up`.
    """
    inside = (columns[:, :, None] < K) & (batch[None, None, :] < B)
    at = x + batch[None, None, :] * x_step + columns[:, :, None]
    found = tl.load(at, inside, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * tl.load(at + K, inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def ones_as(weight, columns, never, dtype: tl.constexpr):
    """Return a tensor of ones, `[slices, 16, slice]`, in the same register layout as the loaded
    weights. `add_squares` multiplies the activations by it.

    If matrix products need the activations in two register layouts, Triton does not pipeline the
    loads of the activations. So the ones must have the layout of the weights. Triton derives the
    layout of FP8 weights from their load instruction. So the ones must come from an FP8 load too.
    The mask of this load is false everywhere, because all columns are below `never`. Therefore the
    load returns the default value 1.
    """
    if weight.dtype.element_ty == tl.float8e4nv:
        at = columns[:, None, :] + tl.zeros([1, 16, 1], tl.int32)
        ones = tl.load(weight + at, at >= never, other=1.0).to(tl.float32).to(dtype)
    else:
        ones = tl.full([columns.shape[0], 16, columns.shape[1]], 1.0, dtype)
    return ones


@triton.jit
def add_squares(ones, found, squares, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add the sum of the squared activations of some columns to `squares`.

    Tensor cores compute the sum as a product with a matrix of ones. Therefore `squares` has 16
    equal matrix rows.

    Each square is split into two operands of the tensor cores. This is exact for bfloat16
    activations. For float16 activations, the relative error is below 2^-18.
    """
    square = found * found
    if PRECISION == "ieee":
        squares = tl.dot(ones, square, squares, input_precision=PRECISION)
    else:
        high = (square.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        squares = tl.dot(ones, high.to(dtype), squares, input_precision=PRECISION)
        squares = tl.dot(ones, (square - high).to(dtype), squares, input_precision=PRECISION)
    return squares


@triton.jit
def product_of_rows(
    x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute some rows of a matrix product of weights and activations, float32 `[rows, batch]`.

    The first weights are prefetched into L2 before the previous kernel has ended.

    The operands of the tensor cores have the dtype of the activations, with one exception. If
    activations are float16 and there is a norm, the operands are TF32, which has as many mantissa
    bits as float16 and a larger range.
    """
    given: tl.constexpr = x.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if given == tl.float32 else "tf32"
    dtype: tl.constexpr = tl.float32 if given == tl.float16 and norm is not None else given
    SLICE: tl.constexpr = BLOCK_K // SLICES
    columns = tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    bring_rows(weight, rows, N, K, BLOCK_K, OVERLAP)
    after_previous(OVERLAP)
    sums = tl.zeros([SLICES, rows.shape[0], batch.shape[0]], tl.float32)
    squares = tl.zeros([SLICES, 16, batch.shape[0]], tl.float32)
    ones = ones_as(weight, columns, K + BLOCK_K, dtype)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        later = first + columns
        weights = read_weights(weight, rows, later, N, K)
        found = read_vectors(x, x_step, later, batch, K, B, GATED)
        if norm is not None:
            squares = add_squares(ones, found, squares, dtype, PRECISION)
            factors = tl.load(norm + later, later < K, other=0.0).to(tl.float32)
            found = found * factors[:, :, None]
        sums = tl.dot(
            weights.to(tl.float32).to(dtype), found.to(dtype), sums, input_precision=PRECISION
        )
    sums = tl.sum(sums, 0)
    if norm is not None:
        sums = sums * tl.rsqrt(tl.max(tl.sum(squares, 0), 0) / K + eps)[None, :]
    if scale is not None:
        sums = sums * tl.load(scale + rows, rows < N, other=0.0)[:, None]
    if bias is not None:
        sums = sums + tl.load(bias + rows, rows < N, other=0.0).to(tl.float32)[:, None]
    return sums
