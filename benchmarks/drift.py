"""Recall as keys drift away from what was learned at the prompt: real generation, made-up shifts.

    python -m benchmarks.drift [--text FILE] [--tokens N] [--written N] [--top-p P …] [--layers L …]
        [--model … --gguf-file … --lora …] [--device cuda] [--keep FOLDER]
        --json OUT --plot OUT.png

The model reads N tokens, then samples; queries at growing positions search all keys before them,
each query head on its own. Then half of the keys are shifted after the other half was learned
from. Without --model: SmolLM2-135M-Instruct; without --text: prose that every Python carries.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.drifting import kept as kept_layers
from benchmarks.drifting.measure import APART, ASKED, along, shifted
from benchmarks.drifting.show import plot, show
from benchmarks.drifting.systems import BETA, System, systems
from benchmarks.reading import SEED, add_model, described, loaded, read_and_write, reported, write
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.recall import SINK
from kvindex_adapters.evaluate.texts import python_reference
from kvindex_adapters.files import PICTURES, output


def cell(system: System, kind: str, at: float, found: list[Tensor]) -> dict[str, Any]:
    """One point of the picture: mean over layers and heads, and the worst layer."""
    layers = torch.stack(found).mean(1)
    return {
        "system": system.name,
        "stage": "candidates" if system.rescored else "whole",
        "learns_from": "all keys" if system.rebuilt else "prompt",
        "kind": kind,
        "at": at,
        "recall": float(layers.mean()),
        "recall_worst_layer": float(layers.min()),
    }


def study(
    runs: dict[str, list[Captured]],
    compared: list[System],
    positions: list[int],
    k: int,
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """All cells, and the bytes of each system; shifts are of the first run's keys."""
    cells: list[dict[str, Any]] = []
    sizes: dict[str, dict[str, float]] = {}
    first = next(iter(runs.values()))
    task = progress.add_task("systems and runs", total=len(compared) * (len(runs) + 1))
    for system in compared:
        # what is rebuilt is slow, and has no drift to follow: both ends and the middle
        seen = positions[:: max((len(positions) - 1) // 2, 1)] if system.rebuilt else positions
        for kind, layers in runs.items():
            found = [along(layer, system, seen, k) for layer in layers]
            sizes.setdefault(system.name, found[0][1])
            for at, position in enumerate(seen):
                cells.append(cell(system, kind, position, [real[at] for real, _ in found]))
            progress.advance(task)
        if system.shifts:
            moved = [shifted(layer, system, k, positions[0] - SINK) for layer in first]
            for kind, size in moved[0]:
                cells.append(cell(system, kind, size, [m[kind, size] for m in moved]))
        progress.advance(task)
    return cells, sizes


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--written", type=int, default=4096)
    parser.add_argument("--top-p", nargs="+", type=float, default=[1.0], help="one run each")
    parser.add_argument("--layers", nargs="+", type=int, help="default: every eighth")
    parser.add_argument("--positions", type=int, default=7, help="how many, evenly spaced")
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="folder of captured layers: read, else written")
    add_model(parser)
    parser.add_argument("--plot", type=output(*PICTURES))
    given = parser.parse_args()
    if not 1 <= given.k <= given.tokens - SINK:
        raise ValueError(f"k: got {given.k}, allowed is 1 to tokens - {SINK}")
    if given.keep and not given.keep.is_dir():
        raise FileNotFoundError(f"keep: got {str(given.keep)!r}, allowed is a folder that exists")
    return given


def captured(given: argparse.Namespace, progress: Progress) -> dict[str, list[Captured]]:
    """The layers of each run, by what it is called."""
    prose = python_reference()
    random.Random(SEED).shuffle(prose)
    text = given.text.read_text() if given.text else "\n\n".join(prose)
    runs, model = {}, None
    for top_p in given.top_p:
        kept = given.keep / f"{top_p}.safetensors" if given.keep else None
        if kept and kept.exists():
            layers = kept_layers.load(kept)
        else:
            model = model or loaded(given)
            report = reported(progress, f"writing, then reading, top_p = {top_p}")
            layers = read_and_write(
                *model,
                text,
                given.tokens,
                given.written,
                report,
                top_p=top_p,
            )
            if kept:
                kept_layers.save(layers, kept)
        given.layers = given.layers or list(range(3, len(layers), 8))
        runs[f"top_p = {top_p}"] = [layers[number] for number in given.layers]
    return runs


def main() -> None:
    """Capture, measure, print, write and draw."""
    given = arguments()
    with Progress() as progress:
        runs = captured(given, progress)
        end = given.tokens + given.written - ASKED * APART
        positions = torch.linspace(given.tokens, end, given.positions).long().tolist()
        cells, sizes = study(runs, systems(), positions, given.k, progress)
    show(cells, given.k)
    result = {
        **described(given),
        "text": given.text.name if given.text else "pydoc_data.topics",
        "tokens": given.tokens,
        "written": given.written,
        "layers": given.layers,
        "k": given.k,
        "beta": BETA,
        "queries_per_head": ASKED,
        "bytes_per_key": sizes,
        "seed": SEED,
        "cells": cells,
    }
    write(result, given.json)
    if given.plot:
        plot(cells, sizes, given.k, given.plot)


if __name__ == "__main__":
    main()
