"""The kernels of a decode step that run before and after the layers of a model.

`begin_token` reads the embedding of each token and computes its rotary angles. `most_likely` finds
the token with the highest logit. References: the functions with the same names in
`triton/reference.py`.
"""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous

LAST = tl.constexpr(2**31 - 1)
"""The largest int32: the order of NaN, above that of every other float, and a mask for columns."""


@triton.jit
def begin_token(
    ids, id_step, positions, position_step, embedding, embedding_step, frequencies, factor,
    hidden, cos, sin, V, N, D: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the embedding and the rotary angles of one token per sequence.

    Grid: (1 + N / BLOCK, sequences). The first program of a sequence writes the angles. Each other
    program writes `BLOCK` columns of the embedding, or NaN if the token id is not in 0 to `V - 1`.
    """
    after_previous(OVERLAP)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if block == 0:
        pair = tl.arange(0, HALF)
        half = pair < D // 2
        position = tl.load(positions + row * position_step).to(tl.float32)
        angle = position * tl.load(frequencies + pair, half, other=0.0)
        cosine = (tl.cos(angle) * factor).to(cos.dtype.element_ty)
        sine = (tl.sin(angle) * factor).to(sin.dtype.element_ty)
        first, second = row * D + pair, row * D + D // 2 + pair
        tl.store(cos + first, cosine, half)
        tl.store(cos + second, cosine, half)
        tl.store(sin + first, sine, half)
        tl.store(sin + second, sine, half)
    else:
        token = tl.load(ids + row * id_step)
        known = (token >= 0) & (token < V)
        column = (block - 1) * BLOCK + tl.arange(0, BLOCK)
        at = embedding + tl.where(known, token, 0) * embedding_step + column
        found = tl.load(at, known & (column < N), other=float("nan"))
        tl.store(hidden + row * N + column, found, column < N)


@triton.jit
def most_likely(logits, step, scratch, tokens, V, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Find the token with the highest logit of each sequence.

    Grid: (V / BLOCK, sequences). Each program reduces `BLOCK` logits to one integer, which combines
    the highest logit and its column. The last program of a sequence to finish writes the token.

    scratch: `[B, 2]`, the highest integer so far and the number of finished programs. Both are 0
        before and after the launch.
    """
    after_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * step + column, column < V, other=float("-inf")).to(tl.float32)
    bits = tl.where(found == 0.0, 0.0, found).to(tl.int32, bitcast=True)  # −0 becomes 0
    order = tl.where(found != found, LAST, tl.where(bits < 0, bits ^ LAST, bits))
    # Pack each logit and its column into one integer. The upper bits contain the logit as a
    # non-negative number in the same order. The lower bits are larger for lower columns, so that
    # of equal logits the one in the lowest column is the maximum.
    highest = tl.max(((order.to(tl.int64) + LAST + 1) << 31) | (LAST - column), 0)
    best, ended = scratch + 2 * row, scratch + 2 * row + 1
    tl.atomic_max(best, highest, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(ended, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(ended, 0)
        tl.store(tokens + row, LAST - (tl.atomic_xchg(best, 0) & LAST))
