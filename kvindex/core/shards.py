"""Shards of a sequence: which rank holds which tokens, round robin by blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED


@dataclass(frozen=True)
class Shard:
    """The blocks of `block` tokens that are those of `rank`, one of `count`: `rank`, then every
    `count`-th. The `i`-th of its tokens, by position, is `i` in its own index.
    """

    rank: int
    count: int
    block: int

    def tokens(self, length: int) -> int:
        """How many of the first `length` tokens it holds."""
        round_tokens = self.block * self.count
        rest = length % round_tokens - self.rank * self.block
        return length // round_tokens * self.block + min(max(rest, 0), self.block)

    def parts(self, start: int, stop: int) -> list[slice]:
        """Its tokens from position `start` to `stop`, as slices that count from `start`."""
        first, last = start // self.block, (stop - 1) // self.block
        first += (self.rank - first) % self.count
        blocks = range(first, last + 1, self.count)
        ends = ((b * self.block, (b + 1) * self.block) for b in blocks)
        return [slice(max(a, start) - start, min(b, stop) - start) for a, b in ends]

    def to_whole(self, ids: Tensor) -> Tensor:
        """Ids int64 of its own index as those of the sequence.

        Of ids below -1 each rank has its own: row `s` of `rank` is row `s · count + rank`.
        """
        block = ids // self.block
        rows = ids + (block * (self.count - 1) + self.rank) * self.block
        named = UNUSED - 1 - ((UNUSED - 1 - ids) * self.count + self.rank)
        return torch.where(ids < 0, torch.where(ids < UNUSED, named, UNUSED), rows)

    def to_own(self, ids: Tensor) -> Tensor:
        """Ids int64 of the sequence as those of its own index, -1 for those of others."""
        block, row = ids // self.block, UNUSED - 1 - ids
        rows = (block // self.count) * self.block + ids % self.block
        named = UNUSED - 1 - row // self.count
        mine = torch.where(ids < 0, row, block) % self.count == self.rank
        own = torch.where(ids < 0, named, rows)
        return torch.where(mine & (ids != UNUSED), own, UNUSED)

    def to_own_positions(self, positions: Tensor) -> Tensor:
        """Positions int64 as those of its newest token up to each, in its own index; 0 for none."""
        round_tokens = self.block * self.count
        rest = (positions + 1) % round_tokens - self.rank * self.block
        tokens = (positions + 1) // round_tokens * self.block + rest.clamp(0, self.block)
        return (tokens - 1).clamp_min(0)
