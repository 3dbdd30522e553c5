"""Attention of a prompt to chosen blocks of keys, and the choice of these blocks.

References: `kvindex/ops/block_sparse.py` for `attend_chosen`, and `kvindex/selectors/pooled.py` for
`choose_by_mass`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def choose_by_mass(
    scores, chosen, mass, first_block, QB, KB,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose the smallest set of key blocks with the largest softmax weights whose sum reaches
    `mass`.

    Grid: (QB, sequences · heads). A program reads the scores of one block of queries, `KB - 1`
    numbers, and writes `KB` bytes. `WIDE` is `KB`, rounded up to a power of two. The threshold of
    the weights is found bit by bit: the bits of a positive float32 number are ordered like the
    number. The set contains all weights that are at least the threshold. So it is the set that
    sorting finds, if equal weights at the threshold are all taken.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * QB + tl.program_id(0)
    own = first_block + tl.program_id(0)
    block = tl.arange(0, WIDE)
    before = block < own
    score = tl.load(scores + row * (KB - 1) + block, before, other=float("-inf"))
    peak = tl.max(score, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    wrong = tl.sum((before & (score != score)).to(tl.int32), 0) > 0  # NaN: read all blocks
    weight = tl.where(before, tl.exp2((score - peak) * LOG2E), 0.0)
    wanted = mass * tl.sum(weight, 0)
    bits = weight.to(tl.int32, bitcast=True)
    threshold = 0
    for step in range(31):
        higher = threshold | (1 << (30 - step))
        enough = tl.sum(tl.where(bits >= higher, weight, 0.0), 0) >= wanted
        threshold = tl.where(enough, higher, threshold)
    keep = before & ((bits >= threshold) | (mass >= 1.0) | wrong)
    keep = keep | (block == own) | (block == own - 1) | (block == 0)
    tl.store(chosen + row * KB + block, keep.to(tl.int8), block < KB)


@triton.jit
def list_chosen(
    chosen, listed, counts, KB, first_block, QB,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """List the chosen key blocks of each block of queries, in ascending order.

    Grid: (QB, sequences · heads). Reads `KB` bytes, and writes the numbers of the chosen blocks to
    `listed`, `KB` numbers per block of queries, and how many they are to `counts`. Blocks after the
    own block are not listed.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * QB + tl.program_id(0)
    block = tl.arange(0, WIDE)
    inside = block <= first_block + tl.program_id(0)
    keep = (tl.load(chosen + row * KB + block, inside, other=0) != 0).to(tl.int32)
    place = tl.cumsum(keep, 0) - keep
    tl.store(listed + row * KB + place, block, keep != 0)
    tl.store(counts + row, tl.sum(keep, 0))


@triton.jit
def attend_chosen(
    queries, keys, values, key_blocks, value_blocks, listed, counts, output, lse, scale, T, N, KB,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, output_batch, output_head, output_token,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDE: tl.constexpr, WIDE_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, HEADS_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute attention of one block of queries of one head to the key blocks listed for it.

    Grid: (T / BLOCK, sequences · H). Later blocks of queries start first, because they read the
    most keys. The queries are the newest `T` of `N` tokens. A block of keys is read in `PIECES`
    tiles of `BLOCK_N` keys, by the tensor memory accelerator (`key_blocks` and `value_blocks`
    describe keys and values to it). Only the own block, which is listed last, needs the causal
    mask, and its tiles are read with plain loads.
    """
    after_previous(OVERLAP)
    if HEADS_FIRST:
        pair, block, QB = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    else:
        pair, block, QB = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    block = QB - 1 - block
    batch, head = (pair // H).to(tl.int64), pair % H
    group = (head // GROUP).to(tl.int64)
    row = pair.to(tl.int64) * QB + block
    listed += row * KB
    count = tl.load(counts + row)
    own = (N - T) // BLOCK + block

    inner, column, value_column = tl.arange(0, BLOCK), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    token = block * BLOCK + inner
    asked = token < T
    q = queries + batch * query_batch + head.to(tl.int64) * query_head
    q = tl.load(
        q + token[:, None].to(tl.int64) * query_token + column[None, :],
        asked[:, None] & (column[None, :] < D),
        other=0.0,
    )
    keys += batch * key_batch + group * key_head
    values += batch * value_batch + group * value_head
    factor = scale * LOG2E

    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDE_V], tl.float32)
    last = tl.load(listed + tl.maximum(count - 1, 0))
    whole = tl.where((count > 0) & (last == own), count - 1, count)
    tile = tl.arange(0, BLOCK_N)
    for step in range(0, whole * PIECES):
        start = tl.load(listed + step // PIECES) * BLOCK + (step % PIECES) * BLOCK_N
        place = [batch.to(tl.int32), group.to(tl.int32), start, 0]
        k = key_blocks.load(place).reshape(BLOCK_N, WIDE)
        logits = tl.dot(q, k.T, input_precision="ieee")
        new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
        weights = tl.exp2(logits * factor - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = value_blocks.load(place).reshape(BLOCK_N, WIDE_V)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    for piece in range(0, tl.where(whole < count, PIECES, 0)):
        at = own * BLOCK + piece * BLOCK_N + tile
        there = at < N
        place = at.to(tl.int64)
        k = tl.load(
            keys + place[None, :] * key_token + column[:, None],
            there[None, :] & (column[:, None] < D),
            other=0.0,
        )
        logits = tl.dot(q, k, input_precision="ieee") * factor
        seen = there[None, :] & (at[None, :] - own * BLOCK <= inner[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(peak - base)
        v = tl.load(
            values + place[:, None] * value_token + value_column[None, :],
            there[:, None] & (value_column[None, :] < DV),
            other=0.0,
        )
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to = output + batch * output_batch + head.to(tl.int64) * output_head
    to += token[:, None].to(tl.int64) * output_token + value_column[None, :]
    tl.store(to, sums.to(output.dtype.element_ty), asked[:, None] & (value_column[None, :] < DV))
    sum_at = lse + pair.to(tl.int64) * T + token
    tl.store(sum_at, (peak + tl.log2(total)) / LOG2E, asked)
