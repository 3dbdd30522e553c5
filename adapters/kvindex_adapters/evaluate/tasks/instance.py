"""Classes for one prompt of a task: token ids of a context and of questions about it.

Each question also has its right answers, and a function that scores the model's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvindex_adapters.evaluate.tasks.scoring import contains, is_settled

Metric = Callable[[str, tuple[str, ...]], float]
"""Function that takes a model's answer and the right answers, and returns a score in [0, 1]."""


@dataclass(frozen=True)
class Question:
    """A question that follows a context, as token ids.

    Args:
        ids: Token ids of everything after the context, int64 `[n]`: the question, the end of the
            user's message, and the beginning of the answer.
        answers: Right answers, which the metric compares with the answer of the model.
        max_new_tokens: Maximum length of the answer in tokens.
        metric: Function that computes the score of an answer.
    """

    ids: Tensor
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: Metric = contains


@dataclass(frozen=True)
class Instance:
    """One prompt of a task, made from a random seed.

    Args:
        task: Name of the task.
        seed: Seed of the random numbers.
        context: Token ids of the context, int64 `[N]`.
        questions: Questions about the context.
        depth: Position of the answer in the context, from 0 (beginning) to 1 (end). None if the
            answer has several positions or none.
    """

    task: str
    seed: int
    context: Tensor
    questions: tuple[Question, ...]
    depth: float | None = None

    def tokens(self) -> int:
        """Return the number of tokens of the context and the longest question together."""
        return len(self.context) + max(len(question.ids) for question in self.questions)

    def score(self, number: int, answer: str) -> float:
        """Return the score of a model's answer to question `number`, in [0, 1]."""
        question = self.questions[number]
        return question.metric(answer, question.answers)

    def settled(self, number: int, answer: str) -> bool:
        """Return True if more text cannot change the score of an answer to question `number`."""
        question = self.questions[number]
        return is_settled(question.metric, answer, question.answers)
