"""Instances of tasks: a context that is read once, questions that follow it, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvindex_adapters.evaluate.tasks.scoring import contains, is_settled

Metric = Callable[[str, tuple[str, ...]], float]
"""Called with an answer and what was asked for; the share that is right, in [0, 1]."""


@dataclass(frozen=True)
class Question:
    """What follows a context.

    ids: int64 `[n]`, the question, the turn's end and the cue to answer; answers: what the metric
    compares an answer with; max_new_tokens: of an answer.
    """

    ids: Tensor
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: Metric = contains


@dataclass(frozen=True)
class Instance:
    """One drawing of a task: its name, its seed, the context's ids int64 `[N]`, its questions.

    depth: where in the context the answer stands, from 0 to 1; None where it is not at one place.
    """

    task: str
    seed: int
    context: Tensor
    questions: tuple[Question, ...]
    depth: float | None = None

    def tokens(self) -> int:
        """Tokens of the context and the longest question."""
        return len(self.context) + max(len(question.ids) for question in self.questions)

    def score(self, number: int, answer: str) -> float:
        """The share of question `number` that an answer has right, in [0, 1]."""
        question = self.questions[number]
        return question.metric(answer, question.answers)

    def settled(self, number: int, answer: str) -> bool:
        """Whether whatever follows makes the answer neither better nor worse."""
        question = self.questions[number]
        return is_settled(question.metric, answer, question.answers)
