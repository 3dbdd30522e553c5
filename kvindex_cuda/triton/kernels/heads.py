"""Kernel for the queries, keys and values of one token per sequence: a matrix product,
normalization of heads, and the rotary embedding.

Several programs compute parts of the same head. The one that finishes last also normalizes and
rotates the head. Reference: `project_heads` in `kvindex_cuda/triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.product import product


@triton.jit
def rotate(source, cos, sin, norm, eps, target, inside, written, D: tl.constexpr):
    """Apply RMS normalization (if there is a norm) and the rotary embedding to one head of each
    sequence, and write the result.

    source, cos, sin, target: addresses `[batch, 1]`.
    inside: true for the sequences of the batch, false for padding.
    written: true for sequences whose result is stored.
    """
    HALF: tl.constexpr = triton.next_power_of_2(D // 2)
    pair = tl.arange(0, HALF)[None, :]
    half = pair < D // 2
    read, kept = half & inside, half & written
    # bypass L1, because other programs have written these values
    first = tl.load(source + pair, read, other=0.0, cache_modifier=".cg").to(tl.float32)
    second = tl.load(source + D // 2 + pair, read, other=0.0, cache_modifier=".cg").to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] / D + eps)
        first = first * factor * tl.load(norm + pair, half, other=0.0).to(tl.float32)
        second = second * factor * tl.load(norm + D // 2 + pair, half, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    cosine = tl.load(cos + pair, read, other=0.0).to(tl.float32)
    sine = tl.load(sin + pair, read, other=0.0).to(tl.float32)
    tl.store(target + pair, (first * cosine - second * sine).to(dtype), kept)
    cosine = tl.load(cos + D // 2 + pair, read, other=0.0).to(tl.float32)
    sine = tl.load(sin + D // 2 + pair, read, other=0.0).to(tl.float32)
    tl.store(target + D // 2 + pair, (second * cosine + first * sine).to(dtype), kept)


@triton.jit
def project_heads(
    x, x_step, norm, eps, weight, scale, bias, projected, tickets,
    cos, sin, angle_step, query_norm, query_eps, key_norm, key_eps, slots, queries, keys, values,
    key_batch, key_head, key_row, value_batch, value_head, value_row, B, N, K, C,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute queries, keys and values of one token per sequence, `projected[b] = weight · f(x[b])`
    with RMS normalization `f`, and write them to their tensors.

    Grid: (N / BLOCK_N). `D / BLOCK_N` programs compute a head, and a counter per head (`tickets`)
    counts those that have finished. The last of them rotates the head and writes it: a query to
    `queries`, a key or value to the sequence's slot. If a slot is not in 0 to `C - 1`, nothing is
    written to it. Reads the matrix once. Limited by memory.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, BATCH)
    sums = product(
        x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
        BLOCK_K, SLICES, False, STAGES, AHEAD, False, OVERLAP,
    )  # fmt: skip
    at = projected + batch[None, :] * N + rows[:, None]
    tl.store(at, sums.to(projected.dtype.element_ty), (rows[:, None] < N) & (batch[None, :] < B))
    tl.debug_barrier()  # all threads of this program have written
    head = tl.program_id(0) * BLOCK_N // D
    if tl.atomic_add(tickets + head, 1, sem="acq_rel") == D // BLOCK_N - 1:
        tl.store(tickets + head, 0)
        which = batch[:, None].to(tl.int64)
        inside = which < B
        source = projected + which * N + head * D
        slot = tl.load(slots + which, inside, other=-1)
        there = (slot >= 0) & (slot < C)
        at_cos, at_sin = cos + which * angle_step, sin + which * angle_step
        if head < H:
            query = queries + (which * H + head) * D
            rotate(source, at_cos, at_sin, query_norm, query_eps, query, inside, inside, D)
        elif head < H + G:
            key = keys + which * key_batch + (head - H).to(tl.int64) * key_head + slot * key_row
            rotate(source, at_cos, at_sin, key_norm, key_eps, key, inside, there, D)
        else:
            column = tl.arange(0, triton.next_power_of_2(D))[None, :]
            within = column < D
            value = tl.load(source + column, within & inside, other=0.0, cache_modifier=".cg")
            group = (head - H - G).to(tl.int64)
            target = values + which * value_batch + group * value_head + slot * value_row
            tl.store(target + column, value.to(values.dtype.element_ty), within & there)
