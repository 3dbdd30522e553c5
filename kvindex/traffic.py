"""What a layer's searching steps have read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvindex.protocol import UNUSED, Hits, Rows


@dataclass(frozen=True)
class Traffic:
    """Sums over the searching steps of a layer; the counts stay on the device until read.

    steps: one-query steps that searched; rows_read: rows attended to and rows_full: rows that
    full attention would have read, both per KV head and row of the batch; bytes_fetched: of rows
    that the store gave; mass: `Hits.mass`, mean over heads, where searches were asked for one.
    """

    steps: int = 0
    rows_read: Tensor | float = 0.0
    rows_full: Tensor | float = 0.0
    bytes_fetched: Tensor | float = 0.0
    mass: Tensor | float = 0.0

    def counted(
        self, hits: Hits, visible: Tensor, valid: Tensor | None, length: int, rows: Rows
    ) -> Traffic:
        """With one step more: hits, their rows, rows shown to attention, tokens that are real."""
        width = rows.keys.shape[-1] + rows.values.shape[-1]
        used = (hits.ids != UNUSED).sum().float()
        full = length if valid is None else valid.sum(-1).float().mean()
        return Traffic(
            steps=self.steps + 1,
            rows_read=self.rows_read + visible.sum(-1).float().mean(),
            rows_full=self.rows_full + full,
            bytes_fetched=self.bytes_fetched + used * (width * rows.keys.element_size()),
            mass=self.mass + (0.0 if hits.mass is None else hits.mass.mean()),
        )
