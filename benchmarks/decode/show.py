"""A result as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvindex_adapters.files import save_figure

FAISS = {"flat": "FAISS flat", "ivf": "FAISS IVF", "ivfpq": "FAISS IVF-PQ"}
"""Indexes of `benchmarks.decode.faiss_rivals`."""


def found_by(found: dict[str, Any]) -> str:
    """What FAISS's indexes took for a layer, and how many of the best keys they found."""
    parts = []
    for name, label in FAISS.items():
        if name in found:
            recall = found[f"{name}_recall"]
            parts.append(f"{label} {found[name]['median_us']:,.0f} µs ({recall:.0%} found)")
        elif f"{name}_error" in found:
            parts.append(f"{label}: {found[f'{name}_error']}")
    return ", ".join(parts)


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first result, with the others' points and notes."""
    points, notes = ([part for r in results for part in r[name]] for name in ("points", "notes"))
    return {**results[0], "points": points, "notes": notes}


def spread(point: dict[str, Any], part: str) -> str:
    """Median (quartiles) of a part of a point, microseconds; `–` where it was not measured."""
    if part not in point:
        return "–"
    times = point[part]
    return f"{times['median_us']:.1f} ({times['low_us']:.1f}–{times['high_us']:.1f})"


def summary(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of whole steps, µs per layer; `–` where none is."""
    head = (
        *("tokens", "batch", "rows on host", "with cache", "on device", "int8", "fp8"),
        *("dense", "scores + topk", "host of dense", "cache", "device"),
        *("floor", "scan, of reading", "launches", "of attend"),
    )
    rows = []
    for point in result["points"]:
        full = _median(point, "dense")
        steps = [f"step_{place}" for place in ("host", "cached", "device", "int8", "fp8")]
        shares = [_median(point, part) for part in steps[:3]]
        stages = point.get("stages", [])
        floor = sum(stage.get("floor_us", 0) for stage in stages)
        scan = next((stage.get("share") for stage in stages if stage["name"] == "scan"), None)
        rows.append(
            (
                f"{point['tokens']:,}",
                str(point["batch"]),
                *(spread(point, part) for part in (*steps, "dense", "topk")),
                *(f"{ours / full:.3f}" if ours and full else "–" for ours in shares),
                f"{floor:.1f}" if stages else "–",
                f"{scan:.0%}" if scan is not None else "–",
                str(point.get("launches", "–")),
                str(point.get("attend_nodes") or "–"),
            )
        )
    return head, rows


def stages_table(point: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of a step's stages."""
    rows = []
    for stage in point["stages"]:
        known = "floor_us" in stage
        rows.append(
            (
                stage["name"],
                f"{stage['us']:.1f}",
                f"{(stage['bytes'] + stage['host_bytes']) / 1e6:.2f}" if known else "–",
                f"{stage['floor_us']:.1f}" if known else "–",
                f"{stage['share']:.0%}" if "share" in stage else "–",
            )
        )
    return ("kernel", "µs", "MB", "floor, µs", "share"), rows


def show(result: dict[str, Any], console: Console) -> None:
    """Print rates, whole steps, stages, FAISS, notes."""
    rates = ", ".join(f"{name} {part['GB_s']:,.0f}" for name, part in result["ceilings"].items())
    console.print(f"GB/s: {rates}")
    tables = [("microseconds per layer, median (quartiles)", *summary(result))]
    for point in result["points"]:
        if point.get("stages"):
            title = f"{point['tokens']:,} tokens, batch {point['batch']}"
            tables.append((title, *stages_table(point)))
    for title, head, rows in tables:
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for found in result.get("faiss", []):
        console.print(f"FAISS, {found['tokens']:,} tokens: {found_by(found)}")
    for note in result["notes"]:
        console.print(f"note: {note}")


def plot(result: dict[str, Any], out: Path) -> None:
    """Draw time against length at batch 1, and the stages beside their floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    points = sorted((p for p in result["points"] if p["batch"] == 1), key=lambda p: p["tokens"])
    lines = (
        ("step_host", "this step, rows on the host", "o-"),
        ("step_cached", "the same, most rows in the cache", "o:"),
        ("step_device", "this step, rows on the device", "o--"),
        ("dense", "dense attention (SDPA)", "s-"),
        ("topk", "exact scores and topk", "^-"),
    )
    for part, label, style in lines:
        known = [(p["tokens"], p[part]["median_us"]) for p in points if part in p]
        if known:
            left.plot(*zip(*known, strict=True), style, label=label)
    for name, label in FAISS.items():
        found = [f for f in result.get("faiss", []) if name in f]
        if found:
            times = [f[name]["median_us"] for f in found]
            left.plot([f["tokens"] for f in found], times, "x:", label=f"{label}, search alone")
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer and step")
    lengths = [point["tokens"] for point in points]
    left.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    left.minorticks_off()
    left.grid(alpha=0.3)
    if left.lines:
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    _bars(right, [point for point in points if point.get("stages")])
    figure.tight_layout()
    save_figure(figure, out, dpi=150)
    pyplot.close(figure)


def _bars(axes: Any, points: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(stage["name"] for p in points for stage in p["stages"]))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    for at, point in enumerate(points):
        for side, part in ((-0.2, "us"), (0.2, "floor_us")):
            bottom = 0.0
            for stage in point["stages"]:
                height = max(stage.get(part, 0.0), 0.0)  # of a difference: noise may be below 0
                style = dict(color=colors[stage["name"]], edgecolor="white", linewidth=0.5)
                hatch = "//" if part == "floor_us" else ""
                axes.bar(at + side, height, 0.36, bottom=bottom, hatch=hatch, **style)
                bottom += height
    for name in names:
        axes.bar(0, 0, color=colors[name], label=name)
    axes.set(ylabel="µs per layer and step", title="measured, and the floor (hatched)")
    axes.set_xticks(range(len(points)), [f"{point['tokens'] // 1024}K tokens" for point in points])
    if points:
        handles, labels = axes.get_legend_handles_labels()  # in the order of the stack
        axes.legend(handles[::-1], labels[::-1], bbox_to_anchor=(1, 1), loc="upper left")


def _median(point: dict[str, Any], part: str) -> float | None:
    return float(point[part]["median_us"]) if part in point else None
