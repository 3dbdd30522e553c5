"""Centers of keys: quantized rows encode the difference of a key from a center.

All keys of a head can have a large common part, for example from the bias of a projection. It makes
codes less accurate, but does not change attention, because a softmax ignores what is added to all
logits. So a store with such a codec (`is_centered`) encodes `key - center`, computed in float32,
and stores one center per head. The first append to an empty store determines the center, and later
appends do not change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry

CENTER_TOKENS = 16
"""Number of keys whose mean is the center. docs/decisions/0051 explains the number."""


class JoinedRows(dict[str, Tensor]):
    """Encoded rows as tensors by name, as `RowStore.join` returns them.

    center: the center that an empty store should take; None for zeros.
    """

    center: Tensor | None = None


def is_centered(codec: str, geometry: Geometry) -> bool:
    """Return whether a codec encodes keys relative to a center.

    Plain rows are not relative to a center. Latents are not either, because their keys contain
    their values.
    """
    return codec != "plain" and not geometry.value_in_key


def center_of(keys: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean of the first `CENTER_TOKENS` valid keys of each head.

    A sequence without a valid key gets the mean of the other sequences' centers, because the part
    that all keys have in common comes from the model. If no sequence has a valid key, the first
    keys are used. This happens when a layer has moved only its sink. Coordinates that are too large
    for a key are set to 0. Numbers are added in order, so that the result does not depend on
    strides.

    Args:
        keys: `[B, G, N, D]`.
        valid: Bool `[B, N]`, False for padding and for a layer's sink; None for all.

    Returns:
        Float32 `[B, G, D]`.
    """
    some = keys.detach()[:, :, :CENTER_TOKENS].float()
    center = _added(some) / some.shape[2]
    if valid is not None:
        center = torch.where(valid.any(), _center_of_valid(keys.detach(), valid), center)
    return torch.where(center.abs() <= check.LARGEST, center, 0)


def _center_of_valid(keys: Tensor, valid: Tensor) -> Tensor:
    rank, last = valid.cumsum(1), keys.shape[2] - 1
    asked = torch.arange(1, CENTER_TOKENS + 1, device=keys.device).repeat(len(keys), 1)
    ids = torch.searchsorted(rank, asked).clamp_max(
        last
    )  # [B, 16]: the first valid key, the second, …
    there = asked <= rank[:, -1:]
    some = keys.gather(2, ids[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3]))
    counts = there.sum(1)[:, None, None]
    sums = _added(torch.where(there[:, None, :, None], some.float(), 0))
    center, known = sums / counts.clamp_min(1), counts > 0
    others = torch.where(known, center, 0).sum(0) / known.sum(0).clamp_min(1)
    return torch.where(known, center, others)


def _added(keys: Tensor) -> Tensor:
    first, *others = keys.unbind(2)
    return sum(others, start=first)


def check_center(center: Tensor | None, *, centered: bool, held: int) -> None:
    """Raise ValueError for a center that a store of `held` tokens cannot take."""
    if center is not None and (held or not centered):
        got = f"one to a store that holds {held} tokens" if held else "one to a store without"
        raise ValueError(f"center: got {got}, allowed is one with the first coded rows, or None")


def of_rows(center: Tensor | None) -> Tensor | None:
    """Return a center `[B, G, D]` with an axis for tokens, for keys `[B, G, N, D]`."""
    return None if center is None else center[:, :, None]
