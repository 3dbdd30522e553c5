"""Greedy answers: full attention's, and an index's, which is the same until a token differs.

Tokens that are expected are read at once, and stay as far as they are the likeliest (as speculative
decoding does it: Stern et al., 2018): of full attention what a right answer has, of an index what
full attention says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate.compare.replay import Indexed
from kvindex_adapters.evaluate.fidelity import BLOCK


class Steps(Protocol):
    """A model and a cache of it, which can go back."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`: the logits `[T, V]` after each of them."""
        ...

    def checkpoint(self) -> Any:
        """What the cache is now, for `rollback`."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says."""
        ...


def _never(answer: list[int]) -> bool:
    return False


@dataclass(frozen=True)
class Limit:
    """Where an answer ends: after `most` tokens, after a token whose id is one of `ends`, or when
    it is `settled`: nothing that follows makes it better or worse.
    """

    most: int
    ends: Collection[int] = ()
    settled: Callable[[list[int]], bool] = _never

    @classmethod
    def of(
        cls, model: PreTrainedModel, most: int, settled: Callable[[list[int]], bool] = _never
    ) -> Self:
        """With the ids that end the model's answers."""
        config: Any = model.generation_config
        end = None if config is None else config.eos_token_id
        ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
        return cls(most, ends, settled)

    def reached(self, answer: list[int]) -> bool:
        """Whether an answer of a token or more ends here."""
        return len(answer) >= self.most or answer[-1] in self.ends or self.settled(answer)


def continued(
    steps: Steps, answer: list[int], limit: Limit, guesses: Sequence[list[int]] = ()
) -> list[int]:
    """An answer, whose last token is not read yet, and the most likely tokens that follow.

    guesses: ids that may come: where the answer ends with what one begins with, its rest is tried.
    """
    answer = list(answer)
    while not limit.reached(answer):
        for token in _likeliest(steps, answer[-1], expected(answer, guesses)):
            answer.append(token)
            if limit.reached(answer):
                break
    return answer


def checked(indexed: Indexed, draft: list[int], limit: Limit) -> list[int]:
    """The answer through an index that has read the prompt; draft: full attention's answer.

    Its first token is the draft's: it follows the prompt, which every index reads exactly. Where
    steps may come at once they read the draft, up to the first token that is not the likeliest.
    The rest comes token by token.
    """
    answer = draft[:1]
    indexed.begin()
    while indexed.parallel and len(answer) < len(draft) and answer == draft[: len(answer)]:
        ahead = draft[len(answer) : -1][: BLOCK - 1]
        answer += _likeliest(indexed, answer[-1], ahead)
    indexed.pause()
    return continued(indexed, answer, limit)


def expected(answer: list[int], guesses: Sequence[list[int]]) -> list[int]:
    """What follows in the guess whose beginning is the most of the answer's end."""
    rest, longest = list[int](), 0
    for guess in guesses:
        for size in range(min(len(answer), len(guess) - 1), longest, -1):
            if answer[-size:] == guess[:size]:
                rest, longest = guess[size:], size
                break
    return rest[: BLOCK - 1]


def _likeliest(steps: Steps, token: int, ahead: list[int]) -> list[int]:
    """The most likely tokens after a token: those of `ahead` that are, and one more.

    The token is read, and all that is given but the last.
    """
    before = steps.checkpoint()
    found = _after(steps, [token, *ahead])
    right = _common(found, ahead)
    if right < len(ahead):  # read what is right, and no more
        steps.rollback(before)
        _after(steps, [token, *ahead[:right]])
    return found[: right + 1]


def _after(steps: Steps, ids: list[int]) -> list[int]:
    """The most likely token after each of the ids, which are read."""
    logits = steps.step(torch.tensor(ids, device=steps.model.device))
    found: list[int] = logits.argmax(-1).tolist()
    return found


def _common(some: list[int], others: list[int]) -> int:
    """Number of tokens that two answers begin with alike."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
