"""Draw the plots of a comparison's report.

If several prompt lengths or several `k` were measured, each index is drawn as a line. A few lines
are labeled with the name of the index; the others are gray. Labeled lines differ in color and in
the shape of their markers. People with color blindness can distinguish the colors (Okabe and Ito,
2008). If only one prompt length and one `k` were measured, each index is drawn as a labeled dot.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvindex_adapters.evaluate.compare.lines import Panel, Point, named, panels

MARKS = "osD^vP"
SIZE, GAP = (5.8, 4.2), 0.055
"""`SIZE`: width and height of a plot in inches.

`GAP`: smallest vertical distance between two names, as a fraction of the plot's height.
"""
NARROW, ENTRY = (4.2, 3.4), 0.22
"""`NARROW`: width and height in inches of a plot that can be read on a phone.

`ENTRY`: height of a name below such a plot.
"""
LABEL = 0.11
"""Smallest distance between two labels of the x axis, as a fraction of the axis."""
DOT = 0.42
"""Height of a dot and its name in inches."""


@dataclass(frozen=True)
class Theme:
    """Colors of a plot.

    Attributes:
        ink: Color of texts.
        paper: Color of the background.
        gray: Color of lines that have no name in the legend.
        colors: Colors of lines that have a name.
    """

    ink: str
    paper: str
    gray: str
    colors: tuple[str, ...]


LIGHT = Theme(
    *("#202124", "#ffffff", "#c8c8c8"),
    colors=("#202124", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#9a7400"),
)
DARK = Theme(
    *("#e8eaed", "#17191c", "#5c5f66"),
    colors=("#e8eaed", "#ff8c42", "#56b4e9", "#2fc79a", "#e59fc4", "#e69f00"),
)


def picture(summary: dict[str, Any], theme: Theme = LIGHT) -> Figure:
    """Draw the plots of accuracy and of divergence side by side in one figure."""
    drawn = panels(summary)
    with _colors(theme):
        height = max([SIZE[1], *map(_height_of_dots, drawn)])
        figure = Figure(figsize=(SIZE[0] * len(drawn), height), layout="constrained")
        for i, panel in enumerate(drawn):
            _draw(figure.add_subplot(1, len(drawn), i + 1), panel, named(drawn), theme)
    return figure


def narrow_pictures(summary: dict[str, Any], theme: Theme = LIGHT) -> list[Figure]:
    """Draw each plot in a figure of its own, with the names of the lines below it."""
    drawn, figures = panels(summary), []
    for panel in drawn:
        shown = [name for name in named(drawn) if name in panel.lines]
        height = _height_of_dots(panel) or NARROW[1] + ENTRY * len(shown)
        with _colors(theme):
            figure = Figure(figsize=(NARROW[0], height), layout="constrained")
            _draw(figure.add_subplot(), panel, named(drawn), theme, below=True)
        figures.append(figure)
    return figures


def _colors(theme: Theme) -> AbstractContextManager[None]:
    """Set the colors with which matplotlib draws in a `with` block."""
    look: Any = {name: theme.ink for name in ("text.color", "axes.labelcolor", "axes.edgecolor")}
    look |= {"xtick.color": theme.ink, "ytick.color": theme.ink, "svg.hashsalt": "kvindex"}
    look |= {"figure.facecolor": theme.paper, "axes.facecolor": theme.paper}
    return rc_context(look)


def as_address(figure: Figure) -> str:
    """Return a figure as an SVG image in a `data:` URL."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _draw(
    ax: Axes, panel: Panel, names: Sequence[str], theme: Theme, *, below: bool = False
) -> None:
    """Draw a plot. The name of each line is at its end, or below the plot if `below` is True."""
    if _height_of_dots(panel):
        _dots(ax, panel, theme)
        return
    for name, line in panel.lines.items():
        if name not in names:
            ax.plot([p.x for p in line], [p.y for p in line], ".-", color=theme.gray, lw=0.8, ms=3)
    shown = [name for name in names if name in panel.lines]
    for place, name in enumerate(shown):
        look = {"color": theme.colors[names.index(name)], "marker": MARKS[names.index(name)]}
        look["label"] = name
        _line(ax, panel.lines[name], look, place - (len(shown) - 1) / 2)
    _axes(ax, panel)
    if below:
        legend = ax.figure.legend(loc="outside lower left", fontsize=9, frameon=False)
        legend.set_in_layout(True)
        return
    ends = [panel.lines[name][-1] for name in shown]
    colors = [theme.colors[names.index(name)] for name in shown]
    _names(ax, ends, shown, colors)


