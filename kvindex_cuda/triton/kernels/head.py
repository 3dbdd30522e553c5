"""The output head with the sampler's first pass, and the second one over what that found."""

import triton
import triton.language as tl

from kvindex_cuda.triton.kernels.overlap import after_previous
from kvindex_cuda.triton.kernels.product import product

NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def head(
    x, x_step, norm, eps, weight, scale, bias, logits, logits_step, values, places, B, N, K,
    BATCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits, where there is room for them; the highest of each program's, as rounded, its id.

    A logit that is no number counts as infinite.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, BATCH)
    sums = product(
        x, x_step, norm, eps, weight, scale, bias, rows, batch, B, N, K,
        BLOCK_K, SLICES, False, STAGES, AHEAD, False, OVERLAP,
    )  # fmt: skip
    rounded = sums.to(x.dtype.element_ty)
    if logits is not None:
        at = logits + batch[None, :] * logits_step + rows[:, None]
        tl.store(at, rounded, (rows[:, None] < N) & (batch[None, :] < B))
    found = rounded.to(tl.float32)
    found = tl.where(found != found, float("inf"), found)
    found = tl.where(rows[:, None] < N, found, float("-inf"))
    highest = tl.max(found, 0)
    among = (found == highest[None, :]) & (rows[:, None] < N)
    place = tl.min(tl.where(among, rows[:, None], NOWHERE), 0)
    tl.store(values + batch * blocks + block, highest, batch < B)
    tl.store(places + batch * blocks + block, place, batch < B)


@triton.jit
def argmax(values, places, tokens, blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The place of the highest of a row's values, the lowest place of equals."""
    after_previous(OVERLAP)
    row = tl.program_id(0) * blocks
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], NOWHERE, tl.int32)
    for first in range(0, blocks, BLOCK):
        some = first + tl.arange(0, BLOCK)
        value = tl.load(values + row + some, some < blocks, other=float("-inf"))
        at = tl.load(places + row + some, some < blocks, other=NOWHERE)
        better = (value > best) | ((value == best) & (at < place))
        best, place = tl.where(better, value, best), tl.where(better, at, place)
    among = tl.where(best == tl.max(best, 0), place, NOWHERE)
    tl.store(tokens + tl.program_id(0), tl.min(among, 0).to(tl.int64))
