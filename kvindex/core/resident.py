"""Sink and window in one buffer, for an index that attends to them beside its own rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry


class Near:
    """Rows that attention sees whatever is retrieved; its tensors stay where they are.

    rows `[B, G, W, D + Dv]`: keys and values side by side, of the geometry's dtype; held: int64
    `[1]`, how many of the `W` there are; shown: uint8 `[B, W]`, which of them are attended to.
    All are on the compute device, to be read by a captured graph that is replayed as they change.
    """

    def __init__(self, geometry: Geometry, batch: int, room: int) -> None:
        g, device = geometry, geometry.device
        shape = (batch, g.kv_heads, room, g.head_dim + g.value_dim)
        self.rows = torch.zeros(shape, dtype=g.dtype, device=device)
        self.shown = torch.ones((batch, room), dtype=torch.uint8, device=device)
        self.held = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = 0
        self._hidden: Tensor | float = 0.0

    def __len__(self) -> int:
        """Rows held."""
        return self._count

    @property
    def batch(self) -> int:
        """`B`."""
        return self.rows.shape[0]

    @property
    def room(self) -> int:
        """`W`."""
        return self.rows.shape[2]

    @property
    def hidden(self) -> Tensor | float:
        """Rows held and not shown, mean over the batch: the same object until there are others."""
        return self._hidden

    def add(self, keys: Tensor, values: Tensor, shown: Tensor | None) -> None:
        """Hold rows more: keys `[B, G, n, D]`, values `[B, G, n, Dv]`, shown bool `[B, n]`.

        shown: None where all are. There must be room.
        """
        start = self.claim(keys.shape[2])
        some = slice(start, self._count)
        self.rows[:, :, some, : keys.shape[3]].copy_(keys)
        self.rows[:, :, some, keys.shape[3] :].copy_(values)
        if shown is not None:
            self.shown[:, some].copy_(shown)
            self._hidden = self._hidden + (~shown).sum(1).float().mean()
        self.held.fill_(self._count)

    def claim(self, count: int) -> int:
        """So many rows more are held, all shown, which the caller writes; and `held` then.

        Returns where the first of them goes. There must be room.
        """
        start, self._count = self._count, self._count + count
        return start

    def clear(self) -> None:
        """Hold nothing."""
        self._count, self._hidden = 0, 0.0
        self.shown.fill_(1)
        self.held.zero_()

    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.rows.nbytes + self.shown.nbytes + self.held.nbytes
