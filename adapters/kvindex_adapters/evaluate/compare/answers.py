"""Greedy answers: full attention's, and an index's, which is the same until a token differs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate.compare.replay import Indexed
from kvindex_adapters.evaluate.fidelity import BLOCK


class Steps(Protocol):
    """A model and a cache of it."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`: the logits `[T, V]` after each of them."""
        ...


@dataclass(frozen=True)
class Limit:
    """Where an answer ends: after `most` tokens, or after a token whose id is one of `ends`."""

    most: int
    ends: Collection[int] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, most: int) -> Self:
        """With the ids that end the model's answers."""
        config: Any = model.generation_config
        end = None if config is None else config.eos_token_id
        return cls(most, () if end is None else (end,) if isinstance(end, int) else tuple(end))

    def reached(self, answer: list[int]) -> bool:
        """Whether an answer of a token or more ends here."""
        return len(answer) >= self.most or answer[-1] in self.ends


def continued(steps: Steps, answer: list[int], limit: Limit) -> list[int]:
    """An answer, whose last token is not read yet, and the most likely tokens that follow."""
    answer = list(answer)
    while not limit.reached(answer):
        answer += _likeliest(steps, answer[-1:])
    return answer


def checked(indexed: Indexed, draft: list[int], limit: Limit) -> list[int]:
    """The answer through an index that has read the prompt; draft: full attention's answer.

    Its first token is the draft's: it follows the prompt, which every index reads exactly. Where
    steps may come at once they read the draft: as long as its tokens are those that the index
    finds most likely, they are the index's answer. The rest comes token by token.
    """
    answer = draft[:1]
    indexed.begin()
    while indexed.parallel and len(answer) < len(draft):
        block = draft[len(answer) - 1 : -1][:BLOCK]
        before = indexed.cache.checkpoint()
        found = _likeliest(indexed, block)
        right = _common(found, draft[len(answer) :])
        answer += found[: right + 1]
        if right < len(block):  # read what is right, and no more
            indexed.cache.rollback(before)
            _likeliest(indexed, block[: right + 1])
            break
    indexed.pause()
    return continued(indexed, answer, limit)


def _likeliest(steps: Steps, ids: list[int]) -> list[int]:
    """The most likely token after each of the ids, which are read."""
    logits = steps.step(torch.tensor(ids, device=steps.model.device))
    return [int(token) for token in logits.argmax(-1)]


def _common(some: list[int], others: list[int]) -> int:
    """Number of tokens that two answers begin with alike."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
