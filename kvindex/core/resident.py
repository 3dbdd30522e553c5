"""Resident rows: a buffer at a fixed address with the rows of sink and window, for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry


class ResidentRows:
    """Rows that every query attends to, in addition to the rows that a search retrieves.

    The tensors are on the compute device and never move, so that a captured graph can read them
    while their contents change.

    Args:
        geometry: The layer's geometry.
        batch: Number of sequences, `B`.
        room: Number of rows for which the buffer has room, `W`.
        ragged: Whether each sequence has a count of its own. Such sequences are filled one by one
            (`row`).

    Attributes:
        rows: Keys and values next to each other, `[B, G, W, D + Dv]`, in the geometry's dtype.
        mask: Which rows are attended to, uint8 `[B, W]`.
        count: Number of rows, int64 `[1]`, or `[B]` if ragged.
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
        self._hides = False  # whether `mask` may contain zeros

    def __len__(self) -> int:
        """Number of rows."""
        return self._count

    def row(self, b: int) -> ResidentRows:
        """Return the part of sequence `b` of a ragged buffer as an empty buffer."""
        one, own = copy(self), slice(b, b + 1)
        one.rows, one.mask, one.count = self.rows[own], self.mask[own], self.count[own]
        one.batch, one.ragged, one._hides = (
            1,
            False,
            True,
        )  # the last user may have left zeros in the mask
        one._forget()
        return one

    def retire(self) -> None:
        """Set the room to 0, because the memory belongs to another object from now on."""
        self.batch = self.room = 0

    @property
    def masked(self) -> Tensor | float:
        """Number of masked rows, mean over the batch.

        The same object is returned as long as the number cannot have changed.
        """
        return self._masked

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Append keys `[B, G, n, D]` and values `[B, G, n, Dv]`. There must be room.

        mask: bool `[B, n]`, which of them are attended to; None for all.
        """
        self._put(keys, values, mask)
        self.count.fill_(self._count)

    def replace(self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        """Replace all rows, in a few launches. Each part has the arguments of `add`.

        If this raises, the buffer counts as empty.
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
        """Like `add`, without writing `count`."""
        start = self.claim(keys.shape[2])
        some = slice(start, self._count)
        self.rows[:, :, some, : keys.shape[3]].copy_(keys)
        self.rows[:, :, some, keys.shape[3] :].copy_(values)
        if mask is not None:
            self._hides = True
            self.mask[:, some].copy_(mask)
            self._masked = self._masked + (~mask).sum(1).float().mean()

    def claim(self, count: int) -> int:
        """Count `count` more visible rows, and return the position of the first of them.

        There must be room. The caller writes the rows, and then `self.count`.
        """
        start, self._count = self._count, self._count + count
        return start

    def clear(self) -> None:
        """Remove all rows."""
        self._forget()
        self.count.zero_()

    def _forget(self) -> None:
        """Like `clear`, without writing `count`."""
        self._count, self._masked = 0, 0.0
        if self._hides:
            self.mask.fill_(1)
            self._hides = False

    def unseen(self) -> ResidentRows:
        """Return a copy whose mask hides all rows, for steps in a CUDA graph.

        It shares the rows and the device's count, and has a host count of its own.
        """
        twin = copy(self)
        twin.mask = torch.zeros_like(self.mask)
        return twin

    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.rows.nbytes + self.mask.nbytes + self.count.nbytes