def _height_of_dots(panel: Panel) -> float:
    """Return the height in inches of a plot with a dot for each index.

    Return 0 if the plot has lines, because it has several prompt lengths or several `k`.
    """
    xs = {point.x for line in panel.lines.values() for point in line}
    return 0.0 if len(xs) > 1 else DOT * len(panel.lines) + 1.1


def _dots(ax: Axes, panel: Panel, theme: Theme) -> None:
    """Draw a dot with its interval for each index, the best on top, and its name above the dot."""
    lines = sorted(panel.lines.items(), key=lambda line: line[1][0].y, reverse=panel.logarithmic)
    for place, (name, (point, *_)) in enumerate(lines):
        reach = [[max(point.y - point.low, 0)], [max(point.high - point.y, 0)]]
        ax.errorbar(point.y, place, xerr=reach, fmt="o", color=theme.colors[2], capsize=3)
        place_of_name: Any = dict(xy=(0, place + 0.22), xycoords=ax.get_yaxis_transform())
        ax.annotate(f"{name}: {point.y:.2g}", **place_of_name, fontsize=10, va="bottom")
    ax.set_title(panel.title, loc="left", fontsize=11)
    ax.set_ylim(-0.5, len(lines) - 0.1)
    ax.set_yticks([])
    if panel.logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(-0.03, 1.03)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _line(ax: Axes, line: Sequence[Point], look: Any, place: float) -> None:
    """Draw a line with error bars, shifted sideways by `place` so that the bars do not overlap."""
    xs = [p.x * 1.012**place for p in line]
    ys = [p.y for p in line]
    reach = [[max(p.y - p.low, 0) for p in line], [max(p.high - p.y, 0) for p in line]]
    ax.errorbar(xs, ys, yerr=reach, lw=1.6, ms=5.5, elinewidth=0.8, capsize=2, **look)


def _axes(ax: Axes, panel: Panel) -> None:
    ax.set_title(panel.title, loc="left", fontsize=11)
    ax.set_xlabel("tokens of the prompt" if panel.along == "tokens" else "rows per KV head, k")
    ax.set_xscale("log", base=2)
    counts = Counter(point.x for line in panel.lines.values() for point in line)
    xs = sorted(counts)
    ax.set_xticks(xs, _labels(counts))
    ax.xaxis.set_minor_formatter(NullFormatter())
    if xs:
        ax.set_xlim(xs[0] / 1.12, xs[-1] * 1.12)
    if panel.logarithmic:
        ax.set_yscale("log")
    else:
        ax.set_ylim(-0.03, 1.03)
    ax.spines[["top", "right"]].set_visible(False)


def _names(ax: Axes, ends: Sequence[Point], names: Sequence[str], colors: Sequence[str]) -> None:
    """Write the name of each line to the right of its end, moved up or down to avoid overlaps."""
    to_fraction = (ax.transData + ax.transAxes.inverted()).transform
    heights = [float(to_fraction((end.x, end.y))[1]) for end in ends]
    for height, i in zip(
        _apart(sorted(heights)), sorted(range(len(ends)), key=heights.__getitem__), strict=True
    ):
        ax.annotate(
            names[i],
            xy=(ends[i].x, ends[i].y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colors[i],
            va="center",
            fontsize=9,
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Move the labels of lines up or down, so that neighboring labels are at least `GAP` apart.

    `heights` are the vertical positions of the labels as fractions of the plot, ascending.
    """
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + GAP) if placed else max(height, 0.0))
    over = max(placed[-1] - 1, 0.0) if placed else 0.0
    return [height - over for height in placed]


def _labels(counts: Mapping[int, int]) -> list[str]:
    """Return the label of each tick of the x axis, in ascending order of the ticks.

    The axis is logarithmic. If two ticks are so close that their labels would overlap, the tick
    with fewer points gets no label. `counts` has the number of points at each tick.
    """
    ends = math.log(min(counts, default=1)), math.log(max(counts, default=1))
    least = LABEL * (ends[1] - ends[0])
    labeled: list[int] = []
    for x in sorted(counts, key=lambda x: (-counts[x], x)):
        if all(abs(math.log(x / other)) >= least for other in labeled):
            labeled.append(x)
    return [_count(x) if x in labeled else "" for x in sorted(counts)]


def _count(value: int) -> str:
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)
