"""Measure one text or task instance: read it once with full attention, then with every index."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex.core.config import parse_spec
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.readings import InstanceReading, TextReading
from kvindex_adapters.evaluate.compare.records import FAILURE, FULL, Key, Record
from kvindex_adapters.evaluate.compare.replay import indexed
from kvindex_adapters.evaluate.compare.schedule import Work
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model import load_model
from kvindex_adapters.hf.unsupported import check_model

Measured = tuple[Key, Record]
"""A record and its key. If an index or a task fails, the key's kind is "failure", and the record
contains the message."""

Loaded = tuple[PreTrainedModel, Any, Tensor]
"""A model, its tokenizer, and the ids int64 `[N]` of the text for comparing predictions."""


def load(model: str, text: str, **options: Any) -> Loaded:
    """Load a model, and encode a text. Options and errors are those of `load_model.load`."""
    loaded, tokenizer = load_model.load(model, **options)
    return loaded, tokenizer, torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)


@dataclass(eq=False, repr=False)
class Measuring:
    """A model that measures the units of work of a plan.

    Args:
        model: The transformers model.
        tokenizer: Its tokenizer.
        text: Ids int64 `[N]` of the text for comparing predictions.
        settings: Settings of the comparison.
        plan: Plan of the comparison.

    Raises:
        ValueError: The model or a length is not supported, or the text is too short.
    """

    model: PreTrainedModel
    tokenizer: Any
    text: Tensor
    _: KW_ONLY
    settings: Settings
    plan: Plan

    def __post_init__(self) -> None:
        check_model(self.model)
        _check_lengths(self.model, self.text, self.settings, self.plan)
        options = functools.partial(_attach_options, self.tokenizer, self.settings)
        self._options = functools.cache(options)  # not on the method: that makes a reference cycle

    def measure(self, work: Work) -> Iterator[Measured]:
        """Yield the records of a unit of work. If an index fails, its last record is the
        failure."""
        reading = self._reading(work.reading)
        if not isinstance(reading, InstanceReading | TextReading):
            yield _failure(replace(work.reading, index=None), reading)
            return
        for index, keys in groupby(work.keys, lambda key: key.index):
            if index == FULL:
                yield work.reading, reading.own
            else:
                yield from self._through(reading, list(keys))

    def _reading(self, key: Key) -> InstanceReading | TextReading | ValueError:
        """Read a text or an instance with full attention. Return an error if a task cannot be that
        short."""
        if key.task is None:
            return TextReading(self.model, self.text[: key.tokens], self.settings.steps)
        assert key.seed is not None
        try:
            instance = tasks.make(key.task, self.tokenizer, tokens=key.tokens, seed=key.seed)
        except ValueError as error:
            return error
        return InstanceReading(self.model, self.tokenizer, instance)

    def _through(
        self, reading: InstanceReading | TextReading, keys: list[Key]
    ) -> Iterator[Measured]:
        """Yield the records of one index, one for each `k`."""
        index, left = keys[0].index, list(keys)
        assert index is not None
        try:
            options = self._options(index)
            with indexed(self.model, reading.context.ids, index=index, **options) as cache:
                cache.read(reading.context)
                while left:
                    yield left[0], reading.through(cache, left[0].k)
                    left.pop(0)
        except Exception as error:  # an index may raise any error; other indexes continue
            yield _failure(left[0], error)


def _attach_options(tokenizer: Any, settings: Settings, index: str) -> dict[str, Any]:
    """Return the options of `attach` for an index."""
    options: dict[str, Any] = dict(settings.regions)
    if settings.store is not None and "store" not in parse_spec(index.partition("+")[0])[1]:
        options["index_options"] = {"store": settings.store}
    return punctuated(index, tokenizer, options)


def in_words(error: Exception) -> str:
    """Return an error's message, preceded by the name of its type unless that is ValueError."""
    words = str(error) or type(error).__name__
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"


def _failure(key: Key, error: Exception) -> Measured:
    return replace(key, kind=FAILURE, k=0, seed=None), {"words": in_words(error)}


def _check_lengths(model: PreTrainedModel, text: Tensor, settings: Settings, plan: Plan) -> None:
    """Raise ValueError if the model, the text or the steps do not allow the plan's lengths."""
    shortest, longest = min(plan.tokens), max(plan.tokens)
    config = model.config.get_text_config(decoder=True).to_dict()
    most = config.get("max_position_embeddings")
    if most is not None and longest > most:
        raise ValueError(f"tokens: got {longest}, allowed is up to {most}, as the model was made")
    if longest > len(text):
        raise ValueError(f"text: got {len(text)} tokens, allowed is {longest} or more")
    if settings.steps > shortest // 2:
        raise ValueError(f"steps: got {settings.steps}, allowed is up to half of {shortest} tokens")
