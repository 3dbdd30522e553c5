"""A matrix times two to 16 vectors at the rate of memory, on the matrix units.

Idea: a program has some of the matrix's rows. It cuts each tile of columns into as many slices as
it has warps, one product `[rows, slice] · [slice, batch]` each, and adds the slices at the end. So
each weight, and each activation, is converted by one warp, and tiles come by asynchronous copies.
Reads: the program's weights once, all activations.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous, bring_rows


@triton.jit
def read_weights(weight, rows, columns, N, K):
    """A tile `[slices, rows, slice]` of the matrix `[N, K]`, zeros outside."""
    inside = (rows[None, :, None] < N) & (columns[:, None, :] < K)
    at = weight + rows[None, :, None].to(tl.int64) * K + columns[:, None, :]
    return tl.load(at, inside, other=0.0)


@triton.jit
def read_vectors(x, x_step, columns, batch, K, B, GATED: tl.constexpr):
    """Activations float32 `[slices, slice, batch]`; gated: `silu` of the first K, times others."""
    inside = (columns[:, :, None] < K) & (batch[None, None, :] < B)
    at = x + batch[None, None, :] * x_step + columns[:, :, None]
    found = tl.load(at, inside, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * tl.load(at + K, inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def ones_as(weight, columns, never, dtype: tl.constexpr):
    """Ones `[slices, 16, slice]`, in the places of a product with weights of one byte, too.

    Triton lays out what a product with an FP8 matrix multiplies by what was loaded as FP8, and
    activations that two layouts ask for are not loaded ahead. So the ones are FP8 from a load, of
    columns from `never` on: of none.
    """
    if weight.dtype.element_ty == tl.float8e4nv:
        at = columns[:, None, :] + tl.zeros([1, 16, 1], tl.int32)
        ones = tl.load(weight + at, at >= never, other=1.0).to(tl.float32).to(dtype)
    else:
        ones = tl.full([columns.shape[0], 16, columns.shape[1]], 1.0, dtype)
    return ones


@triton.jit
def add_squares(ones, found, squares, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add the columns' squares to each of 16 equal rows of `squares`.

    They go through the matrix units, whose inputs activations become anyway, as two of their
    inputs: exact for bfloat16, whose squares have twice its bits, within 2^-18 for float16.
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
    """Rows of the product, float32 `[rows, batch]`; the first weights are in L2 before the wait.

    Inputs of the matrix units have the activations' dtype; for float16 with a norm they are TF32,
    which has its bits and a larger range.
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
