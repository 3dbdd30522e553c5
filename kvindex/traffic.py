"""What a layer's searching steps have read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
        self,
        *,
        read: Tensor | float,
        full: Tensor | float,
        fetched_bytes: Tensor | float,
        mass: Tensor | float = 0.0,
    ) -> Traffic:
        """With one step more: what each of the sums gains."""
        return Traffic(
            steps=self.steps + 1,
            rows_read=self.rows_read + read,
            rows_full=self.rows_full + full,
            bytes_fetched=self.bytes_fetched + fetched_bytes,
            mass=self.mass + mass,
        )
