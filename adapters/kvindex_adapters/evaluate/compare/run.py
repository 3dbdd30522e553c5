"""The run: a text, or an instance of a task, is read once, then goes through every index."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.readings import InstanceReading, TextReading
from kvindex_adapters.evaluate.compare.records import ANSWERS, FAILURE, FULL, TEXT, Key, Records
from kvindex_adapters.evaluate.compare.replay import indexed
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.tokenizer import punctuated
from kvindex_adapters.hf.unsupported import check_model

Progress = Callable[[int, int, str], None]
"""Called with work done, work in all, and what comes next."""

Reading = InstanceReading | TextReading

READING, STEPPING = 4, 8
"""Work of full attention's reading, and of an index along a text, whose steps come alone for a
while, next to that of an index's answers: estimates, for the time left alone."""


class Comparison:
    """A plan for one model, and the records that it fills.

    text: ids int64 `[N]` of the text on which distributions are compared. Raises ValueError for a
    model or a length that cannot be served, or a text that is too short.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        text: Tensor,
        *,
        settings: Settings,
        plan: Plan,
        records: Records,
    ) -> None:
        check_model(model)
        _check_lengths(model, text, settings, plan)
        self._model, self._tokenizer, self._text = model, tokenizer, text
        self._settings, self._plan, self._records = settings, plan, records
        self._failed: set[tuple[str | None, int]] = set()  # index, tokens
        self._options = functools.cache(
            lambda index: punctuated(index, tokenizer, settings.regions)
        )

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Measure what the records lack.

        What an index cannot do becomes a record of kind "failure", in words; the next run tries
        again.
        """
        self._records.run_on(describe(self._settings.device))
        self._forget_failures()
        missing = [(work, keys) for work in self._works() if (keys := self._missing(work))]
        done, total = 0, sum(_weight(key) for _, keys in missing for key in keys)
        for work, keys in missing:
            on_progress(done, total, _named(work))
            for key in self._measured(work, keys):
                done += _weight(key)
                on_progress(done, total, _named(key))

    def _works(self) -> Iterator[Key]:
        """What all indexes read: the keys of full attention's records."""
        for tokens in sorted(self._plan.tokens):
            yield Key(TEXT, tokens)
            for seed in range(self._plan.tries):
                for task in self._plan.tasks:
                    yield Key(ANSWERS, tokens, task=task, seed=seed)

    def _missing(self, work: Key) -> list[Key]:
        """What the records lack of it, index by index."""
        pairs = [(index, k) for index in self._plan.indexes for k in self._plan.ks]
        keys = [work, *(replace(work, index=index, k=k) for index, k in pairs)]
        return [key for key in keys if key not in self._records]

    def _measured(self, work: Key, keys: list[Key]) -> Iterator[Key]:
        """The keys one by one, once they are measured, or known not to be."""
        reading = self._reading(work)
        for index, of_index in groupby(keys, lambda key: key.index):
            if reading is None or (index, work.tokens) in self._failed:
                yield from of_index
            elif index == FULL:
                self._records.add(work, reading.own)
                yield from of_index
            else:
                yield from self._through(reading, list(of_index))

    def _reading(self, work: Key) -> Reading | None:
        """What full attention reads; None where a task cannot be made so short."""
        if work.task is None:
            return TextReading(self._model, self._text[: work.tokens], self._settings.steps)
        assert work.seed is not None
        try:
            instance = tasks.make(work.task, self._tokenizer, tokens=work.tokens, seed=work.seed)
        except ValueError as error:
            self._fail(replace(work, index=None), error)
            return None
        return InstanceReading(self._model, self._tokenizer, instance)

    def _through(self, reading: Reading, keys: list[Key]) -> Iterator[Key]:
        """The same of one index, for each `k`."""
        index, left = keys[0].index, list(keys)
        assert index is not None
        try:
            options = self._options(index)
            with indexed(self._model, reading.context.ids, index=index, **options) as cache:
                cache.read(reading.context)
                while left:
                    self._records.add(left[0], reading.through(cache, left[0].k))
                    yield left.pop(0)
        except Exception as error:  # whatever an index raises: the others go on
            self._fail(left[0], error)
            yield from left

    def _fail(self, key: Key, error: Exception) -> None:
        words = str(error) or type(error).__name__
        if not isinstance(error, ValueError):
            words = f"{type(error).__name__}: {words}"
        self._records.add(replace(key, kind=FAILURE, k=0, seed=None), {"words": words})
        self._failed.add((key.index, key.tokens))

    def _forget_failures(self) -> None:
        for key, _ in list(self._records.of(FAILURE)):
            if key.index in (None, *self._plan.indexes):
                self._records.forget(key)


def _check_lengths(model: PreTrainedModel, text: Tensor, settings: Settings, plan: Plan) -> None:
    """Raises ValueError for lengths that the model, the text or the steps do not allow."""
    shortest, longest = min(plan.tokens), max(plan.tokens)
    config = model.config.get_text_config(decoder=True).to_dict()
    most = config.get("max_position_embeddings")
    if most is not None and longest > most:
        raise ValueError(f"tokens: got {longest}, allowed is up to {most}, as the model was made")
    if longest > len(text):
        raise ValueError(f"text: got {len(text)} tokens, allowed is {longest} or more")
    if settings.steps > shortest // 2:
        raise ValueError(f"steps: got {settings.steps}, allowed is up to half of {shortest} tokens")


def _weight(key: Key) -> int:
    """How long it takes, about."""
    share = READING if key.index == FULL else STEPPING if key.task is None else 1
    return share * key.tokens


def _named(key: Key) -> str:
    return f"{key.task or 'text'}, {key.tokens} tokens"
