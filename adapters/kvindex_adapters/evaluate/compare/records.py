"""Records of what has been measured: a line of JSON each, added when it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

Record = dict[str, Any]

TEXT, ANSWERS, FAILURE = "text", "answers", "failure"
"""Kinds of records."""

FULL = "full attention"
"""Its name among indexes."""


@dataclass(frozen=True)
class Key:
    """What a record is of.

    kind: `TEXT`, `ANSWERS` or `FAILURE`; index: a line, or `FULL`, or None where it is of none;
    k: rows that a step retrieves, 0 where none does; task, seed: of an instance; tokens: the
    length of a prompt.
    """

    kind: str
    tokens: int
    index: str | None = FULL
    k: int = 0
    task: str | None = None
    seed: int | None = None


class Records:
    """The records of a folder, in the file `results.jsonl`, by key; a later one takes the place.

    A line that an interruption has cut is dropped.
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
        """Keys and records of a kind, oldest first."""
        return ((key, record) for key, record in self._found.items() if key.kind == kind)

    def add(self, key: Key, record: Record) -> None:
        """Write a record; once this returns it stays."""
        self._write({**asdict(key), **record})

    def forget(self, key: Key) -> None:
        """It is no longer so (a failure that was tried again)."""
        if key in self._found:
            self._write({**asdict(key), "gone": True})

    def run_on(self, machine: Any) -> None:
        """Records that follow are of this machine (`machine.describe`)."""
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
        key = Key(**{field.name: line.pop(field.name) for field in fields(Key)})
        if line.pop("gone", False):
            del self._found[key]
        else:
            self._found[key] = line
