"""Progress bars for reading the prompt and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(stderr=True)
"""Progress goes to standard error, so that standard output holds the result alone."""


class Bars:
    """One bar per phase; a phase's bar appears when it is first reported."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, int] = {}

    def update(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` tokens of a phase."""
        if phase not in self._tasks:
            self._tasks[phase] = int(self._progress.add_task(phase, total=total))
        self._progress.update(self._tasks[phase], completed=done, total=total)  # type: ignore[arg-type]


@contextmanager
def bars() -> Iterator[Bars]:
    """Bars that stay on the screen when their phase is over."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)
