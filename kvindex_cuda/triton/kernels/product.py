"""Product of a matrix with one vector. (For several vectors, `kernels/rows.py` is used.)

Each program computes some rows of the product. It reads their weights once, and is limited by
memory. Reference: `multiply` in `kvindex_cuda/triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous, bring_own
from kvindex_cuda.triton.kernels.rows import product_of_rows


@triton.jit
def read_weights(weight, rows, columns, N, K):
    """Load a tile of the matrix `[N, K]`, with zeros outside of the matrix."""
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    return tl.load(weight + rows[:, None].to(tl.int64) * K + columns[None, :], inside, other=0.0)


@triton.jit
def read_vectors(x, x_step, columns, batch, K, B, GATED: tl.constexpr):
    """Load activations as float32 `[columns, batch]`.

    If GATED, return `silu(gate) · up`. A vector in memory then consists of K numbers of `gate`,
    followed by K numbers of `up`.
    """
    inside = (columns[:, None] < K) & (batch[None, :] < B)
    at = x + batch[None, :] * x_step + columns[:, None]
    found = tl.load(at, inside, other=0.0).to(tl.float32)
    if GATED:
        found = found / (1.0 + tl.exp(-found)) * tl.load(at + K, inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def add_tile(sums, squares, weights, x, x_step, norm, columns, batch, K, B, GATED: tl.constexpr):
    """Multiply a tile of weights by activations and add the products to `sums`. Add the squares of
    the activations to `squares`, for RMS normalization."""
    found = read_vectors(x, x_step, columns, batch, K, B, GATED)
    if norm is not None:
        squares += found * found
        found = found * tl.load(norm + columns, columns < K, other=0.0).to(tl.float32)[:, None]
    sums += weights.to(tl.float32) * tl.trans(found)
    return sums, squares


@triton.jit
def product_of_one(
    x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of the weight matrix with one vector of activations. Return float32
    `[rows, 1]`.

    The first `AHEAD` tiles of weights are loaded before the previous kernel has ended, and are
    multiplied last. So the kernel starts to load the other tiles before it computes anything, and
    the memory is busy while the activations arrive. With EARLY, the other tiles are also prefetched
    before the previous kernel has ended.
    """
    columns = tl.arange(0, BLOCK_K)
    held = ()
    for i in tl.static_range(AHEAD):
        tile = read_weights(weight, rows, i * BLOCK_K + columns, N, K)
        held += (tile,)  # type: ignore[assignment]  # a tuple that grows is of no one type
    if EARLY and OVERLAP:
        bring_own(weight, N, K, rows.shape[0], AHEAD * BLOCK_K)
    after_previous(OVERLAP)
    sums = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K, 1], tl.float32)
    for first in tl.range(AHEAD * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        later = first + columns
        weights = read_weights(weight, rows, later, N, K)
        sums, squares = add_tile(sums, squares, weights, x, x_step, norm, later, batch, K, B, GATED)
    for i in tl.static_range(AHEAD):
        first = i * BLOCK_K + columns
        sums, squares = add_tile(sums, squares, held[i], x, x_step, norm, first, batch, K, B, GATED)
    sums = tl.sum(sums, 1)[:, None]
    if norm is not None:
        sums = sums * tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
    if scale is not None:
        sums = sums * tl.load(scale + rows, rows < N, other=0.0)[:, None]
    if bias is not None:
        sums = sums + tl.load(bias + rows, rows < N, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit
def product(
    x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
    BLOCK_K: tl.constexpr, SLICES: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of the weight matrix with one or several vectors of activations.

    The result is float32 `[rows, batch]`.
    """
    if batch.shape[0] == 1:
        return product_of_one(
            x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
            BLOCK_K, GATED, STAGES, AHEAD, EARLY, OVERLAP,
        )  # fmt: skip
    else:
        return product_of_rows(
            x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
            BLOCK_K, SLICES, GATED, STAGES, OVERLAP,
        )  # fmt: skip


@triton.jit
def multiply(
    x, x_step, norm, eps, weight, scale, bias, residual, residual_step, output, output_step,
    B, N, K,
    BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute `output[b] = residual[b] + weight · f(x[b])` for each sequence `b`.

    `f` applies RMS normalization if there is a norm, and computes `silu(gate) · up` if GATED. If
    PAIRED, the product `weight · f(x[b])` is replaced by `silu(first) · second`, where `first` and
    `second` are the products with the first and the second half of the rows of `weight`. The
    tensors `residual` and `output` may be the same. Grid: (N / BLOCK_N).
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIRED:
        HALF: tl.constexpr = BLOCK_N // 2
        within = tl.arange(0, BLOCK_N)
        rows = tl.program_id(0) * HALF + within % HALF + within // HALF * (N // 2)
    batch = tl.arange(0, BATCH)
    sums = product(
        x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
        BLOCK_K, SLICES, GATED, STAGES, AHEAD, EARLY, OVERLAP,
    )  # fmt: skip
    if PAIRED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, BATCH)), (1, 2, 0)))
        sums = gate / (1.0 + tl.exp(-gate)) * up
        rows = tl.program_id(0) * HALF + tl.arange(0, HALF)
        N = N // 2
    inside = (rows[:, None] < N) & (batch[None, :] < B)
    if residual is not None:
        at = residual + batch[None, :] * residual_step + rows[:, None]
        sums += tl.load(at, inside, other=0.0).to(tl.float32)
    at = output + batch[None, :] * output_step + rows[:, None]
    tl.store(at, sums.to(output.dtype.element_ty), inside)
