"""The drift study's result as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drifting.shifts import SHIFTS
from kvindex_adapters.files import save_figure

LINE = ("system", "stage", "learns_from")


def lines(cells: list[dict[str, Any]], kind: str) -> dict[tuple[str, ...], dict[float, float]]:
    """Recall by position or size, of each system."""
    found: dict[tuple[str, ...], dict[float, float]] = {}
    for one in cells:
        if one["kind"] == kind:
            found.setdefault(tuple(one[part] for part in LINE), {})[one["at"]] = one["recall"]
    return found


def show(cells: list[dict[str, Any]], k: int) -> None:
    """A table for each kind: a line per system, a column per position or size."""
    for kind in dict.fromkeys(one["kind"] for one in cells):
        drawn = lines(cells, kind)
        columns = sorted({at for line in drawn.values() for at in line})
        table = Table(*LINE, *map(str, columns), title=f"recall@{k}: {kind}")
        for name, line in drawn.items():
            table.add_row(*name, *(f"{line[at]:.3f}" if at in line else "" for at in columns))
        Console().print(table)


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/drift.md: some positions and sizes of each system."""
    cells = result["cells"]
    run = cells[0]["kind"]
    positions = sorted({one["at"] for one in cells if one["kind"] == run})
    some = [(run, positions[at]) for at in (0, len(positions) // 2, -1)]
    some += [
        ("mean", 2.0),
        ("covariance", 1.0),
        ("covariance", 2.0),
        ("tails", 1.0),
        ("tails", 2.0),
    ]
    head = ["", "learns from", "bytes kept, scanned"]
    head += [f"{at:,}" if kind == run else f"{kind} {at:.0f}" for kind, at in some]
    rows = [head, ["---"] * len(head)]
    drawn = {kind: lines(cells, kind) for kind, _ in some}
    for stage, note in (("whole", ""), ("candidates", ", coarse stage alone")):
        for line in drawn[run]:
            if line[1] != stage:
                continue
            size = result["bytes_per_key"][line[0]]
            found = [drawn[kind].get(line, {}).get(at) for kind, at in some]
            shares = ["" if share is None else f"{share:.3f}" for share in found]
            bytes_ = f"{size['kept']:.0f}, {size['scanned']:.0f}"
            rows.append([line[0] + note, line[2], bytes_, *shares])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(
    cells: list[dict[str, Any]], sizes: dict[str, dict[str, float]], k: int, out: Path
) -> None:
    """Recall against position and size of shift; above as it is, below the coarse stage alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(one["kind"] for one in cells))
    titles = {kind: f"tokens before the query; {kind}" for kind in kinds}
    titles |= {kind: title for kind, (_, _, title) in SHIFTS.items()}
    wide = (3.6 * len(kinds), 7)
    figure, panels = pyplot.subplots(2, len(kinds), figsize=wide, sharey=True, squeeze=False)
    names = list(sizes)
    for row, stage in zip(panels, ("whole", "candidates"), strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            for (name, of, learns), line in lines(cells, kind).items():
                if of != stage:
                    continue
                style = "o-" if learns == "prompt" else ".:"
                axes.plot(*zip(*line.items(), strict=True), style, color=f"C{names.index(name)}")
            axes.set(xlabel=titles[kind], ylim=(0, 1.02))
            axes.grid(alpha=0.3)
        row[0].set_ylabel(f"recall@{k}" + (", coarse stage alone" if stage != "whole" else ""))
    handles = [pyplot.Line2D([], [], color=f"C{i}", marker="o") for i in range(len(names))]
    labels = [f"{name}: {size['kept']:.0f} B per key" for name, size in sizes.items()]
    figure.legend(handles, labels, loc="upper center", ncol=-(-len(names) // 2), frameon=False)
    figure.text(0.5, 0.005, "solid: learned from the prompt; dotted: from all keys", ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 0.92))
    save_figure(figure, out, dpi=100)
