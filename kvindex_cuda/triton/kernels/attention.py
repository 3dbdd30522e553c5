"""Attention of several tokens or of one token to rows (key and value of a token), with a running
softmax over tiles of rows.

References: `attend_pages` and `attend_token` in `kvindex_cuda/triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_pages(
    queries, table, table_step, lengths, length_step, flags, flag_step, parts, lse, scale, T,
    next_head, next_token, head_step, row_step, begin, slot,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, CAUSAL: tl.constexpr, FLAGS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute attention of the newest tokens of sequences to rows that are stored in pages.

    Grid: (pairs / BLOCK_M, sequences · G, SPLITS). A program processes `BLOCK_M` pairs of a token
    and a query head of one group. The rows that its tokens may attend to are divided into `SPLITS`
    parts, of which it reads one. It writes `DV` numbers and the log-sum-exp (lse) to base 2 per
    pair, to one of `SLOTS` slots, from `slot` on; with a single slot, the natural logarithm.
    Programs for the last tokens start first, because they read the most rows. The first `begin`
    rows are left out.

    From a query to that of the next head or token there are `next_head` or `next_token` queries.
    The arguments `*_step` are strides in elements, not bytes. A page whose address is 0 contains no
    rows. With `FLAGS` above 0, an element of `flags` has the flags of that many rows in its lowest
    bits, and rows whose flag is 0 are left out, too. Their numbers must be finite.
    """
    after_previous(OVERLAP)
    pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, group = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    token, asked = pair // GROUP, pair < T * GROUP
    head = group * GROUP + pair % GROUP
    query = batch * (G * GROUP * T) + head * next_head + token * next_token
    column, value_column = tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    inside = asked[:, None] & (column[None, :] < D)
    q = tl.load(queries + query[:, None] * D + column[None, :], inside, other=0.0)
    length = tl.load(lengths + batch * length_step).to(tl.int32)
    end = tl.zeros([BLOCK_M], tl.int32) + length
    if CAUSAL:
        end = length - T + 1 + token
    end = tl.where(asked, end, 0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDE_V], tl.float32)
    last = tl.minimum(tl.max(end, 0), length)
    piece = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK_N) * BLOCK_N
    start = tl.program_id(2) * piece
    for first in range(start, tl.minimum(start + piece, last), BLOCK_N):
        address = tl.load(table + batch * table_step + first // PAGE)
        page = address.to(tl.pointer_type(queries.dtype.element_ty))
        page = tl.multiple_of(page, 16) + group.to(tl.int64) * head_step
        row = first + tl.arange(0, BLOCK_N)
        there = (row >= begin) & (row < length) & (address != 0)
        at = page + (row % PAGE) * row_step
        k = tl.load(
            at[None, :] + column[:, None], there[None, :] & (column[:, None] < D), other=0.0
        )
        logits = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        seen = there[None, :] & (row[None, :] < end[:, None])
        if FLAGS:  # rows are loaded whatever their flag is, so that the loads need not wait for it
            flag = tl.load(flags + batch * flag_step + row // FLAGS, there, other=0)
            seen = seen & ((flag.to(tl.int32) >> (row % FLAGS)) & 1 != 0)[None, :]
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
    to = query * SLOTS + slot + tl.program_id(2)
    at = parts + to[:, None] * DV + value_column[None, :]
    tl.store(at, sums.to(parts.dtype.element_ty), asked[:, None] & (value_column[None, :] < DV))
    found = peak + tl.log2(total)
    tl.store(lse + to, found if SLOTS > 1 else found / LOG2E, asked)


@triton.jit
def attend_split(
    queries, keys, values, starts, ends, end_step, parts, lse, scale,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute attention of one query token per sequence to one part of the sequence's rows.

    The rows (keys and values) are divided into `SPLITS` parts, and a program processes one part.
    The kernel `merge_splits` merges the results of all parts.

    Grid: (SPLITS, sequences · G). Reads each row once. Writes, for each head and part, the output
    (float32) and the log-sum-exp to base 2.
    """
    after_previous(OVERLAP)
    batch, group = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    start, end = tl.load(starts + batch), tl.load(ends + batch * end_step)
    piece = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), SPLITS), BLOCK_N) * BLOCK_N
    first = start + tl.program_id(0) * piece
    last = tl.minimum(first + piece, end)
    head, column, value_column = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    asked = (batch * G + group) * GROUP + head
    inside = (head[:, None] < GROUP) & (column[None, :] < D)
    q = tl.load(queries + asked[:, None] * D + column[None, :], inside, other=0.0)
    from_key = keys + batch * key_batch + group * key_head
    from_value = values + batch * value_batch + group * value_head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDE_V], tl.float32)
    for begin in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        row = begin + tl.arange(0, BLOCK_N)
        there = row < last
        at = from_key + row[None, :] * key_row + column[:, None]
        k = tl.load(at, there[None, :] & (column[:, None] < D), other=0.0)
        at = from_value + row[:, None] * value_row + value_column[None, :]
        v = tl.load(at, there[:, None] & (value_column[None, :] < DV), other=0.0)
        logits = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        logits = tl.where(there[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = asked * SPLITS + tl.program_id(0)
    inside = (head[:, None] < GROUP) & (value_column[None, :] < DV)
    tl.store(parts + to[:, None] * DV + value_column[None, :], sums, inside)
    tl.store(lse + to, peak + tl.log2(total), head < GROUP)


@triton.jit
def merge_splits(
    parts, lse, output, merged_lse, DV: tl.constexpr, WIDE_V: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the outputs of all splits of a query.

    Grid: (queries). Reads `SPLITS` outputs and log-sum-exp values to base 2; writes one output, and
    the natural log-sum-exp unless `merged_lse` is None.
    """
    after_previous(OVERLAP)
    head = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDE_V)
    each = tl.load(lse + head * SPLITS + split)
    peak = tl.max(each, 0)
    weights = tl.exp2(each - tl.where(peak == float("-inf"), 0.0, peak))
    at = parts + (head * SPLITS + split[:, None]) * DV + column[None, :]
    found = tl.load(at, column[None, :] < DV, other=0.0) * weights[:, None]
    total = tl.sum(weights, 0)
    merged = tl.sum(found, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + head * DV + column, merged.to(output.dtype.element_ty), column < DV)
    if merged_lse is not None:
        tl.store(merged_lse + head, (peak + tl.log2(total)) / LOG2E)
