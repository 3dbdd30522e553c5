"""`ResidentRows`: keys and values of the attention sink and the local window, at a fixed address.

Kernels read these rows in every decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry


class Shown(NamedTuple):
    """Which of `n` new rows of each sequence are attended to.

    Args:
        mask: Bool `[B, n]`, False for rows to hide.
        hidden: Number of rows that are hidden, mean over the batch.
    """

    mask: Tensor
    hidden: float


@lru_cache(maxsize=64)
def shown_first(counts: tuple[int, ...], device: torch.device) -> Shown:
    """Return the mask that shows the first `counts[b]` rows of sequence `b`, for as many rows as
    the largest count.

    The layers of a model ask for the same mask one after the other, so it is made once. The device
    has finished writing it when this function returns.
    """
    most = max(counts)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    return Shown(mask.to(device), most - sum(counts) / len(counts))


class ResidentRows:
    """Keys and values that every query attends to, in addition to the rows that a search selects.

    The tensors are on the compute device and never move, so that a captured CUDA graph can read
    them while their contents change.

    Args:
        geometry: Geometry of the layer.
        batch: Number of sequences, `B`.
        room: Capacity in rows per sequence, `W`.
        ragged: True if sequences may have different numbers of rows. Such sequences are filled one
            by one (`row`).

    Attributes:
        rows: Key and value of each row side by side, `[B, G, W, D + Dv]`, in the geometry's dtype.
        mask: Nonzero for rows that are attended to, uint8 `[B, W]`.
        count: Number of rows on the device, int64 `[1]`, or `[B]` if ragged.
    """

    def __init__(self, geometry: Geometry, batch: int, room: int, *, ragged: bool = False) -> None:
        g, device = geometry, geometry.device
        shape = (batch, g.kv_heads, room, g.head_dim + g.value_dim)
        self.rows = torch.zeros(shape, dtype=g.dtype, device=device)
        self.mask = torch.ones((batch, room), dtype=torch.uint8, device=device)
        self.count = torch.zeros(batch if ragged else 1, dtype=torch.int64, device=device)
        self.batch, self.room, self.ragged = batch, room, ragged
        self._count = 0
        self._masked: Tensor | float = 0.0
        self._hides = False  # True if `mask` may contain zeros

    def __len__(self) -> int:
        """Return the number of rows, as counted on the host."""
        return self._count

    def row(self, b: int) -> ResidentRows:
        """Return a new, empty `ResidentRows` for sequence `b` of this ragged buffer.

        The new object has no memory of its own. It writes to the memory of sequence `b` in this
        buffer.
        """
        one, own = copy(self), slice(b, b + 1)
        one.rows, one.mask, one.count = self.rows[own], self.mask[own], self.count[own]
        one.batch, one.ragged, one._hides = (
            1,
            False,
            True,
        )  # _hides is True, because the mask may contain zeros from an earlier sequence
        one._forget()
        return one

    def retire(self) -> None:
        """Set the capacity to 0. From now on, another object uses the memory of this buffer."""
        self.batch = self.room = 0

    @property
    def masked(self) -> Tensor | float:
        """Number of rows that the mask hides, as the mean over the sequences of the batch.

        The same object is returned until rows are added with a mask or hidden, or all rows are
        removed.
        """
        return self._masked

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Append rows. The capacity must be sufficient.

        Args:
            keys: `[B, G, n, D]`.
            values: `[B, G, n, Dv]`.
            mask: True for rows to attend to, bool `[B, n]`; None for all.
        """
        self._put(keys, values, mask)
        self.count.fill_(self._count)

    def replace(self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        """Remove all rows and add others, with a few kernel launches.

        parts: a list of tuples, each with the arguments of one call of `add`. If this method
        raises an error, the buffer is empty.
        """
        self._forget()
        try:
            for part in parts:
                self._put(*part)
        except BaseException:
            self._count = 0
            raise
        self.count.fill_(self._count)

    def _put(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Append rows without updating the device tensor `count`."""
        start = self.claim(keys.shape[2])
        some = slice(start, self._count)
        self.rows[:, :, some, : keys.shape[3]].copy_(keys)
        self.rows[:, :, some, keys.shape[3] :].copy_(values)
        if mask is not None:
            self._hides = True
            self.mask[:, some].copy_(mask)
            self._masked = self._masked + (~mask).sum(1).float().mean()

    def claim(self, count: int) -> int:
        """Add `count` to the number of rows that is stored on the host.

        The caller writes the new rows and updates the device tensor `self.count`. The mask must not
        hide the new rows. The capacity must be sufficient.

        Returns:
            Position of the first new row.
        """
        start, self._count = self._count, self._count + count
        return start

    def hide(self, start: int, shown: Shown) -> None:
        """Set the mask of rows from `start` on, which have no mask yet."""
        self._hides = True
        self.mask[:, start : start + shown.mask.shape[1]].copy_(shown.mask)
        self._masked = self._masked + shown.hidden

    def shorten(self, count: int) -> None:
        """Keep the first `count` rows. The others must not be masked."""
        self._count = count
        self.count.fill_(count)

    def clear(self) -> None:
        """Remove all rows."""
        self._forget()
        self.count.zero_()

    def _forget(self) -> None:
        """Remove all rows without updating the device tensor `count`."""
        self._count, self._masked = 0, 0.0
        if self._hides:
            self.mask.fill_(1)
            self._hides = False

    def unseen(self) -> ResidentRows:
        """Return a copy of this buffer whose mask hides all rows.

        It is used to capture a decode step in a CUDA graph. The copy shares the rows and the device
        tensor `count` with this buffer, but has its own count on the host.
        """
        twin = copy(self)
        twin.mask = torch.zeros_like(self.mask)
        return twin

    def nbytes(self) -> int:
        """Return the number of bytes of all tensors of the buffer."""
        return self.rows.nbytes + self.mask.nbytes + self.count.nbytes
