"""Draw the pictures of the docs from results of benchmarks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from benchmarks.common.shapes import SHAPES
from benchmarks.reporting.along import along_lines, sampled
from benchmarks.reporting.answers import DEFAULT, depth_cells
from benchmarks.reporting.parts import Result, mean, some, stored, values
from benchmarks.reporting.prompts import DENSE, by_length, short_label, sparse_plans
from benchmarks.reporting.tokens import plain, ranks_plans
from kvindex_adapters.evaluate.compare.depths import PARTS
from kvindex_adapters.evaluate.compare.lines import NAMED
from kvindex_adapters.evaluate.compare.pictures import LIGHT, MARKS, picture
from kvindex_adapters.evaluate.compare.records import FULL
from kvindex_adapters.evaluate.output_files import save_figure

matplotlib.use("Agg")

POINTS: Any = dict(textcoords="offset points")
"""Options of an annotation whose position is in points."""

REACH = 0.3
"""Differences in accuracy of this size or more have the darkest color in the heat map."""


def decode_step(result: Result) -> Any:
    """Plot the time of a decode step on a GPU against the number of tokens, for one sequence."""
    lines = (
        ("step_host", "rows on the host", "o-"),
        ("step_cached", "rows on the host, most of them cached", "o:"),
        ("step_device", "rows on the device", "o--"),
        ("dense", "dense attention (SDPA)", "s-"),
        ("topk", "exact search with topk", "^-"),
    )
    longer = stored("decode_step_4m") or {"points": []}
    points = some([*result["points"], *longer["points"]], batch=1)
    points.sort(key=lambda point: point["tokens"])
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for part, label, style in lines:
        known = [(p["tokens"], p[part]["median_us"]) for p in points if part in p]
        axes.plot(*zip(*known, strict=True), style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer and step")
    tokens = values(points, "tokens")
    axes.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    return figure


def cpu_steps(result: Result) -> Any:
    """Plot the time of a decode step on a CPU with all threads against the number of tokens."""
    threads = max(values(result["points"], "threads"))
    points = some(result["points"], threads=threads)
    tokens = values(points, "tokens")
    names = {"dense": "dense (SDPA)", "dense_folded": "dense, heads folded"}
    shown = [name for name, found in points[0].items() if isinstance(found, dict)]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in shown:
        times = [point[name]["ms"] for point in points]
        own = name == result["index"]
        options: Any = dict(color="C0" if own else "0.55", linewidth=2.5 if own else 1.5)
        axes.plot(tokens, times, "o-", **options)
        at = (tokens[-1] * 1.1, times[-1])
        axes.annotate(names.get(name, name), at, color=options["color"], va="center")
    crossing = _crossing(
        tokens, *([p[name]["ms"] for p in points] for name in (result["index"], "dense"))
    )
    if crossing:
        axes.axvline(crossing, color="0.85", zorder=0)
        axes.annotate(f"{crossing:,.0f} tokens", (crossing * 1.05, axes.get_ylim()[1]), va="top")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel=f"ms per layer and step, {threads} threads",
    )
    axes.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    axes.set_xlim(right=tokens[-1] * 4)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def _crossing(tokens: list[int], mine: list[float], theirs: list[float]) -> float | None:
    """Return the number of tokens at which two curves of times cross.

    For more tokens than this number, the times `mine` are shorter than the times `theirs`. The
    number is interpolated between measurements on a logarithmic scale. The result is None if the
    curves do not cross.
    """
    over = [math.log(a / b) for a, b in zip(mine, theirs, strict=True)]
    for i in range(1, len(over)):
        if over[i - 1] > 0 >= over[i]:
            fraction = over[i - 1] / (over[i - 1] - over[i])
            return tokens[i - 1] * (tokens[i] / tokens[i - 1]) ** fraction
    return None


PUBLISHED = {
    "ParisKV": [(2**17, 24.3), (2**20, 49)],
    "LOCKS": [(2**17, 8.27), (2**20, 12.95)],
    "LOCKS's dense": [(2**17, 8.74), (2**20, 26.19)],
    "RetroInfer": [(2**17, 29.1)],
    "ShadowKV": [(2**17, 18.8)],
}
"""Published times of other systems: name -> pairs of context length and milliseconds per token.

