"""`Sentences`: stores where the sentences of a text end, and the queries of the newest sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.bases.prompt_queries import are_real
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED
from kvindex.ops.select import compact
from kvindex.storage.state import OnHost


@dataclass(frozen=True, eq=False)
class Sentences:
    """Stores where the sentences of a text end, and the newest queries.

    Attributes:
        ends: For the first `X` tokens, True if the token ends a sentence: bool `[B, X]`, or `[1,
            X]` if all sequences have the same ends.
        queries: Newest queries since the prompt ended, `[B, H, n, D]`.
        positions: Positions of these queries' tokens, int64 `[n]` on the CPU, ascending.
        newest: Position of the newest query that was ever observed, -1 before the first query.
        prompt_ended: True once the prompt is complete.
    """

    ends: Tensor
    queries: Tensor
    positions: OnHost
    newest: int = -1
    prompt_ended: bool = False

    @staticmethod
    def empty(geometry: Geometry) -> Sentences:
        """Return the initial state: no sentence has ended and no query was observed."""
        g = geometry
        ends = torch.empty((1, 0), dtype=torch.bool, device=g.device)
        queries = torch.empty((1, g.q_heads, 0, g.head_dim), dtype=g.dtype, device=g.device)
        return Sentences(ends, queries, torch.empty(0, dtype=torch.int64))

    def with_ends(self, ends: Tensor, first: int) -> Sentences:
        """Return a copy of this object with the sentence ends of `T` more tokens.

        The tokens have the positions `first`, `first + 1`, …. Sentence ends that were stored for
        `first` and later positions are replaced. If the batch size has changed, all earlier
        sentence ends are dropped.

        Args:
            ends: True if the token ends a sentence: bool `[B, T]`, or `[1, T]` if all sequences
                have the same ends.
            first: Position of the first of the `T` tokens.
        """
        old = self.ends[:, :first]
        old = pad(old, (0, first - old.shape[1]))
        rows = max(len(old), len(ends))
        if len(old) not in (1, rows):
            old = torch.zeros_like(old[:1])
        ends = torch.cat([old.expand(rows, -1), ends.expand(rows, -1)], dim=1)
        return replace(self, ends=ends)

    def with_queries(self, queries: Tensor, positions: Tensor, most: int) -> Sentences:
        """Return a copy of this object with new queries added to the stored ones.

        The copy stores only the newest `most` queries. Stored queries at or after the position of
        the first new query are left out, because their tokens have been truncated.

        Args:
            queries: New queries, `[B, H, T, D]`.
            positions: Positions of the new queries' tokens, int64 `[T]`, ascending.
            most: Largest number of queries to store.
        """
        new = positions.cpu()
        sentences = replace(self, newest=int(new[-1]))
        if not self.prompt_ended:
            return sentences
        earlier = int((self.positions < new[0]).sum())
        if earlier and len(self.queries) == len(queries):
            queries = torch.cat([self.queries[:, :, :earlier], queries], dim=2)
            new = torch.cat([self.positions[:earlier], new])
        return replace(sentences, queries=queries[:, :, -most:].clone(), positions=new[-most:])

    def truncated(self, length: int) -> Sentences:
        """Return the state after removing all tokens from position `length` on."""
        remaining = self.positions < length
        queries, newest = self.queries[:, :, : int(remaining.sum())], min(self.newest, length - 1)
        ends, positions = self.ends[:, :length], self.positions[remaining]
        return replace(self, ends=ends, queries=queries, positions=positions, newest=newest)

    def reordered(self, order: Tensor) -> Sentences:
        """Return the state for a reordered batch, whose sequence `b` was sequence `order[b]`."""
        ends = self.ends[order] if len(self.ends) > 1 else self.ends
        queries = self.queries[order] if len(self.positions) else self.queries
        return replace(self, ends=ends, queries=queries)

    def ends_at(self, ids: Tensor) -> Tensor:
        """Return True for those of the tokens `ids`, int64 `[B, n]`, that end a sentence."""
        count = self.ends.shape[1]
        if not count:
            return torch.zeros_like(ids, dtype=torch.bool)
        flags = self.ends.expand(len(ids), -1).gather(1, ids.clamp(0, count - 1))
        return flags & (ids < count)

    def mean_query(self, queries: Tensor, most: int) -> Tensor:
        """Return the mean of a query and the earlier queries of its sentence, float32 `[B, H, D]`.

        Args:
            queries: The query of each head, `[B, H, D]`. If it equals the newest observed query, it
                belongs to the same token and is counted once. Otherwise it belongs to the next
                token.
            most: Largest number of queries in the mean. If the sentence has more queries, the mean
                is over the last ones.
        """
        observed, queries = self.queries, queries.float()
        if not len(self.positions) or len(observed) != len(queries):
            return queries
        ids = self.positions.to(queries.device).expand(len(queries), -1)
        repeated = (observed[:, :, -1].float() == queries).flatten(1).all(1)[:, None]
        token = ids[:, -1:] + (~repeated).long()  # id of their token, [B, 1]
        over = self.ends_at(ids) & (ids < token)  # a sentence ended with this token, [B, n]
        over = over.flip(1).int().cummax(1).values.flip(1).bool()
        inside = (~over & (ids > token - most) & are_real(observed)).float()
        extra = (~repeated).float()  # [B, 1]
        total = (observed.float() * inside[:, None, :, None]).sum(2) + queries * extra[..., None]
        counted = (inside.sum(1, keepdim=True) + extra).clamp_min(1)
        mean: Tensor = total / counted[..., None]
        return mean


def split(ended: Tensor, counts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Split the tokens of each sequence into sentences of at most `longest` tokens.

    Args:
        ended: True for tokens that end a sentence, bool `[B, n]`.
        counts: Number of tokens of each sequence, int64 `[B]`.
        longest: Number of tokens after which a sentence is cut.

    Returns:
        The first token of each sentence (-1 for an unused entry), and the length of each sentence
        (0 for an unused entry), both int64 `[B, U]` for at most `U` sentences.
    """
    if not ended.shape[1]:
        return counts[:, None][:, :0], counts[:, None][:, :0]
    rank = torch.arange(ended.shape[1], device=ended.device)
    first = torch.where(pad(ended[:, :-1], (1, 0), value=True), rank, 0).cummax(1).values
    starts = compact(((rank - first) % longest == 0) & (rank < counts[:, None]))
    ends = pad(starts[:, 1:], (0, 1), value=UNUSED)
    ends = torch.where(ends < 0, counts[:, None], ends)
    return starts, (ends - starts).masked_fill(starts < 0, 0)
