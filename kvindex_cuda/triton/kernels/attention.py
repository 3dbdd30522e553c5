"""Attention of many queries over pages of rows: a running softmax over tiles of one page each."""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_prompt(
    queries, table, table_step, lengths, output, lse, scale, T, head_step, row_step,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`BLOCK_M` pairs of token and head of one group, the last tokens first: they read most.

    Steps are in numbers, not bytes. A page at address 0 holds no rows.
    """
    after_previous(OVERLAP)
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, group = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    token, asked = pair // GROUP, pair < T * GROUP
    query = ((batch * G + group) * GROUP + pair % GROUP) * T + token
    column, value_column = tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    inside = asked[:, None] & (column[None, :] < D)
    q = tl.load(queries + query[:, None] * D + column[None, :], inside, other=0.0)
    length = tl.load(lengths + batch).to(tl.int32)
    end = tl.zeros([BLOCK_M], tl.int32) + length
    if CAUSAL:
        end = length - T + 1 + token
    end = tl.where(asked, end, 0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDE_V], tl.float32)
    for first in range(0, tl.minimum(tl.max(end, 0), length), BLOCK_N):
        address = tl.load(table + batch * table_step + first // PAGE)
        page = address.to(tl.pointer_type(queries.dtype.element_ty))
        page = tl.multiple_of(page, 16) + group.to(tl.int64) * head_step
        row = first + tl.arange(0, BLOCK_N)
        there = (row < length) & (address != 0)
        at = page + (row % PAGE) * row_step
        k = tl.load(
            at[None, :] + column[:, None], there[None, :] & (column[:, None] < D), other=0.0
        )
        logits = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        seen = there[None, :] & (row[None, :] < end[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(peak - base)
        visible = there[:, None] & (value_column[None, :] < DV)
        v = tl.load(at[:, None] + D + value_column[None, :], visible, other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = output + query[:, None] * DV + value_column[None, :]
    tl.store(at, sums.to(output.dtype.element_ty), asked[:, None] & (value_column[None, :] < DV))
    tl.store(lse + query, (peak + tl.log2(total)) / LOG2E, asked)
