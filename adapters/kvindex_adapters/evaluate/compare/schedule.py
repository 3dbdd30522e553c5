"""Find the measurements of a plan that have no result yet, order them, and report progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from kvindex_adapters.evaluate.compare.records import (
    ANSWERS,
    FAILURE,
    FULL,
    SKIPPED,
    TEXT,
    Key,
    Record,
    Records,
)
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.evaluate.machine import describe

Progress = Callable[[int, int, str], None]
"""Function that is called with the work done, the total work, and the name of the current
measurement."""

READING, STEPPING = 4, 8
"""Estimated times, as multiples of the time in which an index answers a prompt.

`READING`: full attention reads and answers a prompt. `STEPPING`: an index is measured on a text,
where some decode steps run one after another. These numbers only affect the progress bar.
"""


@dataclass(frozen=True)
class Work:
    """One text, or one prompt of a task, and the measurements to make on it.

    Args:
        reading: Identifier (`Key`) of the result with full attention on this text or prompt. It
            also identifies the text or prompt itself.
        keys: Identifiers of all missing results. Those of the same index are adjacent.
    """

    reading: Key
    keys: tuple[Key, ...]

    def divided(self) -> list[Work]:
        """Divide the measurements by index. Those of the same index share its keys and values."""
        groups = groupby(self.keys, lambda key: key.index)
        return [replace(self, keys=tuple(keys)) for _, keys in groups]

    def described(self) -> str:
        """Return the names of the indexes, and the text or prompt, for an error message."""
        names = dict.fromkeys(str(key.index) for key in self.keys)
        return f"{', '.join(names)} ({_named(self.reading)})"


class Schedule:
    """The measurements that a comparison still has to make, grouped by text or prompt.

    `texts` are to be measured one at a time, because their decode steps are timed. `instances`, the
    prompts of tasks, can be measured in parallel.

    Args:
        settings: Settings that all results of the comparison share.
        plan: The indexes, tasks and prompt lengths to measure.
        records: The file of results. New results are appended.
        on_progress: Function that is called with the work done, the total work, and the name of the
            current measurement.
        jobs: Number of processes that measure in parallel. If there are several, long prompts come
            first.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        records: Records,
        on_progress: Progress,
        *,
        jobs: int = 1,
    ) -> None:
        self._plan, self._records, self._jobs = plan, records, jobs
        self._compares_text = settings.steps > 0
        self._failed: set[tuple[object, ...]] = set()  # `_measured_together` of each error
        records.run_on(describe(settings.device))
        self._forget_failures()
        works = [
            Work(reading, keys) for reading in self._readings() if (keys := self._lack(reading))
        ]
        self.texts = [work for work in works if work.reading.kind == TEXT]
        self.instances = [work for work in works if work.reading.kind == ANSWERS]
        self._on_progress = on_progress
        self._done, self._total = 0, sum(self._size(key) for work in works for key in work.keys)

    def begin(self, works: list[Work]) -> Iterator[Work]:
        """Yield the texts or prompts in `works` one by one, each with the measurements to make.

        If an index has failed at some prompt length, its other measurements at this length are left
        out: those with all numbers for `k`, or those with the same text, such as "auto".
        """
        for work in works:
            failed = {key for key in work.keys if _measured_together(key) in self._failed}
            self._progress(work.reading, *failed)
            if keys := tuple(key for key in work.keys if key not in failed):
                yield Work(work.reading, keys)

    def take(self, key: Key, record: Record) -> None:
        """Store a measured result, or the error of an index that has failed."""
        self._records.add(key, record)
        if key.kind == FAILURE:
            self._failed.add(_measured_together(key))
        else:
            self._progress(key, replace(key, kind=TEXT) if key.kind == SKIPPED else key)

    def end(self, work: Work) -> None:
        """Tell the progress bar that all measurements on a text or prompt are complete."""
        skipped = {key for key in work.keys if replace(key, kind=SKIPPED) in self._records}
        left = (key for key in work.keys if key not in self._records and key not in skipped)
        self._progress(work.reading, *left)

    def _progress(self, what: Key, *done: Key) -> None:
        self._done += sum(map(self._size, done))
        self._on_progress(self._done, self._total, _named(what))

    @property
    def left(self) -> int:
        """Number of results that the plan still lacks."""
        return sum(len(self._lack(reading)) for reading in self._readings())

    def _readings(self) -> Iterator[Key]:
        for tokens in sorted(self._plan.tokens, reverse=self._jobs > 1):
            if self._compares_text:
                yield from (Key(TEXT, tokens, text=text) for text in self._plan.texts)
            for seed in range(self._plan.tries):
                for task in self._plan.tasks:
                    yield Key(ANSWERS, tokens, task=task, seed=seed)

    def _lack(self, reading: Key) -> tuple[Key, ...]:
        pairs = self._plan.pairs(reading.tokens)
        keys = [reading, *(replace(reading, index=index, k=k) for index, k in pairs)]
        return tuple(
            key
            for key in keys
            if key not in self._records and replace(key, kind=SKIPPED) not in self._records
        )

    def _size(self, key: Key) -> int:
        """Estimate the time for one result, in arbitrary units that are the same for all results.

        The estimate for a text is multiplied by the number of processes, because one process
        measures the text while all others are idle (except in a suite, which has only texts).
        """
        effort = READING if key.index == FULL else STEPPING if key.kind == TEXT else 1
        return effort * key.tokens * (self._jobs if key.kind == TEXT else 1)

    def _forget_failures(self) -> None:
        for key, _ in [*self._records.of(FAILURE), *self._records.of(SKIPPED)]:
            if self._plan.retries(key):
                self._records.forget(key)


def _named(key: Key) -> str:
    name = key.task or (key.text or "text").partition(" (sha256")[0]
    return f"{name}, {key.tokens} tokens"


def _measured_together(key: Key) -> tuple[object, ...]:
    """Return what results have in common that are all missing if an index fails."""
    return key.index, key.tokens, key.failure.k
