"""Helpers that all tables share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"


def stored(name: str) -> Result | None:
    """A result by name, None where it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def stored_beside(name: str, first: Result) -> list[Result]:
    """The result of that name, given, and those of others (`name_…`), of other models say."""
    paths = sorted(RESULTS.glob(f"{name}_*.json"))
    return [first, *(json.loads(path.read_text(encoding="utf-8")) for path in paths)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean(cells: list[Result], name: str) -> float:
    """Of a figure of all cells, 0 of none."""
    return sum(float(cell[name]) for cell in cells) / max(len(cells), 1)


def some(cells: list[Result], **where: Any) -> list[Result]:
    """Those in which all of these are so."""
    return [cell for cell in cells if all(cell[name] == value for name, value in where.items())]


def values(cells: list[Result], name: str) -> list[Any]:
    """The different ones, in their order."""
    return list(dict.fromkeys(cell[name] for cell in cells))


def machine(result: Result) -> str:
    """Where a result was measured, as a sentence."""
    m = result["machine"]
    place = m.get("gpu") or f"{m['cores']} cores of {m['processor']}"
    return f"Measured on {place}, torch {m['torch']}, transformers {m['transformers']}."


def named(model: str, lora: str | None) -> str:
    """A model by its file, and what was added to it."""
    name = model.rpartition("/")[2].removesuffix(".gguf")
    return f"{name} with {lora}" if lora else name
