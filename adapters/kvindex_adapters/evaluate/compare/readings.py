"""Read a text, or the prompt of a task, once with full attention, and measure all indexes on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate.compare import continuation
from kvindex_adapters.evaluate.compare.answers import Limit, checked, continued
from kvindex_adapters.evaluate.compare.outputs import LayerSteps, measure_outputs
from kvindex_adapters.evaluate.compare.records import Record
from kvindex_adapters.evaluate.compare.replay import (
    Chunk,
    FullAttention,
    Indexed,
    recorded,
)
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

    def through(self, indexed: Indexed, k: int | str) -> Record:
        """Answer the questions with an index, and return the scores and answers.

        If `k` is "auto", the result also has the mean number of rows that steps have retrieved.

        Args:
            indexed: A model with an index that contains the context.
            k: Number of tokens that each decode step retrieves per KV head, or "auto".
        """
        answers, rows = [], list[float]()
        for chunk, draft, limit in self._asked:
            with indexed.branch(k):
                logits = indexed.read(chunk)
                first = draft[0] if logits is None else int(logits.argmax())
                answers.append(checked(indexed, first, draft, limit))
                found = indexed.cache.report().rows_found
                rows += [] if found is None else [found.mean]
        record = self._record(answers)
        return record | {"rows_found": fmean(rows)} if rows else record

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

    def through(self, indexed: Indexed, k: int | str) -> Record:
        """Measure an index on the last `steps` tokens of the text, and return the result.

        Args:
            indexed: A model with an index that contains all earlier tokens of the text.
            k: Number of tokens that each decode step retrieves per KV head, or "auto".
        """
        cost = continuation.cost(indexed, self._steps, k=k)
        kl, same, found, rows = continuation.divergence(indexed, self._steps, self._logits, k=k)
        if rows is not None:  # of all steps, not only of those whose time is measured
            read = cost.rows_read + rows.mean - cost.rows_found
            cost = replace(cost, rows_found=rows.mean, rows_read=read)
        return self._record(kl, same, {**found.means(), "weighted": found.weighted}, cost)

    def _record(self, kl: Tensor, same: Tensor, found: Record, cost: continuation.Steady) -> Record:
        rounded = [float(f"{value:.{DIGITS}g}") for value in kl.tolist()]
        return {"kl": rounded, "same": same.int().tolist(), **found, **asdict(cost)}


class FieldReading:
    """A text that a model with full attention has read, for a suite that compares all indexes.

    The last `steps` tokens of the text are the measured decode steps. Everything that an index
    needs is recorded while the model reads the text once: `context` has the queries, keys and
    values of the text before the steps, and the layers' inputs and outputs at the steps are the
    ground truth. `own` is the result of full attention.

    Args:
        model: The model.
        ids: Token ids of the text, int64 `[N]`.
        steps: Number of tokens at the end of the text that are decode steps.
        options: Sizes of the sink, the local window and so on, as keyword arguments of `attach`.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, steps: int, options: Mapping[str, Any]
    ) -> None:
        ids = ids.to(model.device)
        self._steps, sink = ids[-steps:], int(options.get("sink", 64))
        full = recorded(model, ids[:-steps], self._steps, **options)
        self.context, self._logits = full.context, full.logits
        self.rows = max(full.indexed - sink, 0)  # tokens that a search can return
        prompts = [layer["keys"] for layer in self.context.layers if "queries" in layer]
        pairs = zip(prompts, full.taken, strict=True)
        self._layers = [LayerSteps(keys, taken, sink) for keys, taken in pairs]
        self.own = self._own(len(ids), full.row_bytes)

    def through(self, indexed: Indexed, k: int) -> Record:
        """Measure an index on the last `steps` tokens of the text, and return the result.

        Args:
            indexed: A model with an index that contains all earlier tokens of the text.
            k: Number of tokens that each decode step retrieves per KV head.
        """
        indexed.end_prompt()
        kl, same = continuation.predictions(indexed, self._steps, self._logits, k=k)
        outputs = measure_outputs(indexed, self._layers, k=k)
        return _rounded({"kl": kl.tolist(), "same": same.int().tolist(), **outputs})

    def skips(self, k: int) -> str | None:
        """Return the reason why `k` is not measured on this text, or None."""
        if k < self.rows:
            return None
        return (
            f"k: got {k:,}, but after this prompt the index contains {self.rows:,} rows, so every "
            "index would return all of them; pass longer prompts"
        )

    def _own(self, tokens: int, row: int) -> Record:
        """Return the result of full attention, with which indexes are compared.

        `row` is the bytes of one token in all layers, of `tokens` tokens in all.
        """
        steps, rows, layers = len(self._steps), self._layers[0].rows, len(self._layers)
        return {
            **{"kl": [0.0] * steps, "same": [1] * steps},
            **{"recall": 1.0, "coverage": 1.0, "weighted": False},
            **{"error_by_step": [0.0] * steps, "error_by_layer": [0.0] * layers},
            **{"rows_read": rows, "rows_full": rows, "rows_found": 0.0, "key_bytes": None},
            **{"step_bytes": 0.0, "scan_bytes": 0.0},
            **{"read_bytes": rows * row, "full_bytes": rows * row},
            "nbytes": {"rows": tokens * row},
        }


def _rounded(record: Record) -> Record:
    """Round all numbers in the lists of a result to `DIGITS` significant digits."""
    return {
        name: [_digits(one) for one in value] if isinstance(value, list) else value
        for name, value in record.items()
    }


def _digits(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _settled(instance: Instance, tokenizer: Any, number: int, answer: list[int]) -> bool:
    return instance.settled(number, _text(tokenizer, answer))


def _as_ids(tokenizer: Any, answers: tuple[str, ...]) -> list[list[int]]:
    """Convert each right answer to token ids twice: without and with a space before it."""
    texts = [space + answer for answer in answers for space in ("", " ")]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _text(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
