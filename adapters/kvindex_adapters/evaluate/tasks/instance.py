"""Task instances: a context that is read once, questions that follow it, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvindex_adapters.evaluate.tasks.scoring import contains, is_settled

Metric = Callable[[str, tuple[str, ...]], float]
"""Function of an answer and its references that returns which fraction of the answer is right, in
[0, 1]."""


@dataclass(frozen=True)
class Question:
    """A question that follows a context.

    Args:
        ids: Int64 `[n]`: the question, the end of the user's message, and the generation prompt.
        answers: References that the metric compares an answer with.
        max_new_tokens: Longest answer, in tokens.
        metric: The metric.
    """

    ids: Tensor
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: Metric = contains


@dataclass(frozen=True)
class Instance:
    """One random instance of a task.

    Args:
        task: Name of the task.
        seed: Seed of the random numbers.
        context: Ids int64 `[N]` of the context.
        questions: Questions about it.
        depth: Position of the answer in the context, from 0 to 1, or None if it has no single
            position.
    """

    task: str
    seed: int
    context: Tensor
    questions: tuple[Question, ...]
    depth: float | None = None

    def tokens(self) -> int:
        """Return the tokens of the context and the longest question."""
        return len(self.context) + max(len(question.ids) for question in self.questions)

    def score(self, number: int, answer: str) -> float:
        """Return the fraction of question `number` that an answer has right, in [0, 1]."""
        question = self.questions[number]
        return question.metric(answer, question.answers)

    def settled(self, number: int, answer: str) -> bool:
        """Return True if no further text can change the answer's score."""
        question = self.questions[number]
        return is_settled(question.metric, answer, question.answers)
