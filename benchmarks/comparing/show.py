"""The comparison's runs as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvindex_adapters.files import save_figure

WHOLE, PIECES, STALE = "whole", "pieces", "stale"
"""How the text arrives: at once, in pieces, in pieces to an index that is frozen."""


def middle_of(run: dict[str, Any]) -> str:
    """The rows that tables and pictures are about, as the lines' keys."""
    return "100" if 100 in run["rows"] else str(run["rows"][0])


def title_of(run: dict[str, Any]) -> str:
    """How long the text is, and whose."""
    own = ", continued by the model" if run["sampled"] else ""
    return f"{run['setting']['tokens']:,} tokens of {', '.join(run['texts'])}{own}"


def name_of(line: dict[str, Any], layers: int) -> str:
    """The index, and of how many layers its line is where those of the run are others."""
    return line["index"] + (f" ({line['layers']} of {layers} layers)" * (line["layers"] != layers))


def show(result: dict[str, Any]) -> None:
    """A table for each run, one line per index and arrival, and what failed."""
    console = Console(width=160)
    for run in result["runs"]:
        rows, k = [str(each) for each in run["rows"]], middle_of(run)
        head = ("index", "arrives", "kept B", "scanned B", "build ms", "search ms", f"recall@{k}")
        title = title_of(run)
        table = Table(*head, *(f"error@{each}" for each in rows), title=title)
        for line in run["indexes"]:
            at = line["rows"][k]
            errors = [line["rows"].get(each) for each in rows]
            table.add_row(
                *(name_of(line, run["measured"]), line["arrival"]),
                *(f"{line['bytes'][part]:.0f}" for part in ("kept", "scanned")),
                *(f"{line['build_ms']:.0f}", f"{at['search_ms']:.2f}", f"{at['recall']:.3f}"),
                *(f"{found['error']:.3f}" if found else "" for found in errors),
            )
        console.print(table)
        for spec, why in run["failed"].items():
            console.print(f"{spec}: {why}")


def plot(result: dict[str, Any], out: Path) -> None:
    """A row of panels per run: error against rows, against bytes scanned, along the generation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    runs = result["runs"]
    figure, panels = pyplot.subplots(len(runs), 3, figsize=(17, 5.2 * len(runs)), squeeze=False)
    names = list(dict.fromkeys(line["index"] for run in runs for line in run["indexes"]))
    styles = _styles(names)
    for (left, right, along), run in zip(panels, runs, strict=True):
        k = middle_of(run)
        for line in run["indexes"]:
            style = styles[line["index"]]
            if line["arrival"] == WHOLE:
                errors = [at["error"] for at in line["rows"].values()]
                left.plot([int(n) for n in line["rows"]], errors, **style)
                right.plot(line["bytes"]["scanned"], line["rows"][k]["error"], **style)
            elif "along" in line:
                dotted = {"linestyle": ":"} if line["arrival"] == STALE else {}
                errors = [at["of_exact"] for at in line["along"].values()]
                along.plot([int(n) for n in line["along"]], errors, **{**style, **dotted})
        title = title_of(run)
        left.set(xscale="log", yscale="log", ylabel="relative error of the attention output")
        left.set(xlabel="rows per KV head", title=f"{title}, at once")
        right.sharey(left)
        right.set(xscale="log", xlabel="bytes scanned per key and KV head (bfloat16)")
        right.set(title=f"{k} rows")
        along.set(xlabel="tokens since the prompt", title="error over that of exact search")
        along.set(yscale="log", ylabel=f"{k} rows; dotted: frozen (stale)")
        left.set_xticks(run["rows"], [str(n) for n in run["rows"]])
        left.xaxis.set_minor_formatter(ticker.NullFormatter())
        for axes in (left, along):
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
            axes.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%.3g"))
        left.set_ylim(bottom=max(left.get_ylim()[0], 5e-3))
        for axes in (left, right, along):
            axes.grid(alpha=0.3)
    for name in names:
        panels[0][0].plot([], [], label=name, **styles[name])
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.tight_layout(rect=(0, 0, 0.85, 1))
    save_figure(figure, out, dpi=110)
    pyplot.close(figure)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Ours solid in warm colors, `exact` black, the others dashed in cool ones."""
    from matplotlib import pyplot

    cool, warm = (pyplot.get_cmap(name) for name in ("viridis", "autumn"))
    own = [name for name in names if name.startswith("pariskv")]
    others = [name for name in names if name not in [*own, "exact"]]
    found = {}
    for name in names:
        of, colors = (own, warm) if name in own else (others, cool)
        place = of.index(name) if name in of else 0
        found[name] = dict(
            color="black" if name == "exact" else colors(0.85 * place / max(len(of), 1)),
            marker="osv^DP*X"[place % 8],
            linewidth=1.0 if name in others else 2.2,
            linestyle="--" if name in others else "-",
        )
    return found
