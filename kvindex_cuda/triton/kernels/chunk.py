"""Element-wise parts of a layer of a language model, for all tokens of a chunk of a prompt.

References: `rotate_heads` and `swiglu` in `kvindex_cuda/triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous


@triton.jit
def rotate_heads(
    query, key, value, query_in_batch, query_in_token, key_in_batch, key_in_token,
    value_in_batch, value_in_token, cos, sin, angle_batch, angle_token,
    query_norm, query_eps, key_norm, key_eps,
    queries, query_batch, query_head, query_token, keys, key_batch, key_head, key_token,
    values, value_batch, value_head, value_token, T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads of queries and keys, and copy those of values.

    Grid: (T / BLOCK, H + 2 G, B). A program processes one head of `BLOCK` tokens. It reads and
    writes each number once. The arguments `*_in_*` are the strides, in elements, of the tensors
    that it reads. `WIDE` is half of the head dimension, rounded up to a power of two.
    """
    after_previous(OVERLAP)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    angle = batch * angle_batch + token * angle_token
    if head < H:
        come = query + batch * query_in_batch + token * query_in_token + head * D
        to = queries + batch * query_batch + head.to(tl.int64) * query_head + token * query_token
        _rotated(come, to, cos + angle, sin + angle, query_norm, query_eps, token < T, D, WIDE)
    elif head < H + G:
        own = head - H
        come = key + batch * key_in_batch + token * key_in_token + own * D
        to = keys + batch * key_batch + own.to(tl.int64) * key_head + token * key_token
        _rotated(come, to, cos + angle, sin + angle, key_norm, key_eps, token < T, D, WIDE)
    else:
        own = head - H - G
        come = value + batch * value_in_batch + token * value_in_token + own * D
        to = values + batch * value_batch + own.to(tl.int64) * value_head + token * value_token
        column = tl.arange(0, 2 * WIDE)[None, :]
        inside = (token < T) & (column < D)
        tl.store(to + column, tl.load(come + column, inside), inside)


@triton.jit
def _rotated(
    come, to, cos, sin, norm, eps, there, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Normalize (if `norm` is not None) and rotate heads `[BLOCK, D]`. Write them to `to`."""
    HALF: tl.constexpr = D // 2
    column = tl.arange(0, WIDE)[None, :]
    inside = there & (column < HALF)
    first = tl.load(come + column, inside, other=0.0).to(tl.float32)
    second = tl.load(come + HALF + column, inside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        first *= factor * tl.load(norm + column, column < HALF, other=0.0).to(tl.float32)
        second *= factor * tl.load(norm + HALF + column, column < HALF, other=0.0).to(tl.float32)
    # both halves of a head have the same angles, but they are read apart, as the reference does
    cos_1 = tl.load(cos + column, inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + HALF + column, inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + column, inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + HALF + column, inside, other=0.0).to(tl.float32)
    dtype = to.dtype.element_ty
    tl.store(to + column, (first * cos_1 - second * sin_1).to(dtype), inside)
    tl.store(to + HALF + column, (second * cos_2 + first * sin_2).to(dtype), inside)


@triton.jit
def swiglu(
    gate, up, gate_row, up_row, output, N,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute `silu(gate) · up` of rows with `N` numbers.

    Grid: (N / BLOCK, rows). `gate_row` and `up_row` are strides in elements.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(gate + row * gate_row + column, inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + column, inside, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-x)) * y
    tl.store(output + row * N + column, result.to(output.dtype.element_ty), inside)
