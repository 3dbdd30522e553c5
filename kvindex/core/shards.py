"""`Shard`: the tokens that a rank stores if blocks of a sequence are dealt round robin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED


@dataclass(frozen=True)
class Shard:
    """The tokens of a sequence that one rank stores.

    The sequence is divided into blocks, and the blocks are dealt round robin: the rank stores the
    blocks number `rank`, `rank + count`, `rank + 2 · count`, and so on. It stores them in an index
    of its own, where its tokens have the ids 0, 1, 2, … in order of position.

    Attributes:
        rank: Number of this rank.
        count: Number of ranks.
        block: Number of tokens in a block.
    """

    rank: int
    count: int
    block: int

    def tokens(self, length: int) -> int:
        """Return how many of the first `length` tokens of the sequence are stored by this rank."""
        round_tokens = self.block * self.count
        rest = length % round_tokens - self.rank * self.block
        return length // round_tokens * self.block + min(max(rest, 0), self.block)

    def parts(self, start: int, stop: int) -> list[slice]:
        """Return which of the tokens `start` to `stop - 1` this rank stores.

        The result is a list of slices, whose bounds are relative to `start`.
        """
        first, last = start // self.block, (stop - 1) // self.block
        first += (self.rank - first) % self.count
        blocks = range(first, last + 1, self.count)
        ends = ((b * self.block, (b + 1) * self.block) for b in blocks)
        return [slice(max(a, start) - start, min(b, stop) - start) for a, b in ends]

    def to_whole(self, ids: Tensor) -> Tensor:
        """Convert ids in the index of this rank to ids in the whole sequence, int64.

        A summary row, which stands for several tokens, has an id below -1: summary row `s` has the
        id `-2 - s`. Summary row `s` of this rank becomes summary row `s · count + rank`.
        """
        block = ids // self.block
        rows = ids + (block * (self.count - 1) + self.rank) * self.block
        named = UNUSED - 1 - ((UNUSED - 1 - ids) * self.count + self.rank)
        return torch.where(ids < 0, torch.where(ids < UNUSED, named, UNUSED), rows)

    def to_own(self, ids: Tensor) -> Tensor:
        """Convert ids in the whole sequence to ids in the index of this rank, int64.

        An id becomes -1 if another rank stores its token, or its summary row (a row that stands for
        several tokens).
        """
        block, row = ids // self.block, UNUSED - 1 - ids
        rows = (block // self.count) * self.block + ids % self.block
        named = UNUSED - 1 - row // self.count
        mine = torch.where(ids < 0, row, block) % self.count == self.rank
        own = torch.where(ids < 0, named, rows)
        return torch.where(mine & (ids != UNUSED), own, UNUSED)

    def to_own_positions(self, positions: Tensor) -> Tensor:
        """Convert positions in the whole sequence to ids in the index of this rank, int64.

        For a position `p`, the result is the id of the last token of this rank at a position up to
        `p`. It is 0 if the rank has no such token.
        """
        round_tokens = self.block * self.count
        rest = (positions + 1) % round_tokens - self.rank * self.block
        tokens = (positions + 1) // round_tokens * self.block + rest.clamp(0, self.block)
        return (tokens - 1).clamp_min(0)
