"""Compute the coarse scores (votes) of keys in the fused decode step, and their threshold.

Keys whose vote reaches the threshold can become candidates. The functions of this module are for
the option `coarse="sign_votes"`. They are the reference implementation of
`kvindex_cuda/kernels/common/votes.cuh`. The stages `prepare_query` and `scan` of `decode_step` call
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops import coarse, codes, group
from kvindex.ops.priority import STEP
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.step_state import BINS, LEAST, State, StepConfig, cut_of

SAMPLED = 4096
"""Number of sampled keys, whose votes determine the threshold: 128 runs of 32 adjacent keys."""

PLANES = {4: 5, 6: 21, 8: 85}
"""Number of digits in base -2 -> the largest `n` for which the digits represent `n` and `-n`."""


def planes_of(integers: Tensor, largest: int) -> Tensor:
    """Split integers into digits in base -2, uint8 `[..., digits, D]`.

    In this base, negative numbers also have only the digits 0 and 1, and need no sign.

    Args:
        integers: Int32 `[..., D]`.
        largest: Largest absolute value that `integers` may have. It determines the number of
            digits: 4, 6 or 8.

    Raises:
        ValueError: 8 digits are not enough for `largest`.
    """
    digits = next((count for count, most in PLANES.items() if largest <= most), None)
    if digits is None:
        most = max(PLANES.values())
        raise ValueError(f"query_max: got {largest}, allowed is up to {most}")
    places = torch.arange(digits, device=integers.device)[:, None]
    return (((integers + 0xAA) ^ 0xAA)[..., None, :] >> places & 1).to(torch.uint8)


def integers_of(planes: Tensor) -> Tensor:
    """Convert digits in base -2 back to integers, int32 `[..., D]`: the inverse of `planes_of`."""
    places = (-2) ** torch.arange(planes.shape[-2], device=planes.device)
    return (planes.int() * places[:, None].int()).sum(-2, dtype=torch.int32)


def center_products(queries: Tensor, state: State, config: StepConfig) -> Tensor:
    """Return the queries' inner products with the block centers, float32 `[B, G, S, g]`.

    The result is 0 if blocks have no centers.
    """
    folded = group.fold(queries, config.geometry.kv_heads, config.policy)
    blocks = -(-state.tokens // BLOCK)
    if not config.centered:
        return folded.new_zeros((*folded.shape[:2], blocks, folded.shape[2]))
    return config.layout.centers(state.codes[:, :blocks]).float() @ folded.mT


def votes_of(
    state: State, planes: Tensor, units: Tensor, products: Tensor, config: StepConfig
) -> Tensor:
    """Return the largest coarse score (vote) of each key over the query heads of its KV head.

    The result is int32 `[B, G, N]`.
    """
    return head_votes(state, planes, units, products, config).amax(2)


def head_votes(
    state: State, planes: Tensor, units: Tensor, products: Tensor, config: StepConfig
) -> Tensor:
    """Return the coarse score (vote) of each key for each query head, int32 `[B, G, g, N]`.

    The vote is `f Σ_j s_j r_j + o`. Here `s_j = ±1` are the key's signs, `r` is the rounded query,
    `f` is an integer proportional to the key's weight, and `o` is a term for the center of the
    key's block. The vote of a padded token is `LEAST`.
    """
    fields = config.layout.fields(state.codes, state.tokens)
    integers = integers_of(planes).float()
    table = coarse.dot_table(integers, config.largest)  # rounding leaves integers unchanged
    factors = codes.factors(fields["weights"], state.weight_scale, config.factors)
    scaled = (products * units[:, :, None]).nan_to_num(-(2.0**30))
    offsets = scaled.clamp(-(2**30), 2**30).round().int()
    votes = coarse.votes(fields["signs"], table, factors, offsets.mT, BLOCK)
    return votes.masked_fill(~state.flags[:, None, None], LEAST)


def sample_of(votes: Tensor) -> Tensor:
    """Pick the coarse scores (votes) of `SAMPLED` keys, int32 `[..., SAMPLED]`.

    The keys are 128 runs of 32 adjacent keys, spread evenly over the blocks. `votes` are the scores
    of all keys, `[..., N]`.
    """
    blocks = -(-votes.shape[-1] // BLOCK)
    i = torch.arange(SAMPLED // 32, device=votes.device)
    part = i * 3 % 8 if blocks < len(i) else (i * 2654435761 & 0xFFFFFFFF) >> 29
    first = blocks * i // len(i) * BLOCK + part * 32
    ids = (first[:, None] + torch.arange(32, device=votes.device)).flatten()
    padded = torch.nn.functional.pad(votes, (0, blocks * BLOCK - votes.shape[-1]), value=LEAST)
    return padded[..., ids]


def thresholds_of(sample: Tensor, state: State, config: StepConfig) -> dict[str, Tensor]:
    """Choose a threshold for the coarse scores (votes) of keys, and the bins of a histogram.

    Args:
        sample: Votes of sampled keys, int32 `[B, G, SAMPLED]`. If the search samples rows, `sample`
            contains priorities instead, and thresholds are multiples of `priority.STEP`.
        state: Inputs of the decode step.
        config: Constants of the decode step.

    Returns:
        The attributes `thresholds`, `bases` and `shifts` of `decode_step.Prepared`.
    """
    wanted, counted = state.wanted.tolist(), state.counted.tolist()
    find = _sampled_threshold if config.sampled else _threshold
    rows = [
        find(votes[votes != LEAST].long(), wanted[b], counted[b])
        for b, heads in enumerate(sample)
        for votes in heads
    ]
    found = torch.tensor(rows, dtype=torch.int32, device=sample.device)
    names = ("thresholds", "bases", "shifts")
    return dict(zip(names, found.view(*sample.shape[:2], 3).unbind(-1), strict=True))


def _threshold(votes: Tensor, wanted: int, counted: int) -> tuple[int, int, int]:
    """Choose a threshold for coarse scores (votes) that somewhat more than `wanted` keys reach.

    The threshold is chosen from the votes of a sample of the keys. Let `m` be the expected number
    of sampled keys among the best `wanted` of all keys. The threshold is a vote that about
    `m + 9 √m` sampled keys reach. The margin `9 √m` is this large because adjacent keys are
    similar: the number of sampled keys among the best varies about twice as much as it would for
    independent keys.

    Args:
        votes: Votes of the sampled keys that are valid, int64 `[found]`.
        wanted: Number of candidates.
        counted: Number of valid keys.

    Returns:
        The threshold, and `base` and `shift` of the histogram of votes (`step_state.bin_of`).
    """
    found = len(votes)
    low, top = (int(votes.min()), int(votes.max())) if found else (0, 0)
    mean = (torch.tensor(float(wanted)) * found / max(counted, 1)).floor()
    rank = int(mean + 9 * mean.sqrt()) + 8
    if rank >= found:
        return LEAST + 1, low, _shift(top - low)
    base, width, above = low, top - low, 0
    while True:  # refine the histogram of one bin until the bin has few votes
        shift = _shift(width)
        inside = votes[(votes >= base) & (votes <= base + width)] - base
        histogram = torch.bincount(inside >> shift, minlength=BINS)
        cut, more = (int(part) for part in cut_of(histogram, torch.tensor(rank - above)))
        base, above = base + (cut << shift), above + more
        if shift == 0 or histogram[cut] <= 16 + rank // 8:
            return base, base, _shift(top - base)
        width = (1 << shift) - 1


def _sampled_threshold(votes: Tensor, wanted: int, counted: int) -> tuple[int, int, int]:
    """Choose a threshold for priorities that somewhat more than `wanted` keys reach.

    This replaces `_threshold` in a search that samples. The argument `votes` contains priorities
    instead of coarse scores (votes), and the threshold is a multiple of `priority.STEP`.
    """
    threshold, base, _ = _threshold(votes, wanted, counted)
    base = base // STEP * STEP
    return base if threshold > LEAST + 1 else threshold, base, _shift(STEP * BINS - 1)


def _shift(width: int) -> int:
    """Return by how many bits numbers from 0 to `width` must be shifted to the right, so that the
    results are below `BINS`.
    """
    return max(0, width.bit_length() - 11)
