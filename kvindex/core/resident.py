"""Resident rows: sink and window in one buffer at a fixed address, which kernels attend to."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry


class ResidentRows:
    """Rows that attention sees whatever is retrieved; its tensors stay where they are.

    rows `[B, G, W, D + Dv]`: keys and values side by side, of the geometry's dtype; count: int64
    `[1]`, how many of the `W` there are; mask: uint8 `[B, W]`, which of them are attended to.
    All are on the compute device, to be read by a captured graph that is replayed as they change.
    batch, room: `B` and `W`; ragged: whether each row of the batch has a count of its own, int64
    `[B]`: such rows are filled one by one (`row`).
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
        self._hides = False  # whether `mask` was written to since it was all ones

    def __len__(self) -> int:
        """Rows held."""
        return self._count

    def row(self, b: int) -> ResidentRows:
        """Row `b` of ragged ones by itself, in the same memory; it holds nothing yet."""
        one, own = copy(self), slice(b, b + 1)
        one.rows, one.mask, one.count = self.rows[own], self.mask[own], self.count[own]
        one.batch, one.ragged, one._hides = 1, False, True  # as it was left
        one._forget()
        return one

    def retire(self) -> None:
        """The memory is for others from now on: here is no room for anybody."""
        self.batch = self.room = 0

    @property
    def masked(self) -> Tensor | float:
        """Masked rows, mean over the batch: the same object until there are others."""
        return self._masked

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Add rows: keys `[B, G, n, D]`, values `[B, G, n, Dv]`, for which there must be room.

        mask: bool `[B, n]`, which of them are attended to; None for all.
        """
        self._put(keys, values, mask)
        self.count.fill_(self._count)

    def replace(self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        """Hold these rows in place of all others, in a few launches; each part as `add` takes it.

        Where it raises, as far as the host knows nothing is held.
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
        """As `add`, but for `count`."""
        start = self.claim(keys.shape[2])
        some = slice(start, self._count)
        self.rows[:, :, some, : keys.shape[3]].copy_(keys)
        self.rows[:, :, some, keys.shape[3] :].copy_(values)
        if mask is not None:
            self._hides = True
            self.mask[:, some].copy_(mask)
            self._masked = self._masked + (~mask).sum(1).float().mean()

    def claim(self, count: int) -> int:
        """Reserve `count` visible rows for the caller to fill, who sets `self.count` then.

        Returns where the first of them goes. There must be room.
        """
        start, self._count = self._count, self._count + count
        return start

    def clear(self) -> None:
        """Hold nothing."""
        self._forget()
        self.count.zero_()

    def _forget(self) -> None:
        """As `clear`, but for `count`."""
        self._count, self._masked = 0, 0.0
        if self._hides:
            self.mask.fill_(1)
            self._hides = False

    def unseen(self) -> ResidentRows:
        """The same rows, as many as the device counts of these, none of which is attended to.

        For steps that a graph holds; the host's count is its own.
        """
        twin = copy(self)
        twin.mask = torch.zeros_like(self.mask)
        return twin

    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.rows.nbytes + self.mask.nbytes + self.count.nbytes
