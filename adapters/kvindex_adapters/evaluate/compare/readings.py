"""Read a text, or the prompt of a task, once with full attention, and measure all indexes on it."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate.compare import continuation
from kvindex_adapters.evaluate.compare.answers import Limit, checked, continued
from kvindex_adapters.evaluate.compare.records import Record
from kvindex_adapters.evaluate.compare.replay import Chunk, FullAttention, Indexed
from kvindex_adapters.evaluate.tasks import Instance

DIGITS = 6
"""Number of significant digits to which a divergence is rounded before it is stored."""


class InstanceReading:
    """A prompt of a task that a model with full attention has read and answered.

    `context` has the keys and values of the prompt before the questions, which are copied to each
    index. `own` is the result of full attention.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, instance: Instance) -> None:
        self._tokenizer, self._instance = tokenizer, instance
        full = FullAttention(model)
        self.context, _ = full.read(instance.context)
        before = full.checkpoint()
        self._asked: list[tuple[Chunk, list[int], Limit]] = []
        for number, question in enumerate(instance.questions):
            chunk, logits = full.read(question.ids)
            settled = partial(_settled, instance, tokenizer, number)
            limit = Limit.of(model, question.max_new_tokens, settled)
            guesses = _as_ids(tokenizer, question.answers)
            draft = continued(full, [int(logits.argmax())], limit, guesses)
            full.rollback(before)
            self._asked.append((chunk, draft, limit))
        self.own = self._record([draft for _, draft, _ in self._asked])

    def through(self, indexed: Indexed, k: int) -> Record:
        """Answer the questions with an index, and return the scores and answers.

        Args:
            indexed: A model with an index that contains the context.
            k: Number of tokens that each decode step retrieves per KV head.
        """
        answers = []
        for chunk, draft, limit in self._asked:
            with indexed.branch(k):
                logits = indexed.read(chunk)
                first = draft[0] if logits is None else int(logits.argmax())
                answers.append(checked(indexed, first, draft, limit))
        return self._record(answers)

    def _record(self, answers: list[list[int]]) -> Record:
        texts = [_text(self._tokenizer, ids) for ids in answers]
        scores = [self._instance.score(number, text) for number, text in enumerate(texts)]
        about = {"prompt_tokens": self._instance.tokens(), "depth": self._instance.depth}
        return {**about, "scores": scores, "answers": texts}


class TextReading:
    """A text that a model has read with full attention. Indexes are measured on its last tokens.

    The last `steps` tokens of the text are read one by one. The logits at these tokens are stored,
    to compare them with those of indexes. `context` is the text before these tokens, which is
    copied to each index. `own` is the result of full attention.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, steps: int) -> None:
        full, ids = FullAttention(model), ids.to(model.device)
        self.context, _ = full.read(ids[:-steps])
        self._steps = ids[-steps:]
        cost = continuation.dense_cost(full, self._steps)
        self._logits = continuation.dense_logits(full, self._steps)
        everything = {"recall": 1.0, "coverage": 1.0, "weighted": False}
        self.own = self._record(torch.zeros(steps), torch.ones(steps), everything, cost)

    def through(self, indexed: Indexed, k: int) -> Record:
        """Measure an index on the last `steps` tokens of the text, and return the result.

        Args:
            indexed: A model with an index that contains all earlier tokens of the text.
            k: Number of tokens that each decode step retrieves per KV head.
        """
        cost = continuation.cost(indexed, self._steps, k=k)
        kl, same, found = continuation.divergence(indexed, self._steps, self._logits, k=k)
        return self._record(kl, same, {**found.means(), "weighted": found.weighted}, cost)

    def _record(self, kl: Tensor, same: Tensor, found: Record, cost: continuation.Steady) -> Record:
        rounded = [float(f"{value:.{DIGITS}g}") for value in kl.tolist()]
        return {"kl": rounded, "same": same.int().tolist(), **found, **asdict(cost)}


def _settled(instance: Instance, tokenizer: Any, number: int, answer: list[int]) -> bool:
    return instance.settled(number, _text(tokenizer, answer))


def _as_ids(tokenizer: Any, answers: tuple[str, ...]) -> list[list[int]]:
    """Convert each right answer to token ids twice: without and with a space before it."""
    texts = [space + answer for answer in answers for space in ("", " ")]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _text(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
