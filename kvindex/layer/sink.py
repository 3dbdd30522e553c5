"""The first real tokens of a sequence: always attended to, and never searched for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Rows
from kvindex.ops.fetch import gather_rows
from kvindex.ops.select import compact


@dataclass(frozen=True, eq=False)
class Sink:
    """ids: positions int64 `[B, S]`, -1 for none; rows: theirs, `[B, G, S, D]`; fewest: how many
    the row of the batch has that has fewest.
    """

    ids: Tensor
    rows: Rows
    fewest: int

    @staticmethod
    def of(ids: Tensor, rows: Rows) -> Sink:
        """Counts them: waits for the device."""
        return Sink(ids, rows, int((ids != UNUSED).sum(1).min()))

    @property
    def whole(self) -> bool:
        """Whether every place of every row of the batch holds a token."""
        return self.fewest == self.ids.shape[1]

    @property
    def mask(self) -> Tensor:
        """Which places hold a token, bool `[B, S]`."""
        return self.ids != UNUSED

    def before(self, length: int) -> Sink:
        """Without the tokens from position `length` on."""
        ids = self.ids.masked_fill(self.ids >= length, UNUSED)
        some = (ids != UNUSED).any(0)  # places that a row of the batch still uses
        rows = Rows(self.rows.keys[:, :, some], self.rows.values[:, :, some])
        return Sink.of(ids[:, some], rows)

    def reordered(self, batch_indices: Tensor) -> Sink:
        """Row `b` is row `batch_indices[b]` of this."""
        order = batch_indices.to(self.ids.device)
        return Sink.of(self.ids[order], Rows(self.rows.keys[order], self.rows.values[order]))

    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.rows.keys.nbytes + self.rows.values.nbytes


def joining(sink: Sink | None, size: int, moved: Rows, real: Tensor | None) -> Tensor | None:
    """Which of the rows `moved`, `[B, G, n, D]`, join a sink of `size` tokens for each row.

    Bool `[B, n]`, or None for none, which a full sink knows without asking the device. real: bool
    `[B, n]`, or None where all are.
    """
    if (0 if sink is None else sink.fewest) >= size:
        return None
    B, _, n, _ = moved.keys.shape
    if real is None:
        real = torch.ones((B, n), dtype=torch.bool, device=moved.keys.device)
    have = 0 if sink is None else sink.mask.sum(1)[:, None]
    return real & (real.cumsum(1) + have <= size)


def first_of(size: int, moved: Rows, start: int) -> Sink:
    """The first `size` of rows `[B, G, n, D]` that are all real, the first at position `start`."""
    rows = Rows(*(part[:, :, :size].clone() for part in (moved.keys, moved.values)))
    batch, _, count, _ = rows.keys.shape
    ids = torch.arange(start, start + count, device=rows.keys.device)
    return Sink(ids.repeat(batch, 1), rows, count)


def joined(sink: Sink | None, new: Tensor, moved: Rows, start: int) -> Sink:
    """With the tokens `new`, bool `[B, n]`, of the rows `moved`, the first at position `start`."""
    ids = compact(new)
    wide = ids[:, None].expand(-1, moved.keys.shape[1], -1)
    rows = Rows(gather_rows(moved.keys, wide), gather_rows(moved.values, wide))
    ids = torch.where(ids == UNUSED, ids, ids + start)
    if sink is None:
        return Sink.of(ids, rows)
    ids = torch.cat([sink.ids, ids], dim=1)
    slots = compact(ids != UNUSED)  # rows that are padded differently leave gaps
    wide = slots[:, None].expand(-1, moved.keys.shape[1], -1)
    ids = ids.gather(1, slots.clamp_min(0)).masked_fill(slots == UNUSED, UNUSED)
    keys = torch.cat([sink.rows.keys, rows.keys], dim=2)
    values = torch.cat([sink.rows.values, rows.values], dim=2)
    return Sink.of(ids, Rows(gather_rows(keys, wide), gather_rows(values, wide)))
