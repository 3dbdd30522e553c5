"""Shards of a sequence: ranks store blocks of tokens in turn (round robin)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED


@dataclass(frozen=True)
class Shard:
    """The tokens of one rank: block `rank`, and then every `count`-th block of `block` tokens.

    In the rank's own index, the ids of its tokens are 0, 1, 2, … in order of position.
    """

    rank: int
    count: int
    block: int

    def tokens(self, length: int) -> int:
        """Return how many of the first `length` tokens the rank has."""
        round_tokens = self.block * self.count
        rest = length % round_tokens - self.rank * self.block
        return length // round_tokens * self.block + min(max(rest, 0), self.block)

    def parts(self, start: int, stop: int) -> list[slice]:
        """Return the rank's tokens from `start` to `stop`, as slices relative to `start`."""
        first, last = start // self.block, (stop - 1) // self.block
        first += (self.rank - first) % self.count
        blocks = range(first, last + 1, self.count)
        ends = ((b * self.block, (b + 1) * self.block) for b in blocks)
        return [slice(max(a, start) - start, min(b, stop) - start) for a, b in ends]

    def to_whole(self, ids: Tensor) -> Tensor:
        """Convert ids of the rank's own index, int64, to ids of the sequence.

        Ids below -1 name rows that are not tokens: row `s` of a rank becomes `s · count + rank`.
        """
        block = ids // self.block
        rows = ids + (block * (self.count - 1) + self.rank) * self.block
        named = UNUSED - 1 - ((UNUSED - 1 - ids) * self.count + self.rank)
        return torch.where(ids < 0, torch.where(ids < UNUSED, named, UNUSED), rows)

    def to_own(self, ids: Tensor) -> Tensor:
        """Convert ids of the sequence, int64, to ids of the rank's own index.

        Tokens of other ranks become -1.
        """
        block, row = ids // self.block, UNUSED - 1 - ids
        rows = (block // self.count) * self.block + ids % self.block
        named = UNUSED - 1 - row // self.count
        mine = torch.where(ids < 0, row, block) % self.count == self.rank
        own = torch.where(ids < 0, named, rows)
        return torch.where(mine & (ids != UNUSED), own, UNUSED)

    def to_own_positions(self, positions: Tensor) -> Tensor:
        """For each position, return the id of the rank's last token at or before the position.

        The id is 0 if there is no such token.
        """
        round_tokens = self.block * self.count
        rest = (positions + 1) % round_tokens - self.rank * self.block
        tokens = (positions + 1) // round_tokens * self.block + rest.clamp(0, self.block)
        return (tokens - 1).clamp_min(0)
