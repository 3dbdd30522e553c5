"""Select the best entries or candidates by score. Equal scores go to the lower id."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the `k` best entries.

    Args:
        scores: Float32 `[..., N]`; entries of `-inf` are never selected.
        k: Number of entries.

    Returns:
        Scores float32 `[..., k]`, descending, and positions int64 `[..., k]`. Where fewer than `k`
        entries are left, the unused places have `-inf` and -1.
    """
    kept = min(k, scores.shape[-1])
    positions = _best(_ordered(scores), kept)
    best = scores.gather(-1, positions)
    positions = positions.masked_fill(best == float("-inf"), UNUSED)
    missing = (0, k - kept)
    best = torch.nn.functional.pad(best, missing, value=float("-inf"))
    return best, torch.nn.functional.pad(positions, missing, value=UNUSED)


def candidates(votes: Tensor, limits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Select the keys that any query head of a group wants, by votes.

    Each head takes its `limits[b]` keys with the most votes; equal votes go to the lower id.

    Args:
        votes: Int32 `[B, G, g, N]`.
        limits: Int64 `[B]`, at most the number of valid keys of each sequence.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Ids int64 `[B, G, C]`, ascending, padded with -1.
    """
    if valid is not None:
        votes = votes.masked_fill(~valid[:, None, None], torch.iinfo(torch.int32).min)
    most = int(limits.max())
    positions = _best(votes, most)  # [B, G, g, most]
    taken = torch.arange(most, device=votes.device) < limits[:, None].to(votes.device)
    chosen = torch.zeros(votes.shape, dtype=torch.bool, device=votes.device)
    chosen.scatter_(-1, positions, taken[:, None, None].expand_as(positions))
    return compact(chosen.any(2))


def compact(chosen: Tensor) -> Tensor:
    """List the positions of the True entries.

    Args:
        chosen: Bool `[..., N]`.

    Returns:
        Int64 `[..., C]`, ascending, padded with -1. `C` is the largest number of True entries of
        any list.
    """
    rank = chosen.cumsum(-1)  # 1, 2, … at the True entries
    width = int(rank[..., -1].max()) if rank.numel() else 0
    ids = torch.full((*chosen.shape[:-1], width + 1), UNUSED, device=chosen.device)
    slots = torch.where(chosen, rank - 1, width)  # False entries go to a slot that is dropped
    position = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    return ids.scatter_(-1, slots, position)[..., :width]


def _ordered(scores: Tensor) -> Tensor:
    """Map float32 scores to int32 numbers with the same order; -0 and 0 give the same."""
    bits = (scores.float() + 0.0).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _best(scores: Tensor, k: int) -> Tensor:
    """Return positions of the `k` largest int32 scores, best first, ties by the lower position."""
    last = 2**32 - 1
    low_bits = last - torch.arange(scores.shape[-1], device=scores.device)
    keys = scores.long() * 2**32 + low_bits  # distinct, so that top-k has one answer
    return keys.topk(k, dim=-1).indices