They were measured on other machines (docs/performance.md).
"""


def decoder_tokens(result: Result) -> Any:
    """Plot the time per generated token against the number of tokens, on one kind of GPU.

    Published times of other systems are gray.
    """
    plans = {"dense": "full attention", "cached": f"{result['index']}, rows on the host"}
    styles = {model: f"{mark}-" for model, mark in zip(SHAPES, MARKS, strict=False)}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms per token")
    for name, points in PUBLISHED.items():
        axes.plot(*zip(*points, strict=True), ".--", color=LIGHT.gray, linewidth=0.8)
        axes.annotate(f"  {name}", points[-1], color="0.45", va="center", fontsize=8)
    shown = plain(result)
    for model in values(shown, "model"):
        mine = some(shown, model=model)
        lines = {
            label: [
                (p["context"], p[plan]["device_ms"])
                for p in (one["decoder"] for one in mine)
                if plan in p
            ]
            for plan, label in plans.items()
        }
        floor = [(one["decoder"]["context"], one["decoder"]["floor_ms"]) for one in mine]
        lines["reading the weights only"] = floor
        for (label, line), color in zip(lines.items(), LIGHT.colors, strict=False):
            if line:
                axes.plot(*zip(*line, strict=True), styles[model], color=color)
                name = f"  {label} ({model})"
                axes.annotate(name, line[-1], color=color, va="center", fontsize=8)
    ticks = sorted({one["decoder"]["context"] for one in shown} | {2**17, 2**20})
    axes.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    axes.set_xlim(right=ticks[-1] * 12)
    axes.minorticks_off()
    axes.set_yticks([5, 10, 20, 50], ["5", "10", "20", "50"])
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def ranks(result: Result) -> Any:
    """Draw bars for the time per token on one GPU, and with each way to use several GPUs."""
    found = result["ranks"]
    plans = {plan: name for plan, name in ranks_plans(found).items() if plan != "silent"}
    names = list(plans.values())
    low, ms, high = (
        [found[plan][f"device_ms{end}"] for plan in plans] for end in ("_low", "", "_high")
    )
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.45 * len(plans)))
    colors = [LIGHT.gray if plan == "one" else "C0" for plan in plans]
    axes.barh(names, ms, color=colors, height=0.6)
    for row, time in enumerate(ms):
        axes.annotate(f"  {time:.2f}", (high[row], row), va="center")
    ends = [[a - b for a, b in zip(*pair, strict=True)] for pair in ((ms, low), (high, ms))]
    axes.errorbar(ms, names, xerr=ends, fmt="none", ecolor="0.2")
    axes.set(xlabel="ms per token", xlim=(0, 1.12 * max(ms)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def recall(result: Result) -> Any:
    """Plot the recall of each preset of pariskv against β and against the bytes read per key.

    β is the fraction of keys that become candidates.
    """
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for preset in values(result["cells"], "preset"):
        points = []
        for beta in values(mine := some(result["cells"], preset=preset), "beta"):
            here = some(mine, beta=beta)
            size = here[0]["bytes_128"]
            read = size["scanned"] + (size["stored"] * beta if preset != "scan" else 0)
            points.append((beta, read, mean(here, "recall")))
        fractions, sizes, found = zip(*sorted(points), strict=True)
        left.plot(fractions, found, "o-", label=preset)
        right.plot(sizes, found, "o-", label=preset)
    left.set(xscale="log", xlabel="fraction of the keys that are reranked, β")
    left.set(ylabel=f"recall@{result['k']}")
    right.set(xscale="log", xlabel="bytes read per key and KV head, D = 128")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def answers_depth(result: Result) -> Any:
    """Draw two heat maps by depth of the answer and prompt length.

    One map shows the accuracy with full attention. The other map shows the accuracy with pariskv
    minus that with full attention.
    """
    tokens = result["tokens"]
    panels = [
        (FULL, f"{FULL}, %", "Blues", (0, 1), "{:.0f}"),
        (DEFAULT, f"{DEFAULT} minus {FULL}, points", "PuOr", (-REACH, REACH), "{:+.0f}"),
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.6 + 0.45 * len(tokens)), sharey=True)
    for axis, (index, title, colors, ends, form) in zip(axes, panels, strict=True):
        cells = depth_cells(result, index)
        grid = [[cells.get((n, part / PARTS), math.nan) for part in range(PARTS)] for n in tokens]
        axis.imshow(grid, cmap=colors, vmin=ends[0], vmax=ends[1], aspect="auto")
        for (n, depth), value in cells.items():
            place = (round(depth * PARTS), tokens.index(n))
            look: Any = dict(color="white" if abs(value) > 0.6 * ends[1] else "black", fontsize=9)
            axis.text(*place, form.format(100 * value), ha="center", va="center", **look)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xticks(range(PARTS), [f"{part / PARTS:.1f}" for part in range(PARTS)])
        axis.set_yticks(range(len(tokens)), [f"{n // 1024}K" for n in tokens])
        axis.set(xlabel="depth of the answer in the text")
    axes[0].set(ylabel="tokens")
    figure.tight_layout()
    return figure


def answers_along(result: Result) -> Any:
    """Plot the recall of indexes against the number of generated tokens of an answer.

    Of the benchmark runs in `result`, the picture shows the one with the largest number of indexes.
    Labels name pariskv and those indexes whose recall changes most.
    """
    run = max(sampled(result), key=lambda run: len(run["indexes"]))
    lines = {
        index: [(at, worth["recall"]) for at, worth in line.items()]
        for index, line in along_lines(run).items()
    }
    default = next(index for index in lines if index.startswith(DEFAULT))
    most = sorted(lines, key=lambda index: -abs(lines[index][-1][1] - lines[index][0][1]))
    named = sorted(most, key=lambda index: index != default)[:NAMED]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for index in (index for index in lines if index not in named):
        axes.plot(*zip(*lines[index], strict=True), ".-", color=LIGHT.gray, linewidth=0.8)
    height = -1.0
    for index in sorted(named, key=lambda index: lines[index][-1][1]):
        color = LIGHT.colors[named.index(index)]
        axes.plot(*zip(*lines[index], strict=True), f"{MARKS[named.index(index)]}-", color=color)
        last, recall = lines[index][-1]
        height = max(recall, height + 0.05)
        axes.annotate(index, (last * 1.03, height), color=color, va="center", fontsize=9)
    axes.set(xlabel="tokens of the answer", ylabel="recall of exact search's rows", ylim=(0, 1.03))
    axes.set_xlim(right=axes.get_xlim()[1] * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def prefill_decoder(result: Result) -> Any:
    """Draw the times to read prompts of several lengths, with full and with sparse attention.

    Each bar is a later prompt. Its pale continuation is the first prompt of its kind in a process.
    """
    results = by_length(result)
    figure, panels = pyplot.subplots(1, len(results), figsize=(9, 3), squeeze=False)
    for axes, one in zip(panels[0], results, strict=True):
        found = one["prefill"]
        plans = [*DENSE, *sparse_plans(one)]
        for place, plan in enumerate(plans):
            later, first = found[plan]["seconds"], found["first"][plan]["seconds"][0]
            color = "0.6" if plan == "full" else "C0" if plan == "indexed" else "C1"
            axes.barh(place, first, color=color, alpha=0.25)
            axes.barh(place, later, color=color)
            axes.annotate(f"{later:.1f} s", (later, place), va="center", xytext=(3, 0), **POINTS)
        axes.axvline(found["floor"]["seconds"], color="0.4", linestyle=":")
        names = [short_label(one, plan).replace("`", "") for plan in plans]
        axes.set_yticks(range(len(plans)), names)
        axes.invert_yaxis()
        axes.set(title=f"{found['tokens']:,} tokens", xlabel="seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


PICTURES = {
    **dict(cpu_steps=cpu_steps, decode_step=decode_step, decoder_tokens=decoder_tokens),
    **dict(prefill_decoder=prefill_decoder, ranks=ranks, recall=recall),
    **dict(answers_lengths=picture, answers_rows=picture),
    **dict(answers_depth=answers_depth, answers_along=answers_along),
}
"""Name of a results file, which is also that of a picture -> function that draws the picture."""


def draw(folder: Path, names: list[str]) -> None:
    """Draw the pictures with these names, and write them into a folder as PNG files."""
    for name in names:
        if result := stored(name):
            figure = PICTURES[name](result)
            save_figure(figure, folder / f"{name}.png", dpi=110)
            pyplot.close(figure)
