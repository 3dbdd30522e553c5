"""Recall as keys drift away from what was learnt at the prompt: real generation, made-up shifts.

    python benchmarks/drift.py [--text FILE] [--tokens N] [--written N] [--top-p P …] [--layers L …]
        [--model … --gguf-file … --lora …] [--device cuda] [--keep FOLDER]
        --json OUT --plot OUT.png

The model reads N tokens, then samples; queries at growing positions search all keys before them,
each query head on its own. Then half of the keys are shifted after the other half was learnt
from. Without --model: SmolLM2-135M-Instruct; without --text: prose that every Python carries.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import kvindex
from kvindex.ops.coarse import ceil_share
from kvindex.ops.select import top_k
from kvindex_adapters.capture import Captured, capture
from kvindex_adapters.evaluate.pq import Quantised
from kvindex_adapters.evaluate.recall import SINK, bytes_per_key
from kvindex_adapters.evaluate.text import python_reference
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load, smollm2

SEED = 0
BETA, POOL = 0.05, 4
ASKED, APART = 16, 4
"""Queries per position, and tokens between one and the next."""


class Indexed:
    """An index of the library; what it learns, it learns from the keys that are added first."""

    def __init__(self, spec: str, layer: Captured) -> None:
        H, _, D = layer.queries.shape
        self.spec, self.share = spec, H // len(layer.keys)
        geometry = dict(q_heads=H, kv_heads=H, head_dim=D, value_dim=1, device=layer.keys.device)
        self.index = kvindex.create(spec, scale=layer.scale, softcap=layer.softcap, **geometry)

    def add(self, keys: Tensor) -> None:
        """Append keys `[G, N, D]`."""
        wide = keys.float().repeat_interleave(self.share, 0)[None]
        self.index.append(wide, wide[..., :1])

    def truncate(self, length: int) -> None:
        """Forget the keys from `length` on."""
        self.index.truncate(length)

    def find(self, queries: Tensor, k: int) -> Tensor:
        """Ids `[H, T, k]` for queries `[H, T, D]`."""
        asked = queries.float().transpose(0, 1).contiguous()
        return self.index.repeated(len(asked)).search(asked, k=k).ids.transpose(0, 1)

    def bytes(self) -> dict[str, float]:
        """Per key and KV head, kept and scanned."""
        return bytes_per_key(self.spec, self.index.geometry.head_dim)


@dataclass(frozen=True)
class System:
    """What is compared: something that adds and finds, and which keys it learns from.

    rebuilt: made anew from all keys so far, as an index without drift; else the prompt's alone.
    rescored: only the coarse stage counts: `max(⌈β n⌉, 4 k)` candidates, scored again by `q·k`.
    shifts: whether the made-up shifts are measured too.
    """

    name: str
    make: Callable[[Captured], Any]
    rebuilt: bool = False
    rescored: bool = False
    shifts: bool = True

    def recall(self, searcher: Any, keys: Tensor, queries: Tensor, k: int) -> Tensor:
        """Share of the true top `k` of keys `[G, N, D]` that queries `[H, T, D]` find, `[H]`."""
        keys = keys.float().repeat_interleave(len(queries) // len(keys), 0)
        scores = queries.float() @ keys.mT  # [H, T, N]
        n = keys.shape[1]
        count = min(max(ceil_share(n, BETA), POOL * k), n) if self.rescored else k
        ids = searcher.find(queries.float(), count)
        chosen = torch.zeros(*ids.shape[:2], n + 1, dtype=torch.bool, device=ids.device)
        chosen = chosen.scatter_(-1, ids.where(ids >= 0, n), True)[..., :n]
        if count > k:
            best = top_k(scores.masked_fill(~chosen, -torch.inf), k)[1]
            chosen = torch.zeros_like(chosen).scatter_(-1, best, True)
        return chosen.gather(-1, top_k(scores, k)[1]).float().mean((1, 2)).cpu()


def systems() -> list[System]:
    """ParisKV's presets, and product quantisation at 1 and at 4 bits per coordinate."""

    def preset(name: str, more: str = "") -> Callable[[Captured], Any]:
        return partial(Indexed, f"pariskv:preset={name}:beta={BETA}{more}")

    def pq(subspace: int) -> Callable[[Captured], Any]:
        return lambda layer: Quantised(subspace=subspace)

    paper, one = ":rho=.25", ":pool=1"  # as many candidates as rows are asked for
    return [
        System("paper", preset("paper", paper)),
        System("paper, pool 4", preset("paper", f"{paper}:pool={POOL}")),
        System("fast", preset("fast")),
        System("fast", preset("fast"), rebuilt=True),
        System("fast, one centre", preset("fast", ":centre=65536")),
        System("accurate", preset("accurate")),
        System("PQ, m = 8", pq(8)),
        System("PQ, m = 2", pq(2)),
        System("PQ, m = 2", pq(2), rebuilt=True, shifts=False),  # the slowest to train
        System("paper", preset("paper", paper), rescored=True),
        System("fast", preset("fast", one), rescored=True),
        System("fast", preset("fast", one), rebuilt=True, rescored=True),
        System("accurate", preset("accurate", one), rescored=True),
        System("PQ, m = 8", pq(8), rescored=True),
        System("PQ, m = 8", pq(8), rebuilt=True, rescored=True),
    ]


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


