"""Generate greedy answers with full attention and with an index.

To save time, the model reads several guessed tokens in one forward pass, and accepts them up to the
first that is not the most likely token, as in speculative decoding (Stern et al., 2018). With full
attention, the guess is a right answer. With an index, the guess is the answer of full attention.
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
    """A model with a KV cache that can be restored to an earlier state."""

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Read tokens with ids int64 `[T]`, and return the logits `[T, V]` after each token."""
        ...

    def checkpoint(self) -> Any:
        """Return the state of the KV cache, for a later call of `rollback`."""
        ...

    def rollback(self, checkpoint: Any) -> None:
        """Restore the KV cache to a state that the method `checkpoint` returned before."""
        ...


def _never(answer: list[int]) -> bool:
    return False


@dataclass(frozen=True)
class Limit:
    """The conditions under which the generation of an answer stops.

    Args:
        most: Maximum length of an answer in tokens.
        ends: Ids of tokens that end an answer.
        settled: Function that takes an answer's token ids, and returns True if no further token can
            change the answer's score.
    """

    most: int
    ends: Collection[int] = ()
    settled: Callable[[list[int]], bool] = _never

    @classmethod
    def of(
        cls, model: PreTrainedModel, most: int, settled: Callable[[list[int]], bool] = _never
    ) -> Self:
        """Create a `Limit` whose tokens `ends` are the EOS tokens of the model's generation config.

        The other arguments are those of the class.
        """
        config: Any = model.generation_config
        end = None if config is None else config.eos_token_id
        ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
        return cls(most, ends, settled)

    def reached(self, answer: list[int]) -> bool:
        """Return True if generation stops after these tokens of an answer (at least one token)."""
        return len(answer) >= self.most or answer[-1] in self.ends or self.settled(answer)


def continued(
    steps: Steps, answer: list[int], limit: Limit, guesses: Sequence[list[int]] = ()
) -> list[int]:
    """Continue an answer with the most likely tokens, and return the whole answer.

    Args:
        steps: The model and its KV cache, which contains all tokens but the last one of `answer`.
        answer: Token ids of the beginning of the answer.
        limit: The conditions under which the answer ends.
        guesses: Token ids of texts that the answer may contain. If the last tokens of the answer
            are the beginning of such a text, the rest of the text is used as draft tokens, which
            the model verifies in one forward pass.
    """
    answer = list(answer)
    while not limit.reached(answer):
        for token in _most_likely(steps, answer[-1], expected(answer, guesses)):
            answer.append(token)
            if limit.reached(answer):
                break
    return answer


def checked(indexed: Indexed, first: int, draft: list[int], limit: Limit) -> list[int]:
    """Generate the answer of a model with an index. Its cache already contains the prompt.

    If the index supports parallel decode steps, these steps verify tokens of the draft: they accept
    all tokens before the first one that is not the most likely token with the index. The remaining
    tokens are generated one by one.

    Args:
        indexed: The model with the index.
        first: Id of the first token of the answer.
        draft: Token ids of the answer of full attention.
        limit: The conditions under which the answer ends.
    """
    answer = [first]
    indexed.begin()
    while indexed.parallel and len(answer) < len(draft) and answer == draft[: len(answer)]:
        ahead = draft[len(answer) : -1][: BLOCK - 1]
        answer += _most_likely(indexed, answer[-1], ahead)
    indexed.pause()
    return continued(indexed, answer, limit)


def expected(answer: list[int], guesses: Sequence[list[int]]) -> list[int]:
    """Predict the next tokens of an answer from texts that it may contain (guesses).

    Compare the beginning of each guess with the end of the answer. Choose the guess with the
    longest match, and return the rest of its tokens. Return an empty list if no guess matches.
    """
    rest, longest = list[int](), 0
    for guess in guesses:
        for size in range(min(len(answer), len(guess) - 1), longest, -1):
            if answer[-size:] == guess[:size]:
                rest, longest = guess[size:], size
                break
    return rest[: BLOCK - 1]


def _most_likely(steps: Steps, token: int, ahead: list[int]) -> list[int]:
    """Verify the draft tokens `ahead`, which may follow `token`, in one forward pass.

    Draft tokens are accepted up to the first that is not the most likely token. Return the accepted
    tokens, followed by the most likely next token, which the model has not read.
    """
    before = steps.checkpoint()
    found = _after(steps, [token, *ahead])
    right = _common(found, ahead)
    if right < len(ahead):  # remove all tokens, and read only the accepted ones again
        steps.rollback(before)
        _after(steps, [token, *ahead[:right]])
    return found[: right + 1]


def _after(steps: Steps, ids: list[int]) -> list[int]:
    """Read tokens with the given ids, and return the id of the most likely token after each."""
    logits = steps.step(torch.tensor(ids, device=steps.model.device))
    found: list[int] = logits.argmax(-1).tolist()
    return found


def _common(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
