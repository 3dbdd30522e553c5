"""Functions that write benchmark tables of the docs: they read results and format Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"


def stored(name: str) -> Result | None:
    """Read the file `NAME.json` of results, or return None if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def stored_like(name: str, first: Result) -> list[Result]:
    """Return a list that contains `first` and then the results in all files `NAME_*.json`.

    Such a file contains, for example, the results of another model.
    """
    paths = sorted(RESULTS.glob(f"{name}_*.json"))
    return [first, *(json.loads(path.read_text(encoding="utf-8")) for path in paths)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table with a header and rows of cells as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean(cells: list[Result], name: str) -> float:
    """Return the mean of the field `name` over results, or 0 if there are no results."""
    return sum(float(cell[name]) for cell in cells) / max(len(cells), 1)


def some(cells: list[Result], **where: Any) -> list[Result]:
    """Filter results: return those in which each field named in `where` has the given value."""
    return [cell for cell in cells if all(cell[name] == value for name, value in where.items())]


def values(cells: list[Result], name: str) -> list[Any]:
    """Return the different values of the field `name`, in the order of the results."""
    return list(dict.fromkeys(cell[name] for cell in cells))


def machine(result: Result) -> str:
    """Return a sentence that names the machine and libraries with which results were measured."""
    m = result["machine"]
    place = m.get("gpu") or f"{m['cores']} cores of {m['processor']}"
    return (
        f"These figures were measured on {place}, with torch {m['torch']} and transformers "
        f"{m['transformers']}."
    )


def machines(results: Iterable[Result]) -> str:
    """Return a sentence for each of the machines with which results were measured."""
    each = [*dict.fromkeys(map(machine, results))]
    if len(each) > 1:
        each = [text.replace("These", "Some of these", 1) for text in each]
    return " ".join(each)


def named(model: str, lora: str | None) -> str:
    """Return the name of a model as text, followed by the name of its LoRA adapter, if any."""
    name = model.rpartition("/")[2].removesuffix(".gguf")
    name = "SmolLM2-135M" if name == "model" else name  # some results record only "model.gguf"
    return f"{name} with {lora}" if lora else name
