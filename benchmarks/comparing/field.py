"""Compare all indexes with the same keys and queries of a model, and the same number of rows.

The model reads N tokens of each text (with --sampled it generates the last part of the text
itself). It then generates T more tokens, and each index searches with their queries. Each index
gets the text twice: in one append, and with the last part in chunks, as if the model generated it.
An index with the option `stale` gets the text a third time, in chunks with `stale=true`. Sink and
window are always attended to. Indexes get the ids of the text's tokens. Indexes that need the ids
of punctuation get those of the tokenizer.

On a CUDA device, pariskv runs on its kernels and FAISS on its GPU indexes, where possible. All
indexes are measured on one layer, then on the next one. With --first N, only N layers are measured.
OUT is written after each layer. With --add, OUT keeps the results of other lengths that it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from rich.progress import Progress

import kvindex
from benchmarks import report
from benchmarks.common.reading import SEED, continued, described, ids_of, loaded, reported, write
from benchmarks.comparing.layers import Layer, capture
from benchmarks.comparing.measure import built, measure, sizes, truths
from benchmarks.comparing.truth import MEASURES, Setting
from benchmarks.reporting.field import MIDDLE, PIECES, STALE, WHOLE
from kvindex.bases import faiss_library
from kvindex.core import backend
from kvindex_adapters.hf.generation.tokenizer import punctuated

SPECS = {
    "exact": ("exact", "exact+sample"),
    "pariskv": (
        *(f"pariskv:preset={preset}" for preset in ("fast", "accurate", "precise", "scan")),
        "pariskv:preset=paper:beta=.05:rho=.25",
        "pariskv:preset=fast+sample",
    ),
    "ctkvr": ("ctkvr", "ctkvr:rho=256"),
    "pqcache": ("pqcache", "pqcache:preset=infinitebench"),
    "arkvale": ("arkvale", "arkvale:volume=ball:radius=max"),
    "retroinfer": ("retroinfer", "retroinfer:estimated=0"),
    "shadowkv": ("shadowkv", "shadowkv:rank=none"),
    "louiskv": ("louiskv", "louiskv+reuse", "louiskv+reuse:tau=.86"),  # docs/indexes/louiskv.md
    **{name: (f"{name}:budget={{k}}",) for name in ("streaming", "h2o", "snapkv", "triattention")},
}
"""Specs that are measured for an index, if there are others than its default. {k} stands for the
number of rows."""

ROWS = (64, 100, 256, 512, 1024)

LEAST = 1e-9
"""In ratios, an error smaller than this counts as this number."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument(
        "--written", type=int, default=32, help="sampled tokens whose queries are searched for"
    )
    parser.add_argument("--index", nargs="+", help="indexes to measure; default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--layers", type=int, default=6, help="measure every L-th layer")
    parser.add_argument(
        "--first", type=int, help="measure at most this number of layers of all texts"
    )
    parser.add_argument(
        "--generated",
        type=int,
        default=2048,
        help="tokens of the text that arrive in chunks after the prompt",
    )
    parser.add_argument(
        "--sampled", action="store_true", help="let the model sample these tokens itself"
    )
    parser.add_argument("--add", action="store_true", help="add the run to the results in --json")


def default_specs() -> list[str]:
    """Return the specs of all indexes: `exact`, pariskv, others, and FAISS.

    FAISS comes last, because it may abort the process.
    """
    first = {"exact": 0, "pariskv": 1}
    last = {name: 3 for name in kvindex.names() if name.startswith("faiss-")}
    names = sorted(kvindex.names(), key=lambda name: {**first, **last}.get(name, 2))
    return [spec for name in names for spec in SPECS.get(name, (name,))]


def stale(spec: str) -> str | None:
    """Return `spec` with the option `stale=true`, or None if the index does not have this option.

    With this option, the structures that an index learned from the prompt stay fixed.
    """
    name, *around = spec.split("+")
    config = kvindex.get(name.split(":")[0]).Config
    if "stale" not in {field.name for field in dataclasses.fields(config)}:
        return None
    return "+".join([f"{name}:stale=true", *around])


def middle(rows: Sequence[int]) -> int:
    """Return the number of rows that is used where the text arrives in chunks."""
    return MIDDLE if MIDDLE in rows else rows[0]


def faster(device: torch.device) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the options of indexes that can use this device's kernels, and notes.

    A note gives the reason why an index cannot use them.
    """
    found: dict[str, dict[str, Any]] = {}
    notes = []
    if device.type == "cuda":
        try:
            backend.resolve("cuda").ready(device)
            found["pariskv"] = {"backend": "cuda"}
        except (ImportError, RuntimeError) as error:
            notes.append(f"pariskv ran as plain torch: {error}")
        try:
            faiss_library.check_gpu(faiss_library.library(), device)
            found |= {f"faiss-{name}": {"where": "gpu"} for name in ("flat", "ivf", "ivfpq")}
        except (ImportError, RuntimeError) as error:
            notes.append(f"FAISS ran on the CPU: {error}")
    return found, notes


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize cells over texts and layers: means, medians of times, error of the worst layer.

    `of_exact` is the geometric mean over layers of the ratio of the index's error to the error of
    exact search. So a layer with small errors counts as much as any other layer.
    """

    def over(each: list[dict[str, Any]]) -> dict[str, float]:
        ratios = [max(one["error"], LEAST) / max(one["error_exact"], LEAST) for one in each]
        return {
            **{name: sum(one[name] for one in each) / len(each) for name in MEASURES},
            "of_exact": geometric_mean(ratios),
            "error_worst_layer": max(one["error"] for one in each),
            "search_ms": 1e3 * median(one["search_s"] for one in each),
        }

    found = {
        part: {str(at): over([cell[part][at] for cell in cells]) for at in cells[0][part]}
        for part in ("rows", "along")
        if cells[0][part]
    }
    build = 1e3 * median(cell["build_s"] for cell in cells)
    return {"layers": len(cells), "build_ms": build, **found}


