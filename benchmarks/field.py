"""All indexes under one protocol: the same keys and queries of a real model, the same rows.

    python benchmarks/field.py --text FILE… [--tokens N] [--written T] [--index SPEC …]
        [--rows K …] [--layers EVERY] [--model … --gguf-file … --lora …] [--device cuda]
        --json OUT [--add] --plot OUT.png

The model reads N tokens of each text and writes T of its own, whose queries ask. Each index gets
the text twice, at once and with its last part in pieces as while decoding; one that can be stale
(`stale=true`) a third time. Bytes are those of the text at once. Sink and window are attended to
besides. --add keeps what OUT holds of other indexes. Without --model: SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kvindex
from benchmarks.comparing.layers import Layer, read_and_write
from benchmarks.comparing.measure import Setting, measure, sizes, truth
from benchmarks.reading import SEED
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load, smollm2

SPECS = {
    "pariskv": (
        "pariskv:preset=paper:beta=.05:rho=.25",
        *(f"pariskv:preset={preset}" for preset in ("fast", "accurate", "precise", "scan")),
    ),
    "ctkvr": ("ctkvr", "ctkvr:rho=256"),
    "pqcache": ("pqcache", "pqcache:preset=infinitebench"),
    "arkvale": ("arkvale", "arkvale:volume=ball:radius=max"),
    "retroinfer": ("retroinfer", "retroinfer:estimated=0"),
    "shadowkv": ("shadowkv", "shadowkv:rank=none"),
    "louiskv": ("louiskv", "louiskv+reuse"),
    **{name: (f"{name}:budget={{k}}",) for name in ("streaming", "h2o", "snapkv", "triattention")},
}
"""What is measured of an index where that is not its default alone; {k} are the rows asked for."""

ROWS = (64, 100, 256, 512, 1024)
WHOLE, PIECES, STALE = "whole", "pieces", "stale"
MEASURES = ("recall", "mass", "error", "used")


def default_specs() -> list[str]:
    """Every index that is there, `exact` first."""
    names = sorted(kvindex.names(), key=lambda name: name != "exact")
    return [spec for name in names for spec in SPECS.get(name, (name,))]


def stale(spec: str) -> str | None:
    """The spec of an index that freezes after the prompt, or None where it has no such option."""
    name, *around = spec.split("+")
    config = kvindex.get(name.split(":")[0]).Config
    if "stale" not in {field.name for field in dataclasses.fields(config)}:
        return None
    return "+".join([f"{name}:stale=true", *around])


def compare(
    layers: Sequence[Layer],
    specs: Sequence[str],
    setting: Setting,
    rows: list[int],
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Cells (one per index and arrival, layer by layer) and, of what failed, why."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    kept: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    task = None if progress is None else progress.add_task("", total=len(layers) * len(specs))
    for number, layer in enumerate(layers):
        known = truth(layer, setting, rows)
        for spec in specs:
            if progress is not None and task is not None:
                progress.update(task, description=f"layer {number + 1}, {spec}")
            if spec not in failed:
                try:
                    if spec not in kept:
                        kept[spec] = sizes(layer, spec, setting)
                    found = _arrivals(layer, spec, setting, rows, known)
                except Exception as error:  # whatever an index raises is its result
                    first = next(iter(str(error).splitlines()), "")
                    failed[spec] = f"{type(error).__name__}: {first}"
                else:
                    for arrival, cell in found.items():
                        cells.setdefault((spec, arrival), []).append(cell)
            if progress is not None and task is not None:
                progress.advance(task)
    done = [
        {"index": spec, "arrival": arrival, "bytes": kept[spec], "layers": each}
        for (spec, arrival), each in cells.items()
        if spec not in failed
    ]
    return done, failed


def _arrivals(
    layer: Layer, spec: str, setting: Setting, rows: list[int], known: Any
) -> dict[str, dict[str, Any]]:
    found = {WHOLE: measure(layer, spec, setting, rows, known)}
    found[PIECES] = measure(layer, spec, setting, rows, known, pieces=True)
    frozen = stale(spec)
    if frozen is not None:
        found[STALE] = measure(layer, frozen, setting, rows, known, pieces=True)
    return found


def summary(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One per index and arrival: over texts and layers, means, medians of times, worst errors."""
    done = []
    for index, arrival in dict.fromkeys((cell["index"], cell["arrival"]) for cell in cells):
        mine = [cell for cell in cells if (cell["index"], cell["arrival"]) == (index, arrival)]
        layers = [layer for cell in mine for layer in cell["layers"]]
        rows = {}
        for k in layers[0]["rows"]:
            each = [layer["rows"][k] for layer in layers]
            mean = {name: sum(one[name] for one in each) / len(each) for name in MEASURES}
            rows[str(k)] = {
                **mean,
                "error_worst_layer": max(one["error"] for one in each),
                "search_ms": 1e3 * median(one["search_s"] for one in each),
            }
        done.append(
            {
                "index": index,
                "arrival": arrival,
                "bytes": mine[0]["bytes"],
                "build_ms": 1e3 * median(layer["build_s"] for layer in layers),
                "rows": rows,
            }
        )
    return done


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with the lines of indexes that only `old` has. Raises ValueError for another setting.

    What says when it was measured (`machine`, `load_average`) is `new`'s.
    """
    for name in new:
        if name not in ("machine", "load_average", "indexes", "failed") and old[name] != new[name]:
            raise ValueError(f"add: got {name} = {new[name]!r}, allowed is {old[name]!r}")
    measured = {line["index"] for line in new["indexes"]} | set(new["failed"])
    lines = [line for line in old["indexes"] if line["index"] not in measured]
    failed = {spec: why for spec, why in old["failed"].items() if spec not in measured}
    return {
        **new,
        "indexes": lines + new["indexes"],
        "failed": {**failed, **new["failed"]},
    }


def show(result: dict[str, Any]) -> None:
    """A table, one line per index and arrival, and what failed."""
    rows = [str(k) for k in result["rows"]]
    middle = rows[min(1, len(rows) - 1)]
    head = ("index", "arrives", "kept B", "scanned B", "build ms", "search ms", f"recall@{middle}")
    table = Table(*head, *(f"error@{k}" for k in rows))
    for line in result["indexes"]:
        at = line["rows"][middle]
        table.add_row(
            *(line["index"], line["arrival"]),
            *(f"{line['bytes'][part]:.0f}" for part in ("kept", "scanned")),
            *(f"{line['build_ms']:.0f}", f"{at['search_ms']:.2f}", f"{at['recall']:.3f}"),
            *(f"{line['rows'][k]['error']:.3f}" for k in rows),
        )
    Console().print(table)
    for spec, why in result["failed"].items():
        Console().print(f"{spec}: {why}")


def plot(result: dict[str, Any], out: Path) -> None:
    """Error against rows, and against the bytes that a search scans per key; text at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.5), sharey=True)
    lines = [line for line in result["indexes"] if line["arrival"] == WHOLE]
    cool, warm = (pyplot.get_cmap(name) for name in ("viridis", "autumn"))
    own = [line["index"] for line in lines if line["index"].startswith("pariskv")]
    others = [line["index"] for line in lines if line["index"] not in [*own, "exact"]]
    middle = str(result["rows"][min(1, len(result["rows"]) - 1)])
    for line in lines:
        index = line["index"]
        ours = index in own
        of, colours = (own, warm) if ours else (others, cool)
        place = of.index(index) if index in of else 0
        style: dict[str, Any] = dict(
            color="black" if index == "exact" else colours(place / max(len(of), 1)),
            marker="osv^DP*X"[place % 8],
            linewidth=1.0 if index in others else 2.2,
            linestyle="--" if index in others else "-",
        )
        errors = [at["error"] for at in line["rows"].values()]
        left.plot([int(k) for k in line["rows"]], errors, label=index, **style)
        right.plot(line["bytes"]["scanned"], line["rows"][middle]["error"], **style)
    left.set(xscale="log", yscale="log", ylabel="relative error of the attention output")
    left.set(xlabel="rows per KV head", title="solid: pariskv and exact search; the text at once")
    right.set(xscale="log", xlabel="bytes scanned per key and KV head (bfloat16)")
    right.set(title=f"{middle} rows")
    left.set_xticks(result["rows"], [str(k) for k in result["rows"]])
    left.xaxis.set_minor_formatter(ticker.NullFormatter())
    for formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        formatter(ticker.FormatStrFormatter("%.2f"))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.tight_layout(rect=(0, 0, 0.8, 1))
    figure.savefig(out, dpi=130)


