"""Progress bars for prefill, decoding and k-means, with the answers while they are generated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvindex.ops.kmeans import watched

console = Console(stderr=True)
"""Progress goes to standard error, so that standard output contains only the result."""


class Display(Progress):
    """Progress bars (of the package `rich`), and on a terminal also the unfinished answers."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        self.answers: dict[str, tuple[str, str]] = {}  # name -> text, seconds per token
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the objects that the package `rich` draws: the bars, then a table of answers."""
        yield from super().get_renderables()
        if self.answers and self.console.is_terminal:
            table = Table.grid(padding=(0, 2))
            for name, (text, pace) in self.answers.items():
                table.add_row(name, Text(text), pace)
            yield table


LINE_EVERY_S = 10.0
"""Shortest time in seconds between two lines of progress."""


class Lines:
    """Progress as lines of text, for an output that is a file or a pipe.

    There, the package `rich` shows progress bars only after the work is done. A line is printed
    when a phase of the work begins, and then every `LINE_EVERY_S` seconds. After more than 100
    seconds of a phase, a line is printed each time that another tenth of that time has passed. On a
    terminal, and for a quiet console, nothing is printed.

    A phase may have done a part of its steps before the first call, for example if a measurement is
    resumed. The time that this part took is unknown. So the remaining time is estimated from the
    later steps alone, and the lines leave out the time that has passed.

    Args:
        output: The console of the progress bars.
    """

    def __init__(self, output: Console) -> None:
        self._output = output
        self._starts: dict[str, tuple[float, int]] = {}  # phase -> time and `done` of first call
        self._next: dict[str, float] = {}

    def update(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """Print a line if it is time for one.

        Args:
            phase: Name of the phase.
            done: Number of steps that are done.
            total: Number of all steps.
            detail: What is being done, or "".
        """
        now = time.monotonic()
        if not _prints_lines(self._output):
            return
        start, first = self._starts.setdefault(phase, (now, done))
        if done >= total or now < self._next.get(phase, now):
            return
        passed = now - start
        self._next[phase] = now + max(LINE_EVERY_S, passed / 10)
        text = f"{done / total:.0%} done" if done or passed else "begins"
        if passed and not first:
            text += f" after {_time(passed)}"
        if passed and done > first:
            text += f", about {_time(passed * (total - done) / (done - first))} left"
        text = f"{phase}: {text}" + (f" ({detail})" if detail else "")
        print(text, file=self._output.file, flush=True)


def _prints_lines(output: Console) -> bool:
    """Return True if progress is printed as lines of text: not on a terminal, and not if quiet."""
    return not (output.is_terminal or output.quiet)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Bars:
    """Progress bars, one per phase of the work, and the answers while they are generated.

    The bar of a phase appears with the first call of `update` for that phase. If the output is not
    a terminal, lines of text show the progress meanwhile (see `Lines`).
    """

    def __init__(self, progress: Display) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._passes = 0
        self._lines: Lines | None = Lines(progress.console)
        self._in_answer = False  # whether an unfinished answer is the last line of the output

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of the `total` steps of a phase are done. After `stop`, show nothing."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)
        if self._lines is not None and not self._in_answer:
            self._lines.update(phase, done, total)

    def answer(self, name: str, text: str, more: str, token_s: float) -> None:
        """Show an unfinished answer: below the bars on a terminal, otherwise as plain text.

        Args:
            name: Name of the answer.
            text: The answer up to the newest token.
            more: The new part of `text`, which was generated since the previous call.
            token_s: Mean time per generated token in seconds.
        """
        first = name not in self._progress.answers
        self._progress.answers[name] = text, f"{token_s:.3f} s per token"
        self._plain(f"{name}: {more}" if first else more)
        self._in_answer = True

    def end_answer(self, name: str) -> None:
        """Print the time per token of a finished answer, if the output is not a terminal.

        On a terminal, `Display` already shows this time below the progress bars.
        """
        self._plain(f" ({self._progress.answers[name][1]})\n")
        self._in_answer = False

    def _plain(self, text: str) -> None:
        """Print the text if the output is neither a terminal nor quiet.

        On a terminal nothing is printed, because `Display` already shows the answers below the
        progress bars.
        """
        if _prints_lines(self._progress.console):
            print(text, end="", file=self._progress.console.file, flush=True)

    def clustering(self, done: int, total: int) -> None:
        """Show that `done` of the `total` iterations of one k-means run are done.

        All k-means runs share one bar. `kvindex.ops.kmeans.watched` calls this method.
        """
        self._passes += 1
        self.update("clustering keys", self._passes, self._passes + total - done)

    def stop(self) -> None:
        """Stop updating the bars, so that other output can be printed below them."""
        self._lines = None
        self._progress.stop()


class Times(BaseStreamer):
    """A streamer that records the time at which each token of an answer arrives."""

    def __init__(self) -> None:
        self.tokens: list[int] | None = None
        """Token ids of the answer so far. None until the prompt was received."""
        self.times: list[float] = []
        """Time at which each token of the answer arrived, in seconds of `time.perf_counter`."""

    def put(self, value: Tensor) -> None:
        """Record the new tokens of the answer, and the time.

        `generate` passes the prompt in its first call of this method, and tokens of the answer in
        later calls.
        """
        if self.tokens is None:
            self.tokens = []
            return
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Do nothing. `generate` calls this method when the answer is complete."""


class Answer(Times):
    """A streamer of transformers that shows the text and the time per token of an answer, while the
    answer is generated.
    """

    def __init__(self, progress: Bars, name: str, tokenizer: Any) -> None:
        super().__init__()
        self._progress, self._name, self._tokenizer = progress, name, tokenizer
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Record and show the new tokens of the answer.

        `generate` passes the prompt in its first call of this method, and tokens of the answer in
        later calls.
        """
        super().put(value)
        if not self.tokens:
            return
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        text = " ".join(text.rstrip("\ufffd").split())  # drops an incomplete character
        more, self._shown = text[len(self._shown) :], text
        token_s = (self.times[-1] - self.times[0]) / max(len(self.tokens) - 1, 1)
        self._progress.answer(self._name, text, more, token_s)

    def end(self) -> None:
        """Print the end of the line."""
        self._progress.end_answer(self._name)


@contextmanager
def bars() -> Iterator[Bars]:
    """Show progress bars inside a `with` block. The bars stay on the screen afterwards."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # `rich` must not redirect standard output, which contains only the result of a command
    progress = Display(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
    phases = Bars(progress)
    with progress, watched(phases.clustering):
        yield phases
