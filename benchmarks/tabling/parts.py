"""What all tables share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

NOT_MEASURED = "Not measured in this run."

STAGE = ("launch", "tokens", "MB", "floor, µs", "measured, µs", "ratio")
"""The head of a table on a stage's own page."""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """In Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def beside_its_floor(nbytes: float, floor_us: float, us: float) -> tuple[str, str, str, str]:
    """Megabytes, floor, time and ratio of a launch: the last cells of `STAGE`."""
    share = f"{floor_us / us:.0%}" if us > 0 else "–"
    return f"{nbytes / 1e6:,.1f}", f"{floor_us:,.1f}", f"{us:,.1f}", share


def mean(cells: list[dict[str, Any]], name: str) -> float:
    """Of a figure of all cells, 0 of none."""
    return sum(float(cell[name]) for cell in cells) / max(len(cells), 1)


def machine(result: dict[str, Any]) -> str:
    """Where a result was measured, as a sentence."""
    m = result["machine"]
    place = m.get("gpu") or f"{m['cores']} cores of {m['processor']}"
    return f"Measured on {place}, torch {m['torch']}, transformers {m['transformers']}."
