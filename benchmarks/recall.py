"""Recall, attention coverage and bytes of index configurations on a real model's keys and queries.

    python -m benchmarks.recall --text FILE… [--tokens N …] [--presets SPEC …] [--beta β …]
        [--rho ρ …] [--first N …] [--coverage SHARE …] [--model … --gguf-file … --lora …]
        [--device cuda] --json OUT --plot OUT.png

The model reads N tokens of each text, then writes some of its own; the newest queries search the
keys of the text, each query head on its own. With --coverage, they search once more for that share
of the attention, and what they believe is compared with the truth. Without --model:
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.reading import SEED, add_model, described, loaded, read_and_write, reported, write
from kvindex.core.config import parse_spec
from kvindex_adapters.evaluate.recall import Certified, Recall, bytes_per_key, certify, measure
from kvindex_adapters.files import PICTURES, output, save_figure

PRESETS = ("paper", "fast", "accurate", "precise", "scan")
BETAS = (0.02, 0.05, 0.1, 0.2, 1.0)
MOST = 1024
"""Rows that a search for a share of the attention may return."""


def expand(presets: list[str], betas: list[float], rhos: list[float]) -> list[str]:
    """Specs: each preset at each β (and, where it has tiers, each ρ) that is given."""
    specs = []
    for preset in presets:
        if preset == "scan" or ":" in preset or "=" in preset:
            specs.append(f"pariskv:preset={preset}" if "=" not in preset else f"pariskv:{preset}")
            continue
        for beta, rho in itertools.product(betas, rhos if preset == "paper" else [None]):
            share = f":rho={rho}" if rho else ""
            specs.append(f"pariskv:preset={preset}:beta={beta}{share}")
    return specs


def summary(found: Recall) -> dict[str, float]:
    """Mean, worst layer and worst decile of the heads; coverage over that of the true top k."""
    per_layer, per_head = found.recall.mean(1), found.recall.flatten().sort().values
    ratio = found.coverage / found.mass_true
    return {
        "recall": float(found.recall.mean()),
        "recall_worst_layer": float(per_layer.min()),
        "recall_worst_decile": float(per_head[: max(len(per_head) // 10, 1)].mean()),
        "coverage": float(found.coverage.mean()),
        "mass_true": float(found.mass_true.mean()),
        "mass_ratio": float(found.coverage.mean() / found.mass_true.mean()),
        "mass_ratio_worst_layer": float((found.coverage.mean(1) / found.mass_true.mean(1)).min()),
        "mass_ratio_worst_decile": float(
            ratio.flatten().sort().values[: max(ratio.numel() // 10, 1)].mean()
        ),
    }


def certificate(found: Certified) -> dict[str, float]:
    """How many rows were enough, and what was believed of them against the truth."""
    gap = (found.believed - found.true).flatten()
    return {
        "rows": float(found.rows.mean()),
        "believed": float(found.believed.mean()),
        "true": float(found.true.mean()),
        "gap": float(gap.mean()),
        "gap_absolute": float(gap.abs().mean()),
        "gap_90": float(gap.abs().sort().values[int(0.9 * (len(gap) - 1))]),
        "too_sure_by_5_points": float((gap > 0.05).double().mean()),
    }


def show(cells: list[dict[str, Any]], k: int) -> None:
    """A table, one line per configuration: means over texts and lengths."""
    table = Table("index", "kept B", "scanned B", f"recall@{k}", "worst layer", "coverage ratio")
    for index, first in dict.fromkeys((cell["index"], cell["first"]) for cell in cells):
        mine = [cell for cell in cells if cell["index"] == index and cell["first"] == first]
        mean = {name: sum(c[name] for c in mine) / len(mine) for name in mine[0]["means"]}
        table.add_row(
            index if first is None else f"{index}, first append {first}",
            *(f"{mine[0]['bytes_128'][part]:.0f}" for part in ("kept", "scanned")),
            f"{mean['recall']:.3f}",
            f"{min(c['recall_worst_layer'] for c in mine):.3f}",
            f"{mean['mass_ratio']:.3f}",
        )
    Console().print(table)


def plot(cells: list[dict[str, Any]], k: int, out: Path) -> None:
    """Recall against β, and against bytes that a step reads per key, presets side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    points: dict[str, list[tuple[float, float, float]]] = {}
    cells = [cell for cell in cells if cell["first"] is None]
    for index in dict.fromkeys(cell["index"] for cell in cells):
        mine = [cell for cell in cells if cell["index"] == index]
        name, beta = mine[0]["preset"], mine[0]["beta"]
        size = mine[0]["bytes_128"]
        read = size["scanned"] + (size["kept"] * beta if name != "scan" else 0)
        recall = sum(cell["recall"] for cell in mine) / len(mine)
        points.setdefault(name, []).append((beta, read, recall))
    for name, rows in points.items():
        rows.sort()
        left.plot([r[0] for r in rows], [r[2] for r in rows], "o-", label=name)
        right.plot([r[1] for r in rows], [r[2] for r in rows], "o-", label=name)
    left.set(xscale="log", xlabel="share of the keys reranked, β", ylabel=f"recall@{k}")
    right.set(xscale="log", xlabel="bytes read per key and KV head, D = 128")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, out, dpi=150)


def main() -> None:
    """Capture, measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[7000])
    parser.add_argument("--written", type=int, default=64, help="sampled tokens whose queries ask")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--beta", nargs="+", type=float, default=BETAS)
    parser.add_argument("--rho", nargs="+", type=float, default=[0.25])
    parser.add_argument("--first", nargs="+", type=int, default=[], help="of the first append")
    parser.add_argument(
        "--coverage", nargs="+", type=float, default=[], help="shares to search for"
    )
    parser.add_argument("-k", type=int, default=100)
    add_model(parser)
    parser.add_argument("--plot", type=output(*PICTURES))
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    specs, cells = expand(given.presets, given.beta, given.rho), []
    certified: list[dict[str, Any]] = []
    with Progress() as progress:
        work = list(itertools.product(given.text, given.tokens))
        task = progress.add_task("texts and lengths", total=len(work) * len(specs))
        for text, tokens in work:
            report = reported(progress, f"{text.stem}, {tokens} tokens")
            words = text.read_text()
            layers = read_and_write(model, tokenizer, words, tokens, given.written, report)
            for spec in specs:
                options = parse_spec(spec)[1]
                certified += [
                    {
                        "text": text.stem,
                        "tokens": tokens,
                        "index": spec,
                        "coverage": coverage,
                        **certificate(
                            certify(layers, spec, k=MOST, coverage=coverage, prompt=tokens)
                        ),
                    }
                    for coverage in given.coverage
                ]
                for first in [None, *given.first]:
                    found = summary(measure(layers, spec, k=given.k, prompt=tokens, first=first))
                    cells.append(
                        {
                            "text": text.stem,
                            "tokens": tokens,
                            "first": first,
                            "index": spec,
                            "preset": options.get("preset", spec),
                            "beta": options.get("beta", 1.0),
                            "bytes": bytes_per_key(spec, layers[0].keys.shape[-1]),
                            "bytes_128": bytes_per_key(spec, 128),
                            "means": sorted(found),
                            **found,
                        }
                    )
                progress.advance(task)
    show(cells, given.k)
    result = {
        **described(given),
        "k": given.k,
        "queries_per_head": given.written,
        "seed": SEED,
        "cells": cells,
        **({"certified": certified, "certified_k": MOST} if certified else {}),
    }
    write(result, given.json)
    if given.plot:
        plot(cells, given.k, given.plot)


if __name__ == "__main__":
    main()
