"""Measure full attention and all indexes on one text, or on one prompt of a task.

The model reads the text or prompt once, with full attention. Its keys and values are then copied to
every index.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.core.config import parse_spec
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.readings import FieldReading, InstanceReading, TextReading
from kvindex_adapters.evaluate.compare.records import (
    FULL,
    SKIPPED,
    Key,
    Record,
    automatic,
)
from kvindex_adapters.evaluate.compare.replay import indexed
from kvindex_adapters.evaluate.compare.schedule import Work
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model import load_model
from kvindex_adapters.hf.unsupported import check_model

Reading = InstanceReading | TextReading | FieldReading
"""A text or a prompt that the model has read with full attention."""

Measured = tuple[Key, Record]
"""A measured result and its key.

If an index or a task fails, the kind of the key is "failure", and the result is the error message.
"""

Texts = Tensor | Mapping[str, Tensor]
"""Token ids int64 `[N]` of a text, or of several texts by their names."""

Loaded = tuple[PreTrainedModel, Any, Texts]
"""A model, its tokenizer, and the text on which next-token predictions are compared.

With a suite, there are several texts.
"""


def load(model: str, text: str | Mapping[str, str], **options: Any) -> Loaded:
    """Load a model and its tokenizer, and convert a text, or several texts, to token ids.

    `options` are passed to `load_model.load`.
    """
    loaded, tokenizer = load_model.load(model, **options)

    def ids_of(text: str) -> Tensor:
        return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)

    if isinstance(text, str):
        return loaded, tokenizer, ids_of(text)
    return loaded, tokenizer, {name: ids_of(one) for name, one in text.items()}


@dataclass(eq=False, repr=False)
class Measuring:
    """A loaded model that makes the measurements of a comparison.

    Args:
        model: The transformers model.
        tokenizer: The tokenizer of the model.
        text: Token ids int64 `[N]` of the text on which next-token predictions are compared. With a
            suite: the texts by their names.
        settings: Settings that all results of the comparison share.
        plan: The indexes, tasks and prompt lengths to measure.

    Raises:
        ValueError: The model or a prompt length is not supported, or the text is too short.
    """

    model: PreTrainedModel
    tokenizer: Any
    text: Texts
    _: KW_ONLY
    settings: Settings
    plan: Plan

    def __post_init__(self) -> None:
        check_model(self.model)
        for text in [self.text] if isinstance(self.text, Tensor) else self.text.values():
            _check_lengths(self.model, text, self.settings, self.plan)
        options = functools.partial(_attach_options, self.tokenizer, self.settings)
        self._options = functools.cache(options)  # a cached method would make a reference cycle
        self._last: tuple[Key, Reading | ValueError] | None = None

    def measure(self, work: Work) -> Iterator[Measured]:
        """Measure a text or a prompt with every index, and yield each result.

        If an index fails, its last result is the error message.
        """
        reading = self._reading_of(work.reading)
        if isinstance(reading, ValueError):
            yield from self.plan.failed([replace(work.reading, index=None)], in_words(reading))
            return
        for (index, _), keys in groupby(work.keys, lambda key: (key.index, automatic(key.k))):
            if index == FULL:
                yield work.reading, reading.own
            else:
                yield from self._through(reading, list(keys))

    def _reading_of(self, key: Key) -> Reading | ValueError:
        """Return the last reading again if it was of the same text of a suite. Otherwise forget it,
        and let the model read a text or a prompt."""
        if self.settings.suite is None:
            return self._reading(key)
        if self._last is None or self._last[0] != key:
            self._last = None  # first, because two readings may not fit into memory
            self._last = key, self._reading(key)
        return self._last[1]

    def _reading(self, key: Key) -> Reading | ValueError:
        """Let the model read a text, or a prompt of a task, with full attention.

        Return a ValueError if the task cannot make a prompt of at most `key.tokens` tokens.
        """
        if key.task is None:
            texts, steps = self.text, self.settings.steps
            text = texts if isinstance(texts, Tensor) else texts[str(key.text)]
            if self.settings.suite is None:
                return TextReading(self.model, text[: key.tokens], steps)
            return FieldReading(self.model, text[: key.tokens], steps, self.settings.regions)
        assert key.seed is not None
        try:
            instance = tasks.make(key.task, self.tokenizer, tokens=key.tokens, seed=key.seed)
        except ValueError as error:
            return error
        return InstanceReading(self.model, self.tokenizer, instance)

    def _through(self, reading: Reading, keys: list[Key]) -> Iterator[Measured]:
        """Measure one index on one text or prompt, and yield one result for each `k`.

        If `k` is a text such as "auto", there is only one.
        """
        index, left = keys[0].index, list(keys)
        assert index is not None
        if isinstance(reading, FieldReading):
            reasons = [(key, reading.skips(check.wanted_rows(key.k))) for key in keys]
            left = [key for key, reason in reasons if reason is None]
            for key, reason in reasons:
                if reason is not None:
                    about = {**self.plan.about(key), "words": reason, "failed": False}
                    yield replace(key, kind=SKIPPED), about
            if not left:
                return
        try:
            options = self._options(index) | {"observed": isinstance(reading, FieldReading)}
            options |= automatic(keys[0].k)
            with indexed(self.model, reading.context.ids, index=index, **options) as cache:
                cache.read(reading.context)
                while left:
                    k: Any = left[0].k  # a suite has numbers only
                    record = reading.through(cache, k)
                    yield left[0], {**self.plan.about(left[0]), **record}
                    left.pop(0)
        except Exception as error:  # an index may raise any error; other indexes continue
            yield from self.plan.failed(left, in_words(error))


def _attach_options(tokenizer: Any, settings: Settings, index: str) -> dict[str, Any]:
    """Return the keyword arguments of `attach` for an index."""
    options: dict[str, Any] = dict(settings.regions)
    if settings.store is not None and "store" not in parse_spec(index.partition("+")[0])[1]:
        options["index_options"] = {"store": settings.store}
    return punctuated(index, tokenizer, options)


def in_words(error: Exception) -> str:
    """Return an error as text: its message or, unless it is a ValueError, its type and message."""
    words = str(error) or type(error).__name__
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"


def _check_lengths(model: PreTrainedModel, text: Tensor, settings: Settings, plan: Plan) -> None:
    """Raise ValueError if a prompt length of the plan does not fit the model, text or settings."""
    shortest, longest = min(plan.tokens), max(plan.tokens)
    config = model.config.get_text_config(decoder=True).to_dict()
    most = config.get("max_position_embeddings")
    if most is not None and longest > most:
        raise ValueError(
            f"tokens: got {longest}, allowed is at most {most}, the model's maximum length"
        )
    if longest > len(text):
        raise ValueError(
            f"text: got {len(text)} tokens, allowed is at least {longest}, the largest value of "
            "tokens"
        )
    if settings.steps > shortest // 2:
        raise ValueError(
            f"steps: got {settings.steps}, allowed is at most half of the shortest prompt, which "
            f"has {shortest} tokens"
        )
