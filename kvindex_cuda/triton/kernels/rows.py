"""Product of a matrix with 2 to 16 vectors on tensor cores, limited by memory.

A program computes some rows of the matrix. It divides each tile of columns into one slice per
warp, computes a product `[rows, slice] · [slice, batch]` for each, and adds up the slices at the
end. So each weight and each activation is converted by one warp only, and tiles arrive by
asynchronous copies. A program reads its weights once, and all activations.
Reference: `multiply` in `kvindex_cuda/triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous, bring_rows


@triton.jit
def read_weights(weight, rows, columns, N, K):
    """Load a tile `[slices, rows, slice]` of the matrix `[N, K]`, with zeros outside of the matrix.
    A slice is a range of columns."""
    inside = (rows[None, :, None] < N) & (columns[:, None, :] < K)
    at = weight + rows[None, :, None].to(tl.int64) * K + columns[:, None, :]
    return tl.load(at, inside, other=0.0)


@triton.jit
def read_vectors(x, x_step, columns, batch, K, B, GATED: tl.constexpr):
    """Load activations, float32 `[slices, slice, batch]`. If GATED, a vector has 2K activations,
    and the result is `silu` of the first K times the last K."""
    inside = (columns[:, :, None] < K) & (batch[None, None, :] < B)
    at = x + batch[None, None, :] * x_step + columns[:, :, None]
    found = tl.load(at, inside, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * tl.load(at + K, inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def ones_as(weight, columns, never, dtype: tl.constexpr):
    """Return ones `[slices, 16, slice]` in the layout of the product with the weights.

    For a product with FP8 weights, Triton derives the layout of the operands from the FP8 load. If
    activations are needed in two layouts, Triton does not pipeline their loads. So for FP8 weights
    the ones also come from an FP8 load. Its mask is false for all columns, because they are below
    `never`.
    """
    if weight.dtype.element_ty == tl.float8e4nv:
        at = columns[:, None, :] + tl.zeros([1, 16, 1], tl.int32)
        ones = tl.load(weight + at, at >= never, other=1.0).to(tl.float32).to(dtype)
    else:
        ones = tl.full([columns.shape[0], 16, columns.shape[1]], 1.0, dtype)
    return ones


@triton.jit
def add_squares(ones, found, squares, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add the squared activations of some columns to `squares`, which has 16 equal rows.

    Tensor cores add up the squares, because activations become operands of tensor cores anyway.
    Each square is split into two operands. This is exact for bfloat16, whose squares have twice as
    many bits, and has a relative error below 2^-18 for float16.
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
    """Compute rows of the product, float32 `[rows, batch]`.

    The first weights are prefetched into L2 before the previous kernel has ended. Operands of the
    tensor cores have the dtype of the activations. For float16 with a norm they are TF32 instead,
    which has as many mantissa bits and a larger range.
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
