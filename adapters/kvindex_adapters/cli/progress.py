"""Show progress bars for prefill, decoding and k-means, and answers while they are generated."""

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
    """Progress bars. On a terminal, the answers so far are shown below them."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        self.answers: dict[str, tuple[str, str]] = {}  # name -> text, seconds per token
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the objects that rich draws. rich calls this."""
        yield from super().get_renderables()
        if self.answers and self.console.is_terminal:
            table = Table.grid(padding=(0, 2))
            for name, (text, pace) in self.answers.items():
                table.add_row(name, Text(text), pace)
            yield table


class Bars:
    """One bar per phase, which appears with the phase's first report, and answers while they are
    generated."""

    def __init__(self, progress: Display) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._passes = 0

    def update(self, phase: str, done: int, total: int) -> None:
        """Show `done` of `total` steps of a phase. After `stop` nothing is shown."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)

    def answer(self, name: str, text: str, more: str, token_s: float) -> None:
        """Show an answer so far: below the bars on a terminal, otherwise as plain text.

        Args:
            name: Name of the answer.
            text: The whole answer so far.
            more: The part of `text` that is new.
            token_s: Seconds per token.
        """
        first = name not in self._progress.answers
        self._progress.answers[name] = text, f"{token_s:.3f} s per token"
        self._plain(f"{name}: {more}" if first else more)

    def end_answer(self, name: str) -> None:
        """End the answer of that name."""
        self._plain(f" ({self._progress.answers[name][1]})\n")

    def _plain(self, text: str) -> None:
        """Print the text, unless answers are drawn on a terminal."""
        if not self._progress.console.is_terminal:
            print(text, end="", file=self._progress.console.file, flush=True)

    def clustering(self, done: int, total: int) -> None:
        """Show pass `done` of `total` of k-means (`kvindex.ops.kmeans.watched`). All runs share one
        bar."""
        self._passes += 1
        self.update("clustering keys", self._passes, self._passes + total - done)

    def stop(self) -> None:
        """Leave the bars as they are, so that other output can follow them."""
        self._progress.stop()


class Answer(BaseStreamer):
    """A streamer that shows an answer while it is generated, and the time per token."""

    def __init__(self, progress: Bars, name: str, tokenizer: Any) -> None:
        self._progress, self._name, self._tokenizer = progress, name, tokenizer
        self._tokens: list[int] | None = None  # None until the prompt was received
        self._shown, self._first = "", 0.0

    def put(self, value: Tensor) -> None:
        """Receive the prompt in the first call, then tokens of the answer."""
        if self._tokens is None:
            self._tokens = []
            return
        now = time.perf_counter()
        self._first = self._first if self._tokens else now
        self._tokens += value.flatten().tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        text = " ".join(text.rstrip("\ufffd").split())  # drops an incomplete character
        more, self._shown = text[len(self._shown) :], text
        token_s = (now - self._first) / max(len(self._tokens) - 1, 1)
        self._progress.answer(self._name, text, more, token_s)

    def end(self) -> None:
        """End the answer."""
        self._progress.end_answer(self._name)


@contextmanager
def bars() -> Iterator[Bars]:
    """Show bars that stay on the screen after their phase."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # a command's output is its result and not part of the display, so rich must not redirect it
    progress = Display(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
    phases = Bars(progress)
    with progress, watched(phases.clustering):
        yield phases
