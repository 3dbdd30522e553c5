"""Recall under key drift: keys move away from what an index learned at the prompt.

    python -m benchmarks.drift [--text FILE] [--tokens N] [--written N] [--layers L …]
        [--model … --gguf-file … --lora …] [--device cuda] --json OUT

The model reads N tokens, then samples; queries at growing positions search all keys before them,
each query head on its own. Without --model: SmolLM2-135M-Instruct; without --text: prose that
every Python carries.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import (
    SEED,
    add_model,
    described,
    ids_of,
    loaded,
    read_and_write,
    write,
)
from benchmarks.drifting import BETA, System, systems
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.recall import SINK
from kvindex_adapters.evaluate.texts import python_reference

RUN = "top_p = 1.0"
"""How tokens are sampled, as results name it."""

ASKED, APART = 16, 4
"""Queries per position, and tokens between one and the next."""


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--written", type=int, default=4096)
    parser.add_argument("--layers", nargs="+", type=int, help="default: every eighth")
    parser.add_argument("--positions", type=int, default=7, help="how many, evenly spaced")
    parser.add_argument("-k", type=int, default=100)
    add_model(parser)
    given = parser.parse_args()
    if not 1 <= given.k <= given.tokens - SINK:
        parser.error(f"k: got {given.k}, allowed is 1 to tokens - {SINK}")
    return given


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


def along(
    layer: Captured, system: System, positions: list[int], k: int
) -> tuple[list[Tensor], dict[str, float]]:
    """Recall of the queries after each position over the keys before it, and bytes per key.

    The first position is where the prompt ends.
    """
    start = layer.keys.shape[1] - layer.queries.shape[1]
    searcher, last, found = system.make(layer), SINK, []
    for position in positions:
        if system.rebuilt:
            searcher, last = system.make(layer), SINK
        searcher.add(layer.keys[:, last:position])
        last = position
        asked = layer.queries[:, position - start :: APART][:, :ASKED]
        found.append(system.recall(searcher, layer.keys[:, SINK:position], asked, k))
    return found, searcher.bytes()


def study(
    layers: list[Captured], system: System, positions: list[int], k: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All cells of a system, and its bytes per key."""
    # what is rebuilt is slow, and has no drift to follow: both ends and the middle
    seen = positions[:: max((len(positions) - 1) // 2, 1)] if system.rebuilt else positions
    found = [along(layer, system, seen, k) for layer in layers]
    cells = [
        cell(system, RUN, position, [recalls[at] for recalls, _ in found])
        for at, position in enumerate(seen)
    ]
    return cells, found[0][1]


def captured(given: argparse.Namespace, progress: Progress) -> list[Captured]:
    """The layers that are studied."""
    prose = python_reference()
    random.Random(SEED).shuffle(prose)
    text = given.text.read_text() if given.text else "\n\n".join(prose)
    model, tokenizer = loaded(given)
    ids = ids_of(tokenizer, text, given.tokens)
    layers = read_and_write(model, ids, given.written, progress, "writing, then reading")
    given.layers = given.layers or list(range(3, len(layers), 8))
    return [layers[number] for number in given.layers]


def main() -> None:
    """Capture, measure, print and write."""
    given = arguments()
    result: dict[str, Any] = {
        **described(given),
        "text": given.text.name if given.text else "pydoc_data.topics",
        **dict(tokens=given.tokens, written=given.written, k=given.k, beta=BETA),
        **dict(queries_per_head=ASKED, seed=SEED, bytes_per_key={}, cells=[]),
    }
    end = given.tokens + given.written - ASKED * APART
    positions = torch.linspace(given.tokens, end, given.positions).long().tolist()
    with Progress() as progress:
        layers = captured(given, progress)
        result["layers"] = given.layers
        for system in progress.track(systems(), description="systems"):
            cells, size = study(layers, system, positions, given.k)
            result["bytes_per_key"].setdefault(system.name, size)
            result["cells"] += cells
            write(result, given.json)
    print(report.TABLES["drift"](result))


if __name__ == "__main__":
    main()
