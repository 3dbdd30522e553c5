"""Progress bars of prefill, decoding and k-means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvindex.ops.kmeans import watched

console = Console(stderr=True)
"""Progress goes to standard error, so that standard output holds the result alone."""


class Bars:
    """One bar per phase; a phase's bar appears when it is first reported."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._passes = 0

    def update(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` steps of a phase; after `stop` nothing is shown."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)

    def clustering(self, done: int, total: int) -> None:
        """Pass `done` of `total` of a k-means (`kvindex.ops.kmeans.watched`); one bar shows all."""
        self._passes += 1
        self.update("clustering keys", self._passes, self._passes + total - done)

    def stop(self) -> None:
        """Leave the bars as they are, so that other output can follow them."""
        self._progress.stop()


@contextmanager
def bars() -> Iterator[Bars]:
    """Bars that stay on the screen when their phase is over."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # what a command prints is its result, not a part of the display
    progress = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
    phases = Bars(progress)
    with progress, watched(phases.clustering):
        yield phases
