"""The data of the line plots in a comparison's report.

Each index has a line in each plot. The horizontal axis is the prompt length or `k`, the number of
tokens that a search retrieves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvindex_adapters.evaluate.compare.records import FULL

NAMED = 6
"""Maximum number of lines in a plot that have a label. The other lines are gray."""

LEAST = 1e-6
"""Lower end of the logarithmic axis. Smaller values are plotted at this value."""

Row = dict[str, Any]


class Point(NamedTuple):
    """A point `(x, y)` of a line plot, with the ends of the confidence interval of `y`."""

    x: int
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """The data of one line plot.

    Args:
        title: Heading of the plot.
        along: Quantity on the horizontal axis: "tokens" (prompt length) or "k".
        lines: Name of each line -> points of the line from left to right.
        logarithmic: Whether the vertical axis is logarithmic.
    """

    title: str
    along: str
    lines: dict[str, list[Point]]
    logarithmic: bool = False


def panels(summary: dict[str, Any]) -> list[Panel]:
    """Make a plot of the accuracy over all tasks, and a plot of the divergence on the text.

    A plot without measurements is left out.
    """
    measured = [*summary["text"], *summary["accuracy"]]
    ks, lengths = ({row[name] for row in measured} - {None} for name in ("k", "tokens"))
    one_length = len(lengths) < 2
    numbers = {k for k in ks if not isinstance(k, str)}
    along = "k" if one_length and len(numbers) > 1 else "tokens"
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
    """Choose at most `NAMED` lines of the plots that get a label.

    First come full attention, the index "exact" and the first index of the comparison. If one of
    these has several lines, one for each `k`, only its last line is chosen. Then come the lines
    with the best mean value in the first plot.
    """
    lines = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    last = {name.partition(", k = ")[0]: name for name in lines}
    first = [index for index in last if index != FULL][:1]
    known = [last[index] for index in (FULL, "exact", *first) if index in last]
    best = sorted(panels[0].lines, key=lambda name: _mean(panels[0], name))
    return list(dict.fromkeys([*known, *best]))[:NAMED]


def _mean(panel: Panel, name: str) -> float:
    """Return the mean of the values of an index in a plot, as a number for sorting.

    The mean is negated if larger values are better. So the best index has the smallest result.
    """
    values = [point.y for point in panel.lines[name]]
    mean = sum(values) / len(values)
    return mean if panel.logarithmic else -mean


def _lines(
    rows: Sequence[Row], along: str, several: bool, names: Sequence[str], least: float = 0.0
) -> dict[str, list[Point]]:
    """Return the points of each line of a line plot.

    Args:
        rows: The measured results: rows of a table of the summary.
        along: Quantity on the horizontal axis: "tokens" (prompt length) or "k".
        several: Whether an index has a separate line for each `k`.
        names: Names of the fields of a row that contain the value and the two ends of its
            confidence interval.
        least: Lower end of the vertical axis. Smaller values are replaced by it.
    """
    rows = [row for row in rows if not isinstance(row[along], str)]  # "auto" is on no axis
    xs = sorted({row[along] for row in rows} - {None})
    lines: dict[str, list[Point]] = {}
    for row in rows:
        name = f"{row['index']}, k = {row['k']}" if several and row["k"] else row["index"]
        places = [row[along]] if row[along] else xs  # full attention is the same at every `k`
        line = lines.setdefault(name, [])
        line += [Point(x, *(max(row[value], least) for value in names)) for x in places]
    return {name: sorted(line) for name, line in lines.items()}
