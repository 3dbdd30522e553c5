"""Center of keys: what rows that are kept as codes are codes from.

What all keys of a head have in common (the biases of some models' projections) costs a code its
accuracy, and attention nothing: a softmax does not see it. So a store whose codec is `is_centered`
keeps codes of `key - center`, in float32, and a center for each head. The first append to an empty
store decides it, and no later one changes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry

CENTER_TOKENS = 16
"""Keys whose mean a center is; why so many, docs/decisions/0051 says."""


class JoinedRows(dict[str, Tensor]):
    """Parts of rows by name, as `RowStore.join` makes them.

    center: that they are codes from, where an empty store is to take it; None for zeros.
    """

    center: Tensor | None = None


def is_centered(codec: str, geometry: Geometry) -> bool:
    """Whether rows are codes of what keys differ from a center by.

    Neither plain rows are nor latents, whose keys begin with their values.
    """
    return codec != "plain" and not geometry.value_in_key


def center_of(keys: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean of the first `CENTER_TOKENS` valid ones of keys `[B, G, N, D]`, float32 `[B, G, D]`.

    By additions in order, so that no bit depends on how keys lie. valid: bool `[B, N]`, None for
    all; what is not (padding, a layer's sink) may be anything. A row of the batch in which nothing
    is valid has the mean of the others' centers, for what keys share is a model's; if nothing is in
    any row, the first keys are taken as they are: a layer's that has moved no more than its sink. A
    coordinate that no allowed key has (of padding, or where keys are looked at later) is 0.
    """
    some = keys.detach()[:, :, :CENTER_TOKENS].float()
    center = _added(some) / some.shape[2]
    if valid is not None:
        center = torch.where(valid.any(), _center_of_valid(keys.detach(), valid), center)
    return torch.where(center.abs() <= check.LARGEST, center, 0)


def _center_of_valid(keys: Tensor, valid: Tensor) -> Tensor:
    rank, last = valid.cumsum(1), keys.shape[2] - 1
    asked = torch.arange(1, CENTER_TOKENS + 1, device=keys.device).repeat(len(keys), 1)
    ids = torch.searchsorted(rank, asked).clamp_max(last)  # [B, 16], of the first, the second, …
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
    """Raises ValueError for a center that a store of `held` tokens cannot take."""
    if center is not None and (held or not centered):
        got = f"one to a store that holds {held} tokens" if held else "one of rows without"
        raise ValueError(f"center: got {got}, allowed is one with the first coded rows, or None")


def of_rows(center: Tensor | None) -> Tensor | None:
    """A center `[B, G, D]` beside keys `[B, G, N, D]`."""
    return None if center is None else center[:, :, None]
