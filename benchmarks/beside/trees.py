"""Source trees that answer commands, each in a process that stays alive."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")

LINES = 12
"""Of the log of a tree that fails, which are shown."""

Answers = dict[str, Any]
"""By name of the tree; those that failed have none."""


class Tree:
    """A process that imports what lies in `folder`. `failed`: why it is asked no more, or "".

    log: where goes what it prints; tell: is called with words when it fails.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        log: Path,
        tell: Callable[[str], None] = print,
        worker: Path = WORKER,
    ) -> None:
        # as sys.path has it: without "..", links as they are
        self.name, self.folder, self.failed = name, Path(os.path.abspath(folder)), ""
        self._log, self._tell, self._asked = log, tell, ""
        paths = f"{self.folder}{os.pathsep}{self.folder / 'adapters'}"
        flags = "-P", "-u", "-X", "faulthandler"  # -P: not the worker's own folder
        with log.open("w") as words:
            self.process = subprocess.Popen(
                [sys.executable, *flags, str(worker)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": paths},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, *command: Any) -> None:
        """Begin a command: its name, then what it is given."""
        if self.failed:
            return
        self._asked = str(command[0])
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.fail("its process ended")

    def answer(self, begun: float, seconds: float) -> dict[str, Any] | None:
        """What the command has found; None if the tree has failed, or does so now.

        begun: of `time.monotonic`; a tree that takes more seconds from then on is ended.
        """
        if self.failed:
            return None
        try:
            line = self._lines.get(timeout=max(begun + seconds - time.monotonic(), 0.1))
        except queue.Empty:
            self.fail(f"no answer in {seconds:g} s")
            return None
        if line is None:
            self.fail("its process ended")
            return None
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self.fail(found["error"])
            return None
        return found

    def fail(self, why: str) -> None:
        """Ask no more, and say why."""
        self.process.kill()
        self.failed = f"{self._asked}: {why}"
        last = self._log.read_text(errors="replace").splitlines()[-LINES:]
        self._tell("\n    ".join([f"{self.name} failed: {self.failed}", *last]))

    def end(self) -> None:
        """End the process, which has nothing to keep."""
        self.process.kill()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # it waits for a device that hangs
            self._tell(f"{self.name}: process {self.process.pid} does not end")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # else printed while modules were imported
                self._lines.put(line)
        self._lines.put(None)


def at_once(trees: Iterable[Tree], seconds: float, *command: Any) -> Answers:
    """The same command to all trees, which work on it side by side."""
    trees, begun = [*trees], time.monotonic()
    for tree in trees:
        tree.ask(*command)
    found = {tree.name: tree.answer(begun, seconds) for tree in trees}
    return {name: answer for name, answer in found.items() if answer is not None}


def in_turn(trees: Iterable[Tree], seconds: float, *command: Any) -> Answers:
    """The same command to one tree after the other: the others wait."""
    found: Answers = {}
    for tree in trees:
        found |= at_once([tree], seconds, *command)
    return found
