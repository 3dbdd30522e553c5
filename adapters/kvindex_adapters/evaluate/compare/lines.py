"""The lines of a picture: one for each index, along lengths, or along `k`; and which have names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvindex_adapters.evaluate.compare.records import FULL

NAMED = 6
"""Lines with a name, at most."""

LEAST = 1e-6
"""Where a logarithmic scale ends."""

Row = dict[str, Any]


class Point(NamedTuple):
    """A value, the ends of its interval, and where it stands."""

    x: int
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """Values of one kind. along: "tokens" or "k"; lines: name -> points from left to right."""

    title: str
    along: str
    lines: dict[str, list[Point]]
    logarithmic: bool = False


def panels(summary: dict[str, Any]) -> list[Panel]:
    """Accuracy of all tasks, and divergence on the text, where there are any."""
    measured = [*summary["text"], *summary["accuracy"]]
    ks, lengths = ({row[name] for row in measured} - {None} for name in ("k", "tokens"))
    one_length = len(lengths) < 2
    along = "k" if one_length and len(ks) > 1 else "tokens"
    several = along == "tokens" and len(ks) > 1
    all_tasks = [row for row in summary["accuracy"] if row["task"] is None and row["tokens"]]
    found = []
    if all_tasks:
        lines = _lines(all_tasks, along, several, ("accuracy", "low", "high"))
        found.append(Panel("accuracy, all tasks", along, lines))
    indexes = [row for row in summary["text"] if row["index"] != FULL]
    lines = _lines(indexes, along, several, ("kl", "kl_low", "kl_high"), LEAST)
    if lines:
        found.append(Panel("divergence on a text, nats", along, lines, logarithmic=True))
    return found


def named(panels: Sequence[Panel]) -> list[str]:
    """Lines that get a name: full attention, exact, the first index, then the best by a mean.

    Of an index with a line for each `k` the last one stands for it, unless others are best.
    """
    lines = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    last = {name.partition(", k = ")[0]: name for name in lines}
    first = [index for index in last if index != FULL][:1]
    known = [last[index] for index in (FULL, "exact", *first) if index in last]
    best = sorted(panels[0].lines, key=lambda name: _mean(panels[0], name))
    return list(dict.fromkeys([*known, *best]))[:NAMED]


def _mean(panel: Panel, name: str) -> float:
    """Of a line; the best is the least."""
    values = [point.y for point in panel.lines[name]]
    mean = sum(values) / len(values)
    return mean if panel.logarithmic else -mean


def _lines(
    rows: Sequence[Row], along: str, several: bool, names: Sequence[str], least: float = 0.0
) -> dict[str, list[Point]]:
    """Points of each line; several: whether an index has a line for each `k`; least: of values."""
    xs = sorted({row[along] for row in rows} - {None})
    lines: dict[str, list[Point]] = {}
    for row in rows:
        name = f"{row['index']}, k = {row['k']}" if several and row["k"] else row["index"]
        places = [row[along]] if row[along] else xs  # full attention has no k
        line = lines.setdefault(name, [])
        line += [Point(x, *(max(row[value], least) for value in names)) for x in places]
    return {name: sorted(line) for name, line in lines.items()}
