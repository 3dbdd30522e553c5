"""The lines of the report's picture: one per index, over prompt lengths or over `k`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvindex_adapters.evaluate.compare.records import FULL

NAMED = 6
"""Largest number of lines in a panel that are labeled with a name."""

LEAST = 1e-6
"""Lower end of a logarithmic scale."""

Row = dict[str, Any]


class Point(NamedTuple):
    """A value at `x`, and the ends of its interval."""

    x: int
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """A panel of the picture.

    Args:
        title: Heading.
        along: Quantity of the horizontal axis, "tokens" or "k".
        lines: Name of a line -> its points from left to right.
        logarithmic: Whether the vertical axis is logarithmic.
    """

    title: str
    along: str
    lines: dict[str, list[Point]]
    logarithmic: bool = False


def panels(summary: dict[str, Any]) -> list[Panel]:
    """Make the panels for accuracy of all tasks and for divergence on the text, if measured."""
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
    """Choose the lines to label with a name: full attention, exact, the first index, and the best
    by mean.

    If one of these indexes has a line for each `k`, the line of the last `k` is chosen. Lines of
    its other `k` are only chosen if they are among the best.
    """
    lines = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    last = {name.partition(", k = ")[0]: name for name in lines}
    first = [index for index in last if index != FULL][:1]
    known = [last[index] for index in (FULL, "exact", *first) if index in last]
    best = sorted(panels[0].lines, key=lambda name: _mean(panels[0], name))
    return list(dict.fromkeys([*known, *best]))[:NAMED]


def _mean(panel: Panel, name: str) -> float:
    """Return a line's mean, negated if larger values are better, so that the smallest is the
    best."""
    values = [point.y for point in panel.lines[name]]
    mean = sum(values) / len(values)
    return mean if panel.logarithmic else -mean


def _lines(
    rows: Sequence[Row], along: str, several: bool, names: Sequence[str], least: float = 0.0
) -> dict[str, list[Point]]:
    """Return the points of each line.

    Args:
        rows: Rows of a summary's table.
        along: "tokens" or "k".
        several: Whether an index has a line for each `k`.
        names: Fields of the value and of the ends of its interval.
        least: Smaller values are replaced by this one.
    """
    xs = sorted({row[along] for row in rows} - {None})
    lines: dict[str, list[Point]] = {}
    for row in rows:
        name = f"{row['index']}, k = {row['k']}" if several and row["k"] else row["index"]
        places = [row[along]] if row[along] else xs  # full attention has no k
        line = lines.setdefault(name, [])
        line += [Point(x, *(max(row[value], least) for value in names)) for x in places]
    return {name: sorted(line) for name, line in lines.items()}
