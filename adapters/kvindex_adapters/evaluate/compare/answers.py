"""Generate greedy answers with full attention, and with an index.

Several expected tokens are read in one step, and accepted as long as they are the most likely ones,
as in speculative decoding (Stern et al., 2018). For full attention, the expected tokens are those
of a right answer. For an index, they are full attention's answer.
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
    """A model with a cache that can be restored to an earlier state."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Read ids int64 `[T]`, and return the logits `[T, V]` after each of them."""
        ...

    def checkpoint(self) -> Any:
        """Return the state of the cache, for `rollback`."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned."""
        ...


def _never(answer: list[int]) -> bool:
    return False


@dataclass(frozen=True)
class Limit:
    """Where an answer ends.

    Args:
        most: Longest answer, in tokens.
        ends: Ids of tokens that end an answer.
        settled: Function of an answer that returns True if no further token can change its score.
    """

    most: int
    ends: Collection[int] = ()
    settled: Callable[[list[int]], bool] = _never

    @classmethod
    def of(
        cls, model: PreTrainedModel, most: int, settled: Callable[[list[int]], bool] = _never
    ) -> Self:
        """Make a limit, with the end tokens of the model's generation configuration."""
        config: Any = model.generation_config
        end = None if config is None else config.eos_token_id
        ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
        return cls(most, ends, settled)

    def reached(self, answer: list[int]) -> bool:
        """Return True if an answer of at least one token ends here."""
        return len(answer) >= self.most or answer[-1] in self.ends or self.settled(answer)


def continued(
    steps: Steps, answer: list[int], limit: Limit, guesses: Sequence[list[int]] = ()
) -> list[int]:
    """Continue an answer with the most likely tokens. Its last token has not been read yet.

    Args:
        steps: The model and its cache.
        answer: The tokens so far.
        limit: Where the answer ends.
        guesses: Ids that may follow. If the answer's end equals the beginning of a guess, the rest
            of that guess is tried.
    """
    answer = list(answer)
    while not limit.reached(answer):
        for token in _most_likely(steps, answer[-1], expected(answer, guesses)):
            answer.append(token)
            if limit.reached(answer):
                break
    return answer


def checked(indexed: Indexed, draft: list[int], limit: Limit) -> list[int]:
    """Return the answer with an index that has read the prompt.

    The first token is the draft's, because every index reads the prompt exactly. If steps can run
    in parallel, they read the draft up to the first token that is not the most likely one with the
    index. The rest is generated token by token.

    Args:
        indexed: The model with the index.
        draft: Full attention's answer.
        limit: Where the answer ends.
    """
    answer = draft[:1]
    indexed.begin()
    while indexed.parallel and len(answer) < len(draft) and answer == draft[: len(answer)]:
        ahead = draft[len(answer) : -1][: BLOCK - 1]
        answer += _most_likely(indexed, answer[-1], ahead)
    indexed.pause()
    return continued(indexed, answer, limit)


def expected(answer: list[int], guesses: Sequence[list[int]]) -> list[int]:
    """Find the guess whose beginning equals the longest possible end of the answer. Return its
    rest."""
    rest, longest = list[int](), 0
    for guess in guesses:
        for size in range(min(len(answer), len(guess) - 1), longest, -1):
            if answer[-size:] == guess[:size]:
                rest, longest = guess[size:], size
                break
    return rest[: BLOCK - 1]


def _most_likely(steps: Steps, token: int, ahead: list[int]) -> list[int]:
    """Read a token, and the tokens of `ahead` up to the first that is not the most likely one.

    Return the accepted tokens of `ahead`, and the next most likely token, which has not been read.
    """
    before = steps.checkpoint()
    found = _after(steps, [token, *ahead])
    right = _common(found, ahead)
    if right < len(ahead):  # read again, only the accepted tokens
        steps.rollback(before)
        _after(steps, [token, *ahead[:right]])
    return found[: right + 1]


def _after(steps: Steps, ids: list[int]) -> list[int]:
    """Read ids, and return the most likely token after each of them."""
    logits = steps.step(torch.tensor(ids, device=steps.model.device))
    found: list[int] = logits.argmax(-1).tolist()
    return found


def _common(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix of two answers."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
