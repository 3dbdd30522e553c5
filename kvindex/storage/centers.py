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


def center_of(keys: Tensor) -> Tensor:
    """The mean of the first `CENTER_TOKENS` of keys `[B, G, N, D]`, float32 `[B, G, D]`.

    By additions in order, so that no bit depends on how keys lie. A coordinate of which it is no
    allowed key's (padding may be anything) is 0, so that nothing overflows beside it.
    """
    first, *others = keys.detach()[:, :, :CENTER_TOKENS].float().unbind(2)
    total = first
    for key in others:
        total = total + key
    center = total / (1 + len(others))
    return torch.where(center.abs() <= check.LARGEST, center, 0)


def check_center(center: Tensor | None, *, centered: bool, held: int) -> None:
    """Raises ValueError for a center that a store of `held` tokens cannot take."""
    if center is not None and (held or not centered):
        got = f"one to a store that holds {held} tokens" if held else "one of rows without"
        raise ValueError(f"center: got {got}, allowed is one with the first coded rows, or None")


def of_rows(center: Tensor | None) -> Tensor | None:
    """A center `[B, G, D]` beside keys `[B, G, N, D]`."""
    return None if center is None else center[:, :, None]
