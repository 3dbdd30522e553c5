"""Results of a long benchmark in a file, so that a later run can add what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvindex_adapters.evaluate.output_files import write_json


class Results:
    """Named results, which are written to a file as soon as they exist.

    Args:
        path: JSON file with the results of earlier runs, which may not exist yet.
        settings: Settings of the benchmark that can be written as JSON.

    Raises:
        SystemExit: The results in the file were measured with other settings, or the file has
            other contents.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(settings, default=str))
        self._found: dict[str, Any] = {}
        if not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not {"settings", "results"} <= stored.keys():
            raise SystemExit(
                f"{path}: got a file that no earlier run has written as its --resume; pass another "
                "file, which need not exist"
            )
        for name, value in self._settings.items():
            if (other := stored["settings"].get(name)) != value:
                raise SystemExit(
                    f"{path}: {name}: got {value!r}, allowed is {other!r}, with which the results "
                    "in this file were measured; pass the same settings, or another file"
                )
        self._found = stored["results"]

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def get(self, name: str) -> Any:
        """Return a result, or None if it is missing."""
        return self._found.get(name)

    def discard(self, *names: str) -> None:
        """Remove results from the file."""
        for name in names:
            self._found.pop(name, None)
        self._write()

    def add(self, name: str, result: Any) -> None:
        """Store a result, and write all results to the file."""
        self._found[name] = result
        self._write()

    def _write(self) -> None:
        write_json(self._path, dict(settings=self._settings, results=self._found))