def mean_shift(keys: Tensor, learnt: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Keys `[G, N, D]` moved along one direction, by `size` mean norms of a learnt deviation."""
    norms = (learnt - learnt.mean(1, keepdim=True)).norm(dim=-1).mean(1)
    direction = torch.randn(len(keys), 1, keys.shape[2], generator=draw).to(keys)
    return keys + size * norms[:, None, None] * torch.nn.functional.normalize(direction, dim=-1)


def covariance_shift(keys: Tensor, learnt: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Deviations with each coordinate scaled by `exp(size · z)`, `z` normal."""
    middle = learnt.mean(1, keepdim=True)
    scales = torch.exp(size * torch.randn(len(keys), 1, keys.shape[2], generator=draw))
    return middle + (keys - middle) * scales.to(keys)


def tail_shift(keys: Tensor, learnt: Tensor, size: float, draw: torch.Generator) -> Tensor:
    """Deviations times `√(3/χ²₃)^size`: at 1, normal ones become Student's t of 3 degrees."""
    middle = learnt.mean(1, keepdim=True)
    squares = torch.randn(*keys.shape[:2], 3, generator=draw).square().sum(-1, keepdim=True)
    return middle + (keys - middle) * (3 / squares).pow(size / 2).to(keys)


SHIFTS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...], str]] = {
    "mean": (mean_shift, (0.0, 1.0, 2.0, 4.0), "mean: shift, in norms of a key's deviation"),
    "covariance": (
        covariance_shift,
        (0.0, 0.5, 1.0, 2.0),
        "covariance: σ of the log of the scales",
    ),
    "tails": (tail_shift, (0.0, 0.5, 1.0, 2.0), "tails: power of √(3/χ²₃), 1 = Student's t₃"),
}


def shifted(
    layer: Captured, system: System, k: int, learnt: int
) -> dict[tuple[str, float], Tensor]:
    """Recall after as many keys again as were learnt from, shifted; by kind and size.

    Both halves are drawn at random from the layer's keys, so that at size 0 nothing drifts.
    """
    order = torch.randperm(
        layer.keys.shape[1] - SINK, generator=torch.Generator().manual_seed(SEED)
    )
    half = min(learnt, len(order) // 2)
    keys = layer.keys[:, SINK + order[: 2 * half].to(layer.keys.device)].float()
    first, second = keys[:, :half], keys[:, half:]
    asked = layer.queries[:, :: max(layer.queries.shape[1] // ASKED, 1)][:, :ASKED].float()
    searcher = system.make(layer)
    if not system.rebuilt:
        searcher.add(first)
    found = {}
    for kind, (change, sizes, _) in SHIFTS.items():
        for size in sizes:
            draw = torch.Generator().manual_seed(SEED)
            later = change(second, first, size, draw) if size else second
            both = torch.cat([first, later], 1)
            if not size and found:
                found[kind, size] = next(iter(found.values()))  # the same for each kind
                continue
            if system.rebuilt:
                searcher = system.make(layer)
            else:
                searcher.truncate(half)  # forgets the last shift, not what it has learnt
            searcher.add(both if system.rebuilt else later)
            found[kind, size] = system.recall(searcher, both, asked, k)
    return found


def read_and_write(
    model: Any, tokenizer: Any, text: str, tokens: int, written: int, top_p: float, on_progress: Any
) -> list[Captured]:
    """Captured layers after `tokens` of the text and `written` sampled ones, with their queries."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed is at least {tokens}")
    prompt = torch.tensor(ids, device=model.device)[None]
    torch.manual_seed(SEED)
    with torch.no_grad():
        sequence = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=written,
            max_new_tokens=written,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=top_p,
        )
    return capture(model, sequence[0].cpu(), queries=written, on_progress=on_progress)


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
    figure.text(0.5, 0.005, "solid: learnt from the prompt; dotted: from all keys", ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 0.92))
    figure.savefig(out, dpi=100)


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
    parser.add_argument("--model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path, help="folder of captured layers: read, else written")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if not 1 <= given.k <= given.tokens - SINK:
        raise ValueError(f"k: got {given.k}, allowed is 1 to tokens - {SINK}")
    return given


def captured(given: argparse.Namespace, progress: Progress) -> dict[str, list[Captured]]:
    """The layers of each run, by what it is called."""
    folder, file = (given.model, given.gguf_file) if given.model else smollm2()
    prose = python_reference()
    random.Random(SEED).shuffle(prose)
    text = given.text.read_text() if given.text else "\n\n".join(prose)
    runs, loaded = {}, None
    for top_p in given.top_p:
        kept = given.keep / f"{top_p}.pt" if given.keep else None
        if kept and kept.exists():
            layers = torch.load(kept, weights_only=False)
        else:
            loaded = loaded or load(folder, gguf_file=file, lora=given.lora, device=given.device)
            task = progress.add_task(f"writing, then reading, top_p = {top_p}", total=1.0)
            layers = read_and_write(
                *loaded,
                text,
                given.tokens,
                given.written,
                top_p,
                lambda _, done, total, t=task: progress.update(t, completed=done, total=total),
            )
            if kept:
                torch.save(layers, kept)
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
    if given.json:
        written = {
            "model": Path(given.gguf_file or given.model or smollm2()[1]).name,
            "lora": given.lora.name if given.lora else None,
            "text": given.text.name if given.text else "pydoc_data.topics",
            "tokens": given.tokens,
            "written": given.written,
            "layers": given.layers,
            "k": given.k,
            "beta": BETA,
            "queries_per_head": ASKED,
            "bytes_per_key": sizes,
            "seed": SEED,
            "machine": describe(given.device),
            "cells": cells,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    if given.plot:
        plot(cells, sizes, given.k, given.plot)


if __name__ == "__main__":
    main()
