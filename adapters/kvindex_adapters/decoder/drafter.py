"""`Drafter`: writes drafts with a smaller model, which has a session of its own.

The session contains a beginning of the tokens that the larger model has read and written. A round
appends the tokens that are missing, and then the draft. When the larger model has verified the
draft, the accepted tokens stay, and the others are removed.

Both models have the same tokenizer, but may pad their vocabulary to different sizes. The smaller
model chooses only among tokens that the larger model has. In place of a token that it does not have
itself, it reads its last one. This changes only drafts: each token of the answer is chosen or
sampled from logits of the larger model, which reads the true tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kvindex.core.graphs import GRAPHS
from kvindex_adapters.common.speculation import resized
from kvindex_adapters.decoder.graph import TokenGraph
from kvindex_adapters.decoder.sampling import Sampler, Sampling
from kvindex_adapters.decoder.session import Session

WAITING = 2
"""Largest number of tokens that a round appends before its draft. After a round whose draft was
accepted as a whole, these are the last draft and the token after it. More tokens are read like a
prompt."""


class Draft(NamedTuple):
    """A draft.

    Attributes:
        tokens: Int64 `[B, n]`.
        distributions: The probabilities from which each token was sampled, float32 `[B, V]` each,
            or [] for a greedy draft. `V` is the larger model's number of tokens.
    """

    tokens: Tensor
    distributions: list[Tensor]


class Drafter:
    """Writes drafts with a smaller model.

    Args:
        session: An empty session of the smaller model, for as many sequences as the larger model
            has.
        source: The object that read the smaller model's weights.
        chunk: Number of tokens of each prompt that a layer computes at a time.
        vocabulary: Number of tokens that the larger model has, padding included.
    """

    def __init__(self, session: Session, source: object, chunk: int, vocabulary: int) -> None:
        self._session, self._source, self._chunk = session, source, chunk
        self._vocabulary = vocabulary
        # all tokens that the larger model has verified, [B, N]. Those of the session come first.
        self._ids = torch.zeros(len(session.padding), 0, dtype=torch.int64)
        self._room, self._intact = 0, True
        self._graph: TokenGraph | None = None  # None where decode steps run op by op

    def serves(self, source: object) -> bool:
        """Return True if the session belongs to the weights `source`, and no error has left it in
        an unknown state."""
        return self._intact and self._source is source

    @property
    def weight_bytes(self) -> int:
        """Bytes of the smaller model's weights that a decode step reads."""
        return self._session.weight_bytes

    def fork(self) -> Drafter:
        """Make an independent drafter whose session has the same tokens."""
        other = Drafter(self._session.duplicate(), self._source, self._chunk, self._vocabulary)
        other._ids, other._intact = self._ids, self._intact
        return other

    def follow(self, ids: Tensor, room: int, *, graphs: bool) -> None:
        """Begin an answer. Tokens of the session that differ are removed.

        Missing tokens are read before the first draft.

        Args:
            ids: All tokens of each sequence, int64 `[B, N]`, with padding on the left. The last one
                is the first token of the answer.
            room: Number of tokens per sequence for which to reserve memory.
            graphs: Whether a decode step may run as one CUDA graph.
        """
        session = self._session
        device = session.token.device
        self._room = room
        with session.exclusive():
            known = self._ids[:, : session.length]
            length = min(known.shape[1], ids.shape[1] - 1)
            same = (known[:, :length] == ids[:, :length]).all(0)
            shared = int(same.long().cumprod(0).sum())
            if shared < session.length:
                self._intact = False
                session.keep(shared)
                self._intact = True
            self._ids = ids
        self._graph = None
        if graphs and device.type in GRAPHS:
            greedy = Sampler(Sampling(), device, session.fused)
            self._graph = TokenGraph(session, greedy, vocabulary=self._vocabulary)

    def append(self, tokens: Tensor) -> None:
        """Append verified tokens, int64 `[B, m]`, to the tokens that the next draft continues."""
        self._ids = torch.cat([self._ids, tokens], dim=1)

    @contextmanager
    def drafting(self, count: int, sampler: Sampler, device: torch.device) -> Iterator[Draft]:
        """Context manager that yields a draft.

        Call `append` with the verified tokens in the `with` block. At its end, those drafted tokens
        that are not among them are removed from the session. If the block raises an exception, all
        tokens of the draft are removed.

        Args:
            count: Number of tokens of the draft, at least 1.
            sampler: The sampler of the larger model. It also samples the draft, so that its random
                numbers are independent of those of the verification.
            device: Device of the larger model.
        """
        session = self._session
        self._catch_up()
        waiting = self._readable(session.length)
        start = session.length
        with session.speculating(WAITING):
            if self._graph is None or sampler.samples:
                yield self._written(waiting, count, sampler, device)
            else:
                yield self._replayed(self._graph, waiting, count, device)
            # no later step has the last token as its input yet
            end = min(session.length, self._ids.shape[1] - 1)
            if end < session.length:
                session.keep(end)
            session.observe(self._readable(start, end))

    def _catch_up(self) -> None:
        """Read the tokens that are missing in the session, except for the last `WAITING` at
        most."""
        session = self._session
        missing = self._readable(session.length, -1)
        if session.length and missing.shape[1] < WAITING:
            return
        self._intact = False  # until all layers have the same tokens again
        session.read_prompt(missing, self._chunk, self._room)
        self._intact = True

    def _readable(self, start: int, stop: int | None = None) -> Tensor:
        """Return the verified tokens from position `start` to before `stop`, as ids that the
        smaller model has."""
        session = self._session
        known = self._ids[:, start:stop].clamp(max=session.vocabulary - 1)
        return known.to(session.token.device)

    def _written(
        self, waiting: Tensor, count: int, sampler: Sampler, device: torch.device
    ) -> Draft:
        """Append the tokens `waiting`, int64 `[B, T]`, and write a draft op by op."""
        session = self._session
        tokens, distributions = list[Tensor](), list[Tensor]()
        logits = session.score(waiting)[:, -1]
        while True:
            logits = resized(logits.to(device), self._vocabulary)
            if sampler.samples:
                distributions.append(sampler.probabilities(logits))
                tokens.append(sampler.draw(distributions[-1]))
            else:
                tokens.append(sampler.choose(logits))
            if len(tokens) == count:
                return Draft(torch.stack(tokens, dim=1), distributions)
            logits = session.draft(tokens[-1].to(session.token.device))

    def _replayed(
        self, graph: TokenGraph, waiting: Tensor, count: int, device: torch.device
    ) -> Draft:
        """Do what `_written` does with replays of a CUDA graph, one token at a time."""
        session, tokens = self._session, list[Tensor]()
        for token in waiting.unbind(1):
            session.token.copy_(token[:, None])
            graph.step(drafts=True)
        tokens.append(session.token[:, 0].clone())
        while len(tokens) < count:
            graph.step(drafts=True)
            tokens.append(session.token[:, 0].clone())
        return Draft(torch.stack(tokens, dim=1).to(device), [])
