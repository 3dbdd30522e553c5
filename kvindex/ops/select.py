"""Select the entries with the highest scores. Of equal scores, the lower position comes first."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the `k` entries with the highest scores.

    Args:
        scores: Float32 `[..., N]`. Entries with a score of `-inf` are never selected.
        k: Number of entries.

    Returns:
        Scores, float32 `[..., k]`, descending, and positions of the entries, int64 `[..., k]`. If
        there are fewer than `k` entries, the unused slots contain `-inf` and -1.
    """
    kept = min(k, scores.shape[-1])
    positions = _best(_ordered(scores), kept)
    best = scores.gather(-1, positions)
    positions = positions.masked_fill(best == float("-inf"), UNUSED)
    missing = (0, k - kept)
    best = torch.nn.functional.pad(best, missing, value=float("-inf"))
    return best, torch.nn.functional.pad(positions, missing, value=UNUSED)


def candidates(votes: Tensor, limits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Select the candidates of a search: the keys with the best coarse scores (votes).

    In sequence `b`, each query head selects `limits[b]` keys. Of keys with equal scores, the lower
    id comes first. The candidates of a KV head are all keys that at least one of its query heads
    has selected.

    Args:
        votes: Scores from the coarse stage (votes), int32 `[B, G, g, N]`.
        limits: Number of keys per query head, int64 `[B]`, at most the number of valid keys.
        valid: Bool `[B, N]`, False for padding; None where no token is padded.

    Returns:
        Token ids of the candidates, int64 `[B, G, C]`, ascending, then -1.
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
    """Return the positions of the True entries of a mask.

    Args:
        chosen: Mask, bool `[..., N]`.

    Returns:
        Positions along the last dimension, int64 `[..., C]`, ascending, then -1. `C` is the largest
        number of True entries along this dimension.
    """
    rank = chosen.cumsum(-1)  # 1, 2, … at the True entries
    width = int(rank[..., -1].max()) if rank.numel() else 0
    ids = torch.full((*chosen.shape[:-1], width + 1), UNUSED, device=chosen.device)
    slots = torch.where(chosen, rank - 1, width)  # False entries go to a slot that is dropped
    position = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape)
    return ids.scatter_(-1, slots, position)[..., :width]


def _ordered(scores: Tensor) -> Tensor:
    """Map float32 scores to int32 numbers in the same order. -0.0 and 0.0 give the same number."""
    bits = (scores.float() + 0.0).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _best(scores: Tensor, k: int) -> Tensor:
    """Return the positions of the `k` largest int32 scores, the largest first.

    Among equal scores, the lower position comes first.
    """
    last = 2**32 - 1
    low_bits = last - torch.arange(scores.shape[-1], device=scores.device)
    keys = scores.long() * 2**32 + low_bits  # distinct, so that the result is unique
    return keys.topk(k, dim=-1).indices
