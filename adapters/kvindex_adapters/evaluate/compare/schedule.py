"""Schedule the units of work of a plan whose records are missing, and report progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvindex_adapters.evaluate.compare.records import (
    ANSWERS,
    FAILURE,
    FULL,
    TEXT,
    Key,
    Record,
    Records,
)
from kvindex_adapters.evaluate.compare.settings import Plan, Settings
from kvindex_adapters.evaluate.machine import describe

Progress = Callable[[int, int, str], None]
"""Function that is called with the work done, the total work, and the name of the current unit of
work."""

READING, STEPPING = 4, 8
"""Estimated times, in units of the time in which an index answers an instance. READING: full
attention reads and answers. STEPPING: an index is measured on a text, where some steps run one by
one. They only affect the estimated time left."""


@dataclass(frozen=True)
class Work:
    """A unit of work: a text or a task instance to measure.

    Args:
        reading: Key of full attention's record.
        keys: Keys of the missing records, index by index.
    """

    reading: Key
    keys: tuple[Key, ...]


class Schedule:
    """The units of work in a plan that have missing records. Texts come first, and are not measured
    in parallel with other work.

    Args:
        settings: Settings of the comparison.
        plan: Plan of the comparison.
        records: Records of the comparison.
        on_progress: See `Progress`.
        jobs: Number of units that are measured in parallel. If there are several, the longest units
            come first.
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
        self._failed: set[tuple[str | None, int]] = set()  # index, tokens
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
        """Yield the units of work that remain. Each is chosen when it is requested.

        An index that failed gets no further work of the same length.
        """
        for work in works:
            failed = {key for key in work.keys if (key.index, key.tokens) in self._failed}
            self._progress(work.reading, *failed)
            if keys := tuple(key for key in work.keys if key not in failed):
                yield Work(work.reading, keys)

    def take(self, key: Key, record: Record) -> None:
        """Store a record, either a measurement of a unit of work or a failure."""
        self._records.add(key, record)
        if key.kind == FAILURE:
            self._failed.add((key.index, key.tokens))
        else:
            self._progress(key, key)

    def end(self, work: Work) -> None:
        """Mark a unit of work as done."""
        self._progress(work.reading, *(key for key in work.keys if key not in self._records))

    def _progress(self, what: Key, *done: Key) -> None:
        self._done += sum(map(self._size, done))
        self._on_progress(self._done, self._total, f"{what.task or 'text'}, {what.tokens} tokens")

    def _readings(self) -> Iterator[Key]:
        for tokens in sorted(self._plan.tokens, reverse=self._jobs > 1):
            if self._compares_text:
                yield Key(TEXT, tokens)
            for seed in range(self._plan.tries):
                for task in self._plan.tasks:
                    yield Key(ANSWERS, tokens, task=task, seed=seed)

    def _lack(self, reading: Key) -> tuple[Key, ...]:
        pairs = [(index, k) for index in self._plan.indexes for k in self._plan.ks]
        keys = [reading, *(replace(reading, index=index, k=k) for index, k in pairs)]
        return tuple(key for key in keys if key not in self._records)

    def _size(self, key: Key) -> int:
        """Return the approximate time for a record, in the units of the total work over all
        jobs."""
        effort = READING if key.index == FULL else STEPPING if key.kind == TEXT else 1
        return effort * key.tokens * (self._jobs if key.kind == TEXT else 1)

    def _forget_failures(self) -> None:
        for key, _ in list(self._records.of(FAILURE)):
            if key.index in (None, *self._plan.indexes):
                self._records.forget(key)
