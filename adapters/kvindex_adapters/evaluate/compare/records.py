"""Store measured results in a file. Each result is appended as a line of JSON immediately."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvindex.core import check

Record = dict[str, Any]

TEXT, ANSWERS, FAILURE, SKIPPED = "text", "answers", "failure", "skipped"
"""Kinds of stored results: measured on a text, measured on a prompt of a task, an error, or the
reason why a suite has not measured a cell of its table."""

FULL = "full attention"
"""The name of full attention in stored results, where other results have the name of an index."""


AUTO = "auto"
"""Value of `k` for searches that choose the number of tokens by their expected error. `auto:0.05`
also sets the allowed error, which is otherwise that of `attach`."""


def automatic(k: int | str) -> dict[str, Any]:
    """Return the arguments of `attach` for a `k` such as "auto" or "auto:0.05".

    Return an empty dict for a number.

    Raises:
        ValueError: The text is another one, or the error is not a positive finite number.
    """
    if not isinstance(k, str):
        return {}
    name, colon, error = k.partition(":")
    if name != AUTO:
        raise ValueError(f"k: got {k!r}, allowed is a number, 'auto', or 'auto:0.05'")
    if not colon:
        return {"k": AUTO}
    try:
        return {"k": AUTO, "error": check.positive("error", float(error))}
    except ValueError:
        raise ValueError(
            f"k: got {k!r}, allowed after 'auto:' is a positive finite number, the allowed error"
        ) from None


@dataclass(frozen=True)
class Key:
    """The key of a stored result: what was measured.

    Args:
        kind: `TEXT`, `ANSWERS`, `FAILURE` or `SKIPPED`.
        tokens: Length of the prompt in tokens.
        index: Name and options of the index, or `FULL` for full attention. None if the result
            concerns no index.
        k: Number of tokens that each decode step retrieves per KV head, or a text (see
            `automatic`); 0 for full attention, and for an error with any number of tokens.
        task: Name of the task, or None for a text.
        seed: Seed from which the task's prompt was made, or None for a text.
        text: Name of the text, if a suite measures several. None for the one text of a usual
            comparison.
    """

    kind: str
    tokens: int
    index: str | None = FULL
    k: int | str = 0
    task: str | None = None
    seed: int | None = None
    text: str | None = None

    @property
    def failure(self) -> Key:
        """The key of the error that is stored if an index fails before this result is measured."""
        k = self.k if isinstance(self.k, str) else 0  # searches within an error may fail alone
        return replace(self, kind=FAILURE, k=k, seed=None)


class Records:
    """The measured results in the file `results.jsonl` of a folder, by key.

    A later result with the same key replaces an earlier one. If an interruption has cut off the
    last line of the file, that line is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._found = folder / "results.jsonl", dict[Key, Record]()
        self.machines: list[Any] = []
        whole = 0
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self._take(json.loads(line))
        if lines:
            os.truncate(self._path, whole)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def of(self, kind: str) -> Iterator[tuple[Key, Record]]:
        """Return all results of one kind (`TEXT`, `ANSWERS` and so on) with their keys.

        The oldest result comes first.
        """
        return ((key, record) for key, record in self._found.items() if key.kind == kind)

    def add(self, key: Key, record: Record) -> None:
        """Append a result to the file. It is on disk when this method returns."""
        self._write({**asdict(key), **record})

    def forget(self, key: Key) -> None:
        """Remove a result, for example an error, so that the measurement can be repeated."""
        if key in self._found:
            self._write({**asdict(key), "gone": True})

    def run_on(self, machine: Any) -> None:
        """Store a description of the machine on which later results are measured."""
        if machine not in self.machines:
            self._write({"kind": "machine", "machine": machine})

    def _write(self, line: Record) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _take(self, line: Record) -> None:
        if line["kind"] == "machine":
            self.machines.append(line["machine"])
            return
        line = dict(line)
        named = {field.name: line.pop(field.name, field.default) for field in fields(Key)}
        key = Key(**named)
        if line.pop("gone", False):
            del self._found[key]
        else:
            self._found[key] = line
