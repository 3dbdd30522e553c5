"""Centers of keys: a row codec that quantizes keys stores the difference of each key and a center.

All keys of a head can have a large vector in common, for example from the bias of a projection.
This vector makes quantized codes less accurate. It does not change attention, because it adds the
same number to all logits of a query, which the softmax ignores. So a store with such a codec
(`is_centered`) encodes `key - center`, computed in float32, and stores one center per sequence and
head. The first append to an empty store determines the center, and later appends do not change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry

CENTER_TOKENS = 16
"""Number of keys whose mean is the center. docs/decisions/0051 explains the number."""


class JoinedRows(dict[str, Tensor]):
    """Encoded rows (keys and values) as a dict of tensors. `RowStore.join` returns such a dict.

    Attributes:
        center: Vector that was subtracted from the keys before they were encoded, or None if
            nothing was subtracted.
    """

    center: Tensor | None = None


def is_centered(codec: str, geometry: Geometry) -> bool:
    """Return True if a codec encodes keys relative to a center.

    The codec "plain" stores keys unchanged. Keys that contain their values (`value_in_key`) have no
    center, because it would change the values.
    """
    return codec != "plain" and not geometry.value_in_key


def center_of(keys: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean of the first `CENTER_TOKENS` valid keys of each sequence and head.

    A sequence without a valid key gets the mean of the centers of the other sequences, because the
    vector that keys have in common comes from the model, not from the text. If no sequence has a
    valid key, each sequence gets the mean of its first `CENTER_TOKENS` keys. This happens if a
    layer has so far passed only the tokens of its attention sink. Coordinates of the mean that are
    too large for a key become 0. The sum is computed in a fixed order, so the result does not
    depend on strides.

    Args:
        keys: `[B, G, N, D]`.
        valid: Bool `[B, N]`, False for padding and for the attention sink; None for all.

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
    """Raise ValueError if a row store cannot use the center of saved rows.

    A store can use this center only while it is empty, and only if its codec uses centers.

    Args:
        center: The center, or None for zeros.
        centered: True if the codec of the store uses a center.
        held: Number of tokens in the store.
    """
    if center is not None and (held or not centered):
        place = f"a store that has {held} tokens" if held else "a store whose codec uses no center"
        raise ValueError(
            f"center: got a center for {place}, allowed is None; a center needs an empty store "
            "with the codec int8, fp8, int4 or int2"
        )


def of_rows(center: Tensor | None) -> Tensor | None:
    """Insert a token axis into a center `[B, G, D]`, so that it can be added to keys `[B, G, N,
    D]`.
    """
    return None if center is None else center[:, :, None]
