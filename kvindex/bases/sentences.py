"""`Sentences`: where the sentences of a text end, and the queries of the newest sentence."""

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
    """Ends of sentences, and the newest queries. A query belongs to the sentence of its token.

    Attributes:
        ends: For the first `X` tokens, True if the token ends a sentence: bool `[B, X]`, or `[1,
            X]` for all sequences.
        queries: Newest queries since the prompt ended, `[B, H, n, D]`.
        positions: Token ids of these queries, int64 `[n]` on the CPU, ascending.
        newest: Token id of the newest query that was ever observed, -1 for none.
        prompt_ended: True once the prompt is complete.
    """

    ends: Tensor
    queries: Tensor
    positions: OnHost
    newest: int = -1
    prompt_ended: bool = False

    @staticmethod
    def empty(geometry: Geometry) -> Sentences:
        """Return the state before the first signal."""
        g = geometry
        ends = torch.empty((1, 0), dtype=torch.bool, device=g.device)
        queries = torch.empty((1, g.q_heads, 0, g.head_dim), dtype=g.dtype, device=g.device)
        return Sentences(ends, queries, torch.empty(0, dtype=torch.int64))

    def with_ends(self, ends: Tensor, first: int) -> Sentences:
        """Set the ends, bool `[B or 1, T]`, of the tokens from `first` on.

        Ends that were set before for these or later tokens are dropped. If the batch size differs,
        all ends that were set before are dropped.
        """
        old = self.ends[:, :first]
        old = pad(old, (0, first - old.shape[1]))
        rows = max(len(old), len(ends))
        if len(old) not in (1, rows):
            old = torch.zeros_like(old[:1])
        ends = torch.cat([old.expand(rows, -1), ends.expand(rows, -1)], dim=1)
        return replace(self, ends=ends)

    def with_queries(self, queries: Tensor, positions: Tensor, most: int) -> Sentences:
        """Add queries `[B, H, T, D]` of tokens with ids int64 `[T]`, and keep the newest `most`.

        Queries with ids at or after the first new id are dropped: their tokens were truncated.
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
        """Return the state without the tokens from `length` on."""
        remaining = self.positions < length
        queries, newest = self.queries[:, :, : int(remaining.sum())], min(self.newest, length - 1)
        ends, positions = self.ends[:, :length], self.positions[remaining]
        return replace(self, ends=ends, queries=queries, positions=positions, newest=newest)

    def reordered(self, order: Tensor) -> Sentences:
        """Return the state for a reordered batch: sequence `b` becomes `order[b]`."""
        ends = self.ends[order] if len(self.ends) > 1 else self.ends
        queries = self.queries[order] if len(self.positions) else self.queries
        return replace(self, ends=ends, queries=queries)

    def ends_at(self, ids: Tensor) -> Tensor:
        """Return True where a token ends a sentence; ids: int64 `[B, n]`, at least 0."""
        count = self.ends.shape[1]
        if not count:
            return torch.zeros_like(ids, dtype=torch.bool)
        flags = self.ends.expand(len(ids), -1).gather(1, ids.clamp(0, count - 1))
        return flags & (ids < count)

    def mean_query(self, queries: Tensor, most: int) -> Tensor:
        """Return the mean query of the current sentence, float32 `[B, H, D]`.

        Args:
            queries: `[B, H, D]`. If they equal the newest observed queries, they belong to the same
                token, else to the next token.
            most: Largest number of queries in the mean: the last ones of the sentence.
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
    """Split tokens into sentences.

    Args:
        ended: True for tokens that end a sentence, bool `[B, n]`.
        counts: Number of tokens of each sequence, int64 `[B]`.
        longest: Number of tokens after which a sentence is cut.

    Returns:
        The first token of each sentence (-1 for an unused entry), and the length of each sentence
        (0 for an unused entry), both int64 `[B, U]`.
    """
    if not ended.shape[1]:
        return counts[:, None][:, :0], counts[:, None][:, :0]
    rank = torch.arange(ended.shape[1], device=ended.device)
    first = torch.where(pad(ended[:, :-1], (1, 0), value=True), rank, 0).cummax(1).values
    starts = compact(((rank - first) % longest == 0) & (rank < counts[:, None]))
    ends = pad(starts[:, 1:], (0, 1), value=UNUSED)
    ends = torch.where(ends < 0, counts[:, None], ends)
    return starts, (ends - starts).masked_fill(starts < 0, 0)
