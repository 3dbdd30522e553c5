"""Attention of a prompt to chosen blocks of keys, and the choice of these blocks.

References: `kvindex/ops/block_sparse.py` for `attend_chosen`, `kvindex/selectors/pooled.py` for
`choose_by_mass`, and `kvindex/selectors/sampled.py` for `sum_blocks` and `choose_by_sums`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous

LOG2E = tl.constexpr(1.4426950408889634)

SIZES = ["first_block", "T", "N", "QB", "KB"]
"""Arguments that differ from chunk to chunk. Triton must not compile a kernel again when one of
them becomes a multiple of 16, or stops being one."""


@triton.jit(do_not_specialize=SIZES)
def choose_by_mass(
    scores, chosen, mass, first_block, QB, KB,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose blocks of keys by the softmax of one score per block.

    Grid: (QB, sequences · heads). A program reads the scores of one block of queries, `KB - 1`
    numbers, and writes `KB` bytes. `WIDE` is a power of two, at least `KB`.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * QB + tl.program_id(0)
    own = first_block + tl.program_id(0)
    block = tl.arange(0, WIDE)
    score = tl.load(scores + row * (KB - 1) + block, block < own, other=float("-inf"))
    weight = _softmax(score * LOG2E)
    keep = _largest(weight, mass, block, own)
    tl.store(chosen + row * KB + block, keep.to(tl.int8), block < KB)


@triton.jit(do_not_specialize=SIZES)
def sum_blocks(
    queries, key_blocks, sums, first_block, T, QB, KB, scale,
    query_batch, query_head, query_token,
    H: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    COUNT: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp (base 2) of the logits of some queries and each block of keys.

    Grid: (QB, sequences · G · TILES, splits). Of each block of queries, every `STEP`-th query is
    taken, `COUNT` of them. A program multiplies `ROWS` rows, the taken queries of some heads of one
    KV head, by its share of the blocks of keys before the own block, and reads each block once.
    `sums` is `[sequences · H, QB, COUNT, KB - 1]`.
    """
    after_previous(OVERLAP)
    group, part = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    batch, own = group // G, first_block + tl.program_id(0)
    pair = part * ROWS + tl.arange(0, ROWS)  # a head of the group, and a taken query
    head = group % G * GROUP + pair // COUNT
    asked = pair < GROUP * COUNT
    token = tl.program_id(0) * BLOCK + (pair % COUNT + 1) * STEP - 1
    token = tl.minimum(token, T - 1)
    column = tl.arange(0, WIDE)
    at = queries + batch.to(tl.int64) * query_batch + head.to(tl.int64)[:, None] * query_head
    at += token.to(tl.int64)[:, None] * query_token + column[None, :]
    q = tl.load(at, asked[:, None] & (column[None, :] < D), other=0.0)
    to = (batch * H + head).to(tl.int64) * QB + tl.program_id(0)
    to = sums + (to * COUNT + pair % COUNT) * (KB - 1)
    share = tl.cdiv(own, tl.num_programs(2))
    start = tl.program_id(2) * share
    for block in range(start, tl.minimum(start + share, own)):
        k = key_blocks.load([batch, group % G, block * BLOCK, 0]).reshape(BLOCK, WIDE)
        logits = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2E)
        peak = tl.max(logits, 1)
        total = tl.sum(tl.exp2(logits - peak[:, None]), 1)
        tl.store(to + block, peak + tl.log2(total), asked)


@triton.jit(do_not_specialize=SIZES)
def choose_by_sums(
    sums, chosen, mass, first_block, QB, KB,
    COUNT: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose blocks of keys by the mean attention weight that the taken queries give them.

    Grid: (QB, sequences · heads). A program reads the results of `sum_blocks` for one block of
    queries of one head, `COUNT` rows, and writes `KB` bytes.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * QB + tl.program_id(0)
    own = first_block + tl.program_id(0)
    block = tl.arange(0, WIDE)
    weight = tl.zeros([WIDE], tl.float32)
    for query in range(COUNT):
        at = sums + (row * COUNT + query) * (KB - 1) + block
        weight += _softmax(tl.load(at, block < own, other=float("-inf")))
    keep = _largest(weight, mass, block, own)
    tl.store(chosen + row * KB + block, keep.to(tl.int8), block < KB)


@triton.jit
def _softmax(score):
    """Return the softmax (base 2) of a row of scores, and zeros if all scores are `-inf`."""
    peak = tl.max(score, 0)
    weight = tl.exp2(score - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    return weight / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _largest(weight, mass, block, own):
    """Return which blocks to read: the smallest set of the largest weights whose sum is at least a
    fraction `mass` of all, and the blocks that are always read.

    The threshold of the weights is found bit by bit: the bits of a positive float32 number are
    ordered like the number. All weights that are at least the threshold are taken, so the set is
    the one that sorting finds. If a weight is NaN, all blocks before the own block are read.
    """
    before = block < own
    wrong = tl.sum((before & (weight != weight)).to(tl.int32), 0) > 0
    wanted = mass * tl.sum(weight, 0)
    bits = weight.to(tl.int32, bitcast=True)
    threshold = 0
    for step in range(31):
        higher = threshold | (1 << (30 - step))
        enough = tl.sum(tl.where(bits >= higher, weight, 0.0), 0) >= wanted
        threshold = tl.where(enough, higher, threshold)
    keep = before & ((bits >= threshold) | (mass >= 1.0) | wrong)
    return keep | (block == own) | (block == own - 1) | (block == 0)


@triton.jit(do_not_specialize=SIZES)
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


@triton.jit(do_not_specialize=SIZES)
def attend_chosen(
    queries, keys, values, key_blocks, value_blocks, listed, counts, output, lse, scale, T, N, KB,
    query_batch, query_head, query_token, key_batch, key_head, key_token,
    value_batch, value_head, value_token, output_batch, output_head, output_token,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDE: tl.constexpr, WIDE_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute attention of one block of queries of one head to the key blocks listed for it.

    Grid: (T / BLOCK, sequences · H). Later blocks of queries start first, because they read the
    most keys. The queries are the newest `T` of `N` tokens. A block of keys is read in `PIECES`
    tiles of `BLOCK_N` keys, by the tensor memory accelerator (`key_blocks` and `value_blocks`
    describe keys and values to it). Only the own block, which is listed last, needs the causal
    mask, and its tiles are read with plain loads.
    """
    after_previous(OVERLAP)
    pair, QB = tl.program_id(1), tl.num_programs(0)
    block = QB - 1 - tl.program_id(0)
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
