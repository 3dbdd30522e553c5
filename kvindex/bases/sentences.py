"""What the signals say of a sequence: where sentences end, and the queries of the newest one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED
from kvindex.ops.select import compact
from kvindex.storage.state import OnHost


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences end with tokens; a token's query belongs to the sentence of the token.

    ends: bool `[B, X]`, or `[1, X]` for all rows: which of the first `X` tokens end a sentence.
    queries `[B, H, n, D]` with ids `positions`, int64 `[n]` on the CPU, ascending: the newest
    since the prompt was sealed. newest: id of the newest query of all, -1 for none.
    """

    ends: Tensor
    queries: Tensor
    positions: OnHost
    newest: int = -1
    sealed: bool = False

    @staticmethod
    def nothing(geometry: Geometry) -> Sentences:
        """Before the first signal."""
        g = geometry
        ends = torch.empty((1, 0), dtype=torch.bool, device=g.device)
        queries = torch.empty((1, g.q_heads, 0, g.head_dim), dtype=g.dtype, device=g.device)
        return Sentences(ends, queries, torch.empty(0, dtype=torch.int64))

    def said(self, ends: Tensor, first: int) -> Sentences:
        """Sentences end where `ends`, bool `[B or 1, T]`, says so of the tokens from `first` on.

        What was said of these and of later ones is forgotten, or of another batch.
        """
        old = self.ends[:, :first]
        old = pad(old, (0, first - old.shape[1]))
        rows = max(len(old), len(ends))
        if len(old) not in (1, rows):
            old = torch.zeros_like(old[:1])
        ends = torch.cat([old.expand(rows, -1), ends.expand(rows, -1)], dim=1)
        return replace(self, ends=ends)

    def observed(self, queries: Tensor, positions: Tensor, most: int) -> Sentences:
        """Queries `[B, H, T, D]` of tokens with ids int64 `[T]`; the newest `most` are kept.

        What was observed from the first of these ids on belonged to a sequence that was cut.
        """
        new = positions.cpu()
        heard = replace(self, newest=int(new[-1]))
        if not self.sealed:
            return heard
        left = int((self.positions < new[0]).sum())
        if left and len(self.queries) == len(queries):
            queries = torch.cat([self.queries[:, :, :left], queries], dim=2)
            new = torch.cat([self.positions[:left], new])
        return replace(heard, queries=queries[:, :, -most:].clone(), positions=new[-most:])

    def before(self, length: int) -> Sentences:
        """What is left once the tokens from `length` on are gone."""
        left = self.positions < length
        queries, newest = self.queries[:, :, : int(left.sum())], min(self.newest, length - 1)
        ends, positions = self.ends[:, :length], self.positions[left]
        return replace(self, ends=ends, queries=queries, positions=positions, newest=newest)

    def reordered(self, order: Tensor) -> Sentences:
        """Row `b` is row `order[b]` of this."""
        ends = self.ends[order] if len(self.ends) > 1 else self.ends
        queries = self.queries[order] if len(self.positions) else self.queries
        return replace(self, ends=ends, queries=queries)

    def ended(self, ids: Tensor) -> Tensor:
        """Whether a sentence ends with tokens int64 `[B, n]`; means nothing for ids below 0."""
        count = self.ends.shape[1]
        if not count:
            return torch.zeros_like(ids, dtype=torch.bool)
        said = self.ends.expand(len(ids), -1).gather(1, ids.clamp(0, count - 1))
        return said & (ids < count)

    def mean_query(self, queries: Tensor, most: int) -> Tensor:
        """The mean query of the sentence that queries `[B, H, D]` belong to, float32 `[B, H, D]`.

        They are the newest of those observed, if they equal them, or else those of the token
        after. At most the last `most` queries of the sentence count.
        """
        seen, queries = self.queries, queries.float()
        if not len(self.positions) or len(seen) != len(queries):
            return queries
        ids = self.positions.to(queries.device).expand(len(queries), -1)
        known = (seen[:, :, -1].float() == queries).flatten(1).all(1)[:, None]
        now = ids[:, -1:] + (~known).long()  # id of their token, [B, 1]
        over = self.ended(ids) & (ids < now)  # a sentence ended with this token, [B, n]
        over = over.flip(1).int().cummax(1).values.flip(1).bool()
        mine = (~over & (ids > now - most)).float()
        extra = (~known).float()  # [B, 1]
        total = (seen.float() * mine[:, None, :, None]).sum(2) + queries * extra[..., None]
        mean: Tensor = total / (mine.sum(1, keepdim=True) + extra)[..., None]
        return mean


def split(ended: Tensor, counts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Where sentences begin, -1 for none, and their lengths, 0 for none: int64 `[B, U]` each.

    ended: bool `[B, n]`, tokens with which one ends; counts: int64 `[B]`, a row's tokens, the
    first ones; longest: tokens after which one is cut.
    """
    if not ended.shape[1]:
        return counts[:, None][:, :0], counts[:, None][:, :0]
    rank = torch.arange(ended.shape[1], device=ended.device)
    first = torch.where(pad(ended[:, :-1], (1, 0), value=True), rank, 0).cummax(1).values
    starts = compact(((rank - first) % longest == 0) & (rank < counts[:, None]))
    ends = pad(starts[:, 1:], (0, 1), value=UNUSED)
    ends = torch.where(ends < 0, counts[:, None], ends)
    return starts, (ends - starts).masked_fill(starts < 0, 0)
