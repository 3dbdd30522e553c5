"""A matrix times a few vectors: each program has some of the matrix's rows, and all vectors."""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous, bring


@triton.jit
def read_weights(weight, rows, columns, N, K):
    """A tile `[rows, columns]` of the matrix `[N, K]`, zeros outside."""
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    return tl.load(weight + rows[:, None].to(tl.int64) * K + columns[None, :], inside, other=0.0)


@triton.jit
def read_vectors(x, x_step, columns, batch, K, B, GATED: tl.constexpr):
    """Activations float32 `[columns, batch]`; gated: `silu` of the first K, times the others."""
    inside = (columns[:, None] < K) & (batch[None, :] < B)
    at = x + batch[None, :] * x_step + columns[:, None]
    found = tl.load(at, inside, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * tl.load(at + K, inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def add_tile(sums, squares, weights, x, x_step, norm, columns, batch, K, B, GATED: tl.constexpr):
    """Add a tile's products to `sums`, and its activations' squares to `squares`.

    One vector: an entry of `sums` for each weight. More: the matrix units', `[rows, batch]`. For
    float16 with a norm their inputs are TF32, which has its bits and a larger range.
    """
    found = read_vectors(x, x_step, columns, batch, K, B, GATED)
    if norm is not None:
        squares += found * found
        found = found * tl.load(norm + columns, columns < K, other=0.0).to(tl.float32)[:, None]
    if batch.shape[0] == 1:
        sums += weights.to(tl.float32) * tl.trans(found)
    elif x.dtype.element_ty == tl.float32:
        sums = tl.dot(weights.to(tl.float32), found, sums, input_precision="ieee")
    elif x.dtype.element_ty == tl.float16 and norm is not None:
        sums = tl.dot(weights.to(tl.float32), found, sums, input_precision="tf32")
    else:
        dtype = x.dtype.element_ty
        sums = tl.dot(weights.to(dtype), found.to(dtype), sums)
    return sums, squares


@triton.jit
def product(
    x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of the product, float32 `[rows, batch]`; the first weights are read before the wait."""
    columns = tl.arange(0, BLOCK_K)
    weights = read_weights(weight, rows, columns, N, K)
    after_previous(OVERLAP)
    one: tl.constexpr = batch.shape[0] == 1
    sums = tl.zeros([rows.shape[0], BLOCK_K if one else batch.shape[0]], tl.float32)
    squares = tl.zeros([BLOCK_K, batch.shape[0]], tl.float32)
    sums, squares = add_tile(sums, squares, weights, x, x_step, norm, columns, batch, K, B, GATED)
    for first in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        later = first + columns
        weights = read_weights(weight, rows, later, N, K)
        sums, squares = add_tile(sums, squares, weights, x, x_step, norm, later, batch, K, B, GATED)
    if one:
        sums = tl.sum(sums, 1)[:, None]
    if norm is not None:
        sums = sums * tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if scale is not None:
        sums = sums * tl.load(scale + rows, rows < N, other=0.0)[:, None]
    if bias is not None:
        sums = sums + tl.load(bias + rows, rows < N, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def multiply(
    x, x_step, norm, eps, weight, scale, bias, residual, residual_step, output, output_step,
    ahead, B, N, K,
    AHEAD_LINES: tl.constexpr, BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`output[b] = residual[b] + weight · f(x[b])`; the residual may be the output."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, BATCH)
    sums = product(
        x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
        BLOCK_K, GATED, STAGES, OVERLAP,
    )  # fmt: skip
    bring(ahead, AHEAD_LINES, 128)
    inside = (rows[:, None] < N) & (batch[None, :] < B)
    if residual is not None:
        at = residual + batch[None, :] * residual_step + rows[:, None]
        sums += tl.load(at, inside, other=0.0).to(tl.float32)
    at = output + batch[None, :] * output_step + rows[:, None]
    tl.store(at, sums.to(output.dtype.element_ty), inside)
