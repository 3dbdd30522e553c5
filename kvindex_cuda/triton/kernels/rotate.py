"""Rotary embedding: a program has one head of one sequence."""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import let_next_begin, wait_for_previous


@triton.jit
def rotate(
    source, cos, sin, norm, eps, target, inside, D: tl.constexpr, HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalize a head's `D` coordinates where there is a norm, rotate them, and write them.

    The source alone is of the launch before.
    """
    pair = tl.arange(0, HALF)
    half = pair < D // 2
    cos_first = tl.load(cos + pair, half, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + D // 2 + pair, half, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + pair, half, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + D // 2 + pair, half, other=0.0).to(tl.float32)
    if norm is not None:
        norm_first = tl.load(norm + pair, half, other=0.0).to(tl.float32)
        norm_second = tl.load(norm + D // 2 + pair, half, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    first = tl.load(source + pair, half, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + pair, half, other=0.0).to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(first * first + second * second, 0) / D + eps)
        first = first * factor * norm_first
        second = second * factor * norm_second
    dtype = target.dtype.element_ty
    rotated = first * cos_first - second * sin_first
    tl.store(target + pair, rotated.to(dtype), half & inside)
    rotated = second * cos_second + first * sin_second
    tl.store(target + D // 2 + pair, rotated.to(dtype), half & inside)


@triton.jit
def rotate_heads(
    projected, projected_step, cos, sin, angle_step, query_norm, query_eps, key_norm, key_eps,
    slots, queries, keys, values, key_batch, key_head, key_row, value_batch, value_head, value_row,
    C, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Heads of queries, then of keys, then of values; a slot outside `C` rows writes nothing.

    The next launch may begin at once: it waits for this one's end, and what it reads before that is
    older than the launch before this one, which has waited itself before it let this one begin.
    """
    let_next_begin(OVERLAP)
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = projected + batch * projected_step
    cos, sin = cos + batch * angle_step, sin + batch * angle_step
    slot = tl.load(slots + batch)
    inside = (slot >= 0) & (slot < C)
    slot = tl.where(inside, slot, 0)
    if head < H:
        target = queries + (batch * H + head) * D
        rotate(source + head * D, cos, sin, query_norm, query_eps, target, True, D, HALF, OVERLAP)
    elif head < H + G:
        target = keys + batch * key_batch + (head - H).to(tl.int64) * key_head + slot * key_row
        rotate(source + head * D, cos, sin, key_norm, key_eps, target, inside, D, HALF, OVERLAP)
    else:
        group = (head - H - G).to(tl.int64)
        column = tl.arange(0, WIDE)
        wait_for_previous(OVERLAP)
        value = tl.load(source + (H + G) * D + group * DV + column, column < DV, other=0.0)
        target = values + batch * value_batch + group * value_head + slot * value_row
        tl.store(target + column, value.to(values.dtype.element_ty), (column < DV) & inside)