def joined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return `{"machine", "runs"}` with the run `new`, and with the runs of `old` that it does not
    replace.
    """

    def kind(run: dict[str, Any]) -> tuple[int, bool, str]:
        return run["setting"]["tokens"], run["sampled"], run["lora"] or ""

    others = [run for run in (old or {"runs": []})["runs"] if kind(run) != kind(new)]
    return {"machine": new["machine"], "runs": sorted([*others, new], key=kind)}


@dataclass
class Comparison:
    """The layers of all texts with their ground truth, and the results so far.

    told: Further options for `kvindex.create`, by spec.
    """

    setting: Setting
    rows: list[int]
    layers: list[Layer]
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = [truths(layer, self.setting, self.rows) for layer in self.layers]
        self._faster, self.notes = faster(self.layers[0].keys.device)
        self._facts: dict[str, dict[str, Any]] = {}
        self._found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def measure(self, spec: str, number: int) -> None:
        """Measure one index on one layer. An error is stored as its result."""
        if spec in self.failed:
            return
        ways = self._faster.get(spec.split("+")[0].split(":")[0], {})
        options = {**ways, **self.told.get(spec, {})}
        try:
            if spec not in self._facts:
                self._facts[spec] = {**ways, "bytes": self._once(spec, options)}
            for arrival, cell in self._arrivals(spec, number, options).items():
                self._found.setdefault(spec, {}).setdefault(arrival, []).append(cell)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self.failed[spec] = f"{type(error).__name__}: {first}"
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the index may have run out of memory

    def lines(self) -> list[dict[str, Any]]:
        """Return one line for each index and each way in which the text arrives."""
        return [
            {"index": spec, "arrival": arrival, **self._facts[spec], **summary(cells)}
            for spec, arrivals in self._found.items()
            if spec not in self.failed
            for arrival, cells in arrivals.items()
        ]

    def _once(self, spec: str, options: dict[str, Any]) -> dict[str, float]:
        """Build the index once, to compile kernels and load libraries. Return its bytes."""
        first, k, told = self.layers[0], middle(self.rows), self.told.get(spec, {})
        next(built(first, spec, self.setting, k=k, **options))
        return sizes(first, spec, self.setting, k, **told)

    def _arrivals(self, spec: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
        given = dict(setting=self.setting, known=self._known[number], **options)
        layer = self.layers[number]
        found = {WHOLE: measure(layer, spec, rows=self.rows, **given)}
        for arrival, one in ((PIECES, spec), (STALE, stale(spec))):
            if one is not None:
                rows = [middle(self.rows)]
                found[arrival] = measure(layer, one, rows=rows, pieces=True, **given)
        return found


def captured(
    given: argparse.Namespace, model: Any, tokenizer: Any, progress: Progress
) -> list[list[Layer]]:
    """Return the captured layers of each text."""
    texts, own = [], given.generated if given.sampled else 0
    for text in given.text:
        ids = ids_of(tokenizer, text.read_text(encoding="utf-8"), given.tokens - own)
        ids = continued(model, ids, own + given.written)
        report = reported(progress, f"{text.stem}, {given.tokens} tokens")
        layers = capture(model, ids, every=given.layers, progress=report)
        names = (f"{text.stem}, layer {given.layers * at}" for at in range(len(layers)))
        named = zip(layers, names, strict=True)
        texts.append([dataclasses.replace(layer, name=name) for layer, name in named])
    return texts


def in_turn(texts: list[list[Layer]]) -> list[Layer]:
    """Order the layers so that the first few come from different texts and different depths."""
    depth = len(texts[0])
    return [each[(at + step) % depth] for step in range(depth) for at, each in enumerate(texts)]


def run(given: argparse.Namespace) -> None:
    """Capture layers, then measure one layer after another. Print and write the results."""
    start, setting = time.monotonic(), Setting(given.tokens, generated=given.generated)
    specs, rows = given.index or default_specs(), sorted(given.rows)
    old = (
        json.loads(given.json.read_text(encoding="utf-8"))
        if given.add and given.json.exists()
        else None
    )
    model, tokenizer = loaded(given)
    with Progress() as progress:
        texts = captured(given, model, tokenizer, progress)
        del model
        layers = in_turn(texts)[: given.first]
        told = {spec: punctuated(spec, tokenizer).get("index_options", {}) for spec in specs}
        compared = Comparison(setting, rows, layers, told=told)
        about: dict[str, Any] = {
            **described(given),
            "texts": [text.stem for text in given.text],
            "written": given.written,
            "sampled": given.sampled,
            "every_layer": given.layers,
            "layers": len(texts[0]),
            "shape": {"q_heads": len(layers[0].queries), "kv_heads": len(layers[0].keys)},
            "setting": dataclasses.asdict(setting),
            "rows": rows,
            "dtype": str(layers[0].keys.dtype).removeprefix("torch."),
            "seed": SEED,
            "notes": compared.notes,
        }
        for number in range(len(layers)):
            for spec in progress.track(specs, description=f"layer {number + 1}"):
                compared.measure(spec, number)
            took = {"seconds": time.monotonic() - start, "load_average": os.getloadavg()[0]}
            found = {"measured": number + 1, "indexes": compared.lines(), "failed": compared.failed}
            result = joined(old, about | took | found)
            write(result, given.json)
    print(report.TABLES["field"](result))