def main() -> None:
    """Capture, measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--written", type=int, default=64, help="sampled tokens whose queries ask")
    parser.add_argument("--index", nargs="+", help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--layers", type=int, default=1, help="every so many")
    parser.add_argument("--generated", type=int, default=512, help="of the text, in pieces")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--local", type=int, default=256)
    parser.add_argument("--model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to what --json holds already")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    folder, file = (given.model, given.gguf_file) if given.model else smollm2()
    setting = Setting(given.tokens, given.sink, given.local, given.generated)
    model, tokenizer = load(folder, gguf_file=file, lora=given.lora, device=given.device)
    specs, rows = given.index or default_specs(), sorted(given.rows)
    cells: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with Progress() as progress:
        for text in given.text:
            task = progress.add_task(f"{text.stem}, {given.tokens} tokens")
            layers = read_and_write(
                *(model, tokenizer, text.read_text(), given.tokens, given.written),
                lambda _, done, total, t=task: progress.update(t, completed=done, total=total),
                every=given.layers,
            )
            done, wrong = compare(layers, specs, setting, rows, progress)
            cells, failed = cells + done, {**failed, **wrong}
    result = {
        "model": Path(file or folder).name,
        "lora": given.lora.name if given.lora else None,
        "texts": [text.stem for text in given.text],
        "written": given.written,
        "every_layer": given.layers,
        "layers": len(layers),
        "shape": {"q_heads": len(layers[0].queries), "kv_heads": len(layers[0].keys)},
        "setting": dataclasses.asdict(setting),
        "rows": rows,
        "dtype": str(layers[0].keys.dtype).removeprefix("torch."),
        "seed": SEED,
        "machine": describe(given.device),
        "load_average": os.getloadavg()[0],
        "indexes": summary([cell for cell in cells if cell["index"] not in failed]),
        "failed": failed,
    }
    if given.add:
        result = joined(json.loads(given.json.read_text()), result)
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
