"""Times of trees as a table."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table


def medians(point: dict[str, Any], tree: str, place: str) -> list[float | None]:
    """A tree's µs in each round, None where it has none."""
    rounds = [one.get(tree, {}).get(place) for one in point["rounds"]]
    return [times["median_us"] if times else None for times in rounds]


def spread(values: list[float]) -> str:
    """The median of rounds (least … most)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})"


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows: µs of a layer, and to the first tree's in the same round; `–` where none."""
    first, *others = result["trees"]
    head = ["tokens", "rows", first]
    for name in others:
        head += [name, f"to {first}"]
    rows = []
    for point in result["points"]:
        for place in result["rows"]:
            base = medians(point, first, place)
            row = [f"{point['tokens']:,}", place]
            for name in result["trees"]:
                mine = medians(point, name, place)
                times = [us for us in mine if us is not None]
                there = [one[name][place] for one in point["rounds"] if name in one]
                alone = any(not part.get("graph", True) for part in there)
                row.append((spread(times) if times else "–") + (", no graph" if alone else ""))
                if name != first:
                    pairs = [us / to for us, to in zip(mine, base, strict=True) if us and to]
                    row.append(f"{statistics.median(pairs):.3f}" if pairs else "–")
            rows.append(tuple(row))
    return tuple(head), rows


def dense(result: dict[str, Any]) -> list[str]:
    """Of each length where dense attention was asked for: its µs, and the trees' to it."""
    lines = []
    for point in result["points"]:
        if "dense" not in point:
            continue
        line, found = f"{point['tokens']:,} tokens, dense attention: ", point["dense"]
        if "dense" not in found:
            lines.append(line + found.get("note", "not measured"))
            continue
        full = found["dense"]["median_us"]
        shares = [
            f"{name} {place} {statistics.median(times) / full:.3f}"
            for name in result["trees"]
            for place in result["rows"]
            if (times := [us for us in medians(point, name, place) if us is not None])
        ]
        lines.append(f"{line}{full:.2f} µs; to it " + ", ".join(shares))
    return lines


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, dense attention, and which trees failed."""
    head, rows = table(result)
    shown = Table(*head, title="µs of a layer, median of rounds (least … most)")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for line in [*dense(result), *(f"{name}: {why}" for name, why in result["failed"].items())]:
        console.print(line, highlight=False, markup=False)
