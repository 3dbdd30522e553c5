"""The sink: the first tokens of a sequence that are not padding. Every query attends to them
without a search.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Rows
from kvindex.ops.fetch import gather_rows
from kvindex.ops.select import compact


@dataclass(frozen=True, eq=False)
class Sink:
    """The sink (first tokens) of each sequence of a batch.

    Args:
        ids: Positions of the sink tokens, int64 `[B, S]`, -1 for an unused slot.
        rows: Keys `[B, G, S, D]` and values `[B, G, S, Dv]` of the sink tokens.
        fewest: Number of tokens in the smallest sink of the batch.
    """

    ids: Tensor
    rows: Rows
    fewest: int

    @staticmethod
    def of(ids: Tensor, rows: Rows) -> Sink:
        """Make a `Sink` from the positions and rows (keys and values) of the sink tokens.

        The host waits for the device, because it reads the number of sink tokens.
        """
        return Sink(ids, rows, int((ids != UNUSED).sum(1).min()))

    @property
    def whole(self) -> bool:
        """True if every sequence has `S` sink tokens, so that no slot of `ids` is unused."""
        return self.fewest == self.ids.shape[1]

    @property
    def mask(self) -> Tensor:
        """Bool `[B, S]`: True where `ids` contains the position of a sink token, else False."""
        return self.ids != UNUSED

    def before(self, length: int) -> Sink:
        """Return the sink without the tokens from position `length` on."""
        ids = self.ids.masked_fill(self.ids >= length, UNUSED)
        some = (ids != UNUSED).any(0)  # slots that at least one sequence still uses
        rows = Rows(self.rows.keys[:, :, some], self.rows.values[:, :, some])
        return Sink.of(ids[:, some], rows)

    def reordered(self, batch_indices: Tensor) -> Sink:
        """Return a copy whose sequence `b` is sequence `batch_indices[b]` of this object."""
        order = batch_indices.to(self.ids.device)
        return Sink.of(self.ids[order], Rows(self.rows.keys[order], self.rows.values[order]))

    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return self.rows.keys.nbytes + self.rows.values.nbytes


def joining(sink: Sink | None, size: int, moved: Rows, real: Tensor | None) -> Tensor | None:
    """Select the tokens that join the sink, among tokens that leave the window.

    Args:
        sink: The sink so far, or None.
        size: Number of tokens of a full sink.
        moved: Keys and values of the `n` tokens that leave the window.
        real: Bool `[B, n]`, False for padding, or None where no token is padded.

    Returns:
        Bool `[B, n]`, True for tokens that join the sink, or None if the sink is already full. To
        find out if it is full, the host does not wait for the device.
    """
    if (0 if sink is None else sink.fewest) >= size:
        return None
    B, _, n, _ = moved.keys.shape
    if real is None:
        real = torch.ones((B, n), dtype=torch.bool, device=moved.keys.device)
    have = 0 if sink is None else sink.mask.sum(1)[:, None]
    return real & (real.cumsum(1) + have <= size)


def first_of(size: int, moved: Rows, start: int) -> Sink:
    """Make a sink of the first `size` tokens of `moved`. No sequence may have padding.

    `start` is the position in the sequence of the first token of `moved`.
    """
    rows = Rows(*(part[:, :, :size].clone() for part in (moved.keys, moved.values)))
    batch, _, count, _ = rows.keys.shape
    ids = torch.arange(start, start + count, device=rows.keys.device)
    return Sink(ids.repeat(batch, 1), rows, count)


def joined(sink: Sink | None, new: Tensor, moved: Rows, start: int) -> Sink:
    """Return a sink with the tokens of `sink` and some of the `n` tokens of `moved`.

    Args:
        sink: The sink so far, or None.
        new: Bool `[B, n]`, True for the tokens of `moved` to add.
        moved: Keys and values of the `n` tokens.
        start: Position of the first token of `moved`.
    """
    ids = compact(new)
    wide = ids[:, None].expand(-1, moved.keys.shape[1], -1)
    rows = Rows(gather_rows(moved.keys, wide), gather_rows(moved.values, wide))
    ids = torch.where(ids == UNUSED, ids, ids + start)
    if sink is None:
        return Sink.of(ids, rows)
    ids = torch.cat([sink.ids, ids], dim=1)
    slots = compact(ids != UNUSED)  # remove gaps, which padding leaves
    wide = slots[:, None].expand(-1, moved.keys.shape[1], -1)
    ids = ids.gather(1, slots.clamp_min(0)).masked_fill(slots == UNUSED, UNUSED)
    keys = torch.cat([sink.rows.keys, rows.keys], dim=2)
    values = torch.cat([sink.rows.values, rows.values], dim=2)
    return Sink.of(ids, Rows(gather_rows(keys, wide), gather_rows(values, wide)))
