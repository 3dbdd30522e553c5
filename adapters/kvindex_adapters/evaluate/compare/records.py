"""Records of measurements. Each is a line of JSON, which is appended as soon as it is measured."""

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
"""The name under which records store full attention, instead of an index's name."""


@dataclass(frozen=True)
class Key:
    """The measurement that a record belongs to.

    Args:
        kind: `TEXT`, `ANSWERS` or `FAILURE`.
        tokens: Length of the prompt.
        index: Name and options of the index, `FULL`, or None if the record is not about an index.
        k: Rows that a step retrieves; 0 for full attention.
        task: Task of the instance, or None.
        seed: Seed of the instance, or None.
    """

    kind: str
    tokens: int
    index: str | None = FULL
    k: int = 0
    task: str | None = None
    seed: int | None = None


class Records:
    """The records in a folder's file `results.jsonl`, by key. Later records replace earlier ones.

    A last line that an interruption has cut off is removed.
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
        """Return keys and records of a kind, oldest first."""
        return ((key, record) for key, record in self._found.items() if key.kind == kind)

    def add(self, key: Key, record: Record) -> None:
        """Write a record. It is on disk when this returns."""
        self._write({**asdict(key), **record})

    def forget(self, key: Key) -> None:
        """Remove a record, for example a failure that is tried again."""
        if key in self._found:
            self._write({**asdict(key), "gone": True})

    def run_on(self, machine: Any) -> None:
        """Record the machine on which the following records are measured (`machine.describe`)."""
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
