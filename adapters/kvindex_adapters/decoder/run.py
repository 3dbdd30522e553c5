"""`Run`: the loop from a prompt to the end of its answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex_adapters.decoder.sampling import Sampler, Sampling
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.hf.prefill import Progress


@dataclass(frozen=True)
class Run:
    """A session without tokens, and what shall be made in it.

    ids: the prompts int64 `[B, N]`; chunk: tokens of them that are read at a time; stops: tokens
    that end an answer.
    """

    session: Session
    ids: Tensor
    sampling: Sampling
    max_new_tokens: int
    chunk: int
    stops: Collection[int]

    def tokens(self, on_progress: Progress | None = None) -> Iterator[Tensor]:
        """Tokens int64 `[B]`, one of each row at a time, until each row has had a stop token."""
        sampler, running = Sampler(self.sampling, self.ids.device), set(range(len(self.ids)))
        room = self.ids.shape[1] + self.max_new_tokens
        logits = self.session.read_prompt(self.ids, self.chunk, room, on_progress)
        for number in range(1, self.max_new_tokens + 1):
            token = sampler.choose(logits)
            yield token
            if self.stops:
                seen = token.tolist()
                running -= {row for row in running if seen[row] in self.stops}
            if not running or number == self.max_new_tokens:
                return
            logits = self.session.step(token)

    def cut(self, tokens: list[Tensor]) -> list[Tensor]:
        """The answer int64 `[N]` of each row: its tokens up to the first stop token, with it."""
        answers = []
        for row in torch.stack(tokens, dim=1):
            ended = [place for place, token in enumerate(row.tolist()) if token in self.stops]
            answers.append(row[: ended[0] + 1] if ended else row)
        return answers
