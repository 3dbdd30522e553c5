"""All indexes under one protocol: the same keys and queries of a real model, the same rows.

    python -m benchmarks.field --text FILE… [--tokens N] [--written T] [--generated N [--sampled]]
        [--index SPEC …] [--rows K …] [--layers EVERY] [--first N] [--seconds S] [--cpu]
        [--model … --gguf-file … --lora …] [--device cuda] --json OUT [--add] [--plot OUT.png]

The model reads N tokens of each text (with --sampled the last of them are its own) and writes T
more, whose queries ask. Each index gets the text twice, at once and with its last part in pieces as
while reading on; one that can be stale (`stale=true`) a third time. Bytes are those of the text at
once. Sink and window are attended to besides. Indexes are told the text's tokens, and those that
want them the ids of the tokenizer's punctuation. On a CUDA device pariskv runs on its kernels and
FAISS where it has a GPU part, if they can. All indexes are measured on one layer, then on the next,
while --seconds last, the --first N at most. OUT is written after each index, and holds a run for
each length; --add keeps what it holds of other indexes and lengths. Without --model:
SmolLM2-135M-Instruct.
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
from typing import Any

import torch
from rich.progress import Progress

import kvindex
from benchmarks.comparing.layers import Layer, capture
from benchmarks.comparing.measure import built, measure, search_time, sizes, truths
from benchmarks.comparing.runs import joined, summary
from benchmarks.comparing.setting import Setting
from benchmarks.comparing.show import PIECES, STALE, WHOLE, plot, show
from benchmarks.reading import (
    SEED,
    add_model,
    clustering,
    continued,
    described,
    loaded,
    reported,
    write,
)
from kvindex.bases import faiss_library
from kvindex.core import backend
from kvindex.ops.kmeans import watched
from kvindex_adapters.files import PICTURES, output
from kvindex_adapters.hf.tokenizer import punctuated

SPECS = {
    "exact": ("exact", "exact+sample"),
    "pariskv": (
        *(f"pariskv:preset={preset}" for preset in ("fast", "accurate", "precise", "scan")),
        "pariskv:preset=paper:beta=.05:rho=.25",
        "pariskv+sample",
    ),
    "ctkvr": ("ctkvr", "ctkvr:rho=256"),
    "pqcache": ("pqcache", "pqcache:preset=infinitebench"),
    "arkvale": ("arkvale", "arkvale:volume=ball:radius=max"),
    "retroinfer": ("retroinfer", "retroinfer:estimated=0"),
    "shadowkv": ("shadowkv", "shadowkv:rank=none"),
    "louiskv": ("louiskv", "louiskv+reuse", "louiskv+reuse:tau=.86"),  # calibrated: tau.json
    **{name: (f"{name}:budget={{k}}",) for name in ("streaming", "h2o", "snapkv", "triattention")},
}
"""What is measured of an index where that is not its default alone; {k} are the rows asked for."""

ROWS = (64, 100, 256, 512, 1024)
MIDDLE = 100
"""Rows at which what arrives in pieces is measured, where that is one of those asked for."""


def default_specs() -> list[str]:
    """Every index that is there: `exact`, ours, the others; FAISS last, whose asserts abort."""
    first = {"exact": 0, "pariskv": 1}
    last = {name: 3 for name in kvindex.names() if name.startswith("faiss-")}
    names = sorted(kvindex.names(), key=lambda name: {**first, **last}.get(name, 2))
    return [spec for name in names for spec in SPECS.get(name, (name,))]


def stale(spec: str) -> str | None:
    """The spec of an index that freezes after the prompt, or None where it has no such option."""
    name, *around = spec.split("+")
    config = kvindex.get(name.split(":")[0]).Config
    if "stale" not in {field.name for field in dataclasses.fields(config)}:
        return None
    return "+".join([f"{name}:stale=true", *around])


def middle(rows: Sequence[int]) -> int:
    """`MIDDLE`, or the first of the rows."""
    return MIDDLE if MIDDLE in rows else rows[0]


def faster(device: torch.device) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """By index, options that make it run on this device's own ways; and why others do not."""
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


@dataclass
class Comparison:
    """Layers of all texts, what is true of each, and what was found out so far.

    cpu: whether searches are timed on the CPU, too, with the first layer; told: by spec, more
    options for `kvindex.create`.
    """

    setting: Setting
    rows: list[int]
    layers: list[Layer]
    cpu: bool = False
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = [truths(layer, self.setting, self.rows) for layer in self.layers]
        self._faster, self.notes = faster(self.layers[0].keys.device)
        self._facts: dict[str, dict[str, Any]] = {}
        self._found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def measure(self, spec: str, number: int) -> float:
        """Measure one index on one layer, in so many seconds; whatever it raises is its result."""
        if spec in self.failed:
            return 0.0
        options = self._faster.get(spec.split("+")[0].split(":")[0], {})
        start = time.monotonic()
        try:
            if spec not in self._facts:
                self._facts[spec] = {**options, **self._once(spec, options)}
            start = time.monotonic()
            told = {**options, **self.told.get(spec, {})}
            for arrival, cell in self._arrivals(spec, number, told).items():
                self._found.setdefault(spec, {}).setdefault(arrival, []).append(cell)
            took = time.monotonic() - start
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self.failed[spec] = f"{type(error).__name__}: {first}"
            took = time.monotonic() - start
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # it may have wanted too much
        return took

    def lines(self) -> list[dict[str, Any]]:
        """One for each index and arrival."""
        return [
            {
                **{"index": spec, "arrival": arrival, **self._facts[spec]},
                **summary(cells, middle(self.rows)),
            }
            for spec, arrivals in self._found.items()
            if spec not in self.failed
            for arrival, cells in arrivals.items()
        ]

    def _once(self, spec: str, options: dict[str, Any]) -> dict[str, Any]:
        """What the first layer tells of an index, and what only the first build must wait for."""
        first, k, told = self.layers[0], middle(self.rows), self.told.get(spec, {})
        next(built(first, spec, self.setting, k=k, **options, **told))  # kernels, libraries
        found: dict[str, Any] = {"bytes": sizes(first, spec, self.setting, k, **told)}
        if self.cpu:
            took = search_time(first.to(device="cpu"), spec, self.setting, k, **told)
            found["cpu_search_ms"] = 1e3 * took
        return found

    def _arrivals(self, spec: str, number: int, options: dict[str, Any]) -> dict[str, Any]:
        given = dict(setting=self.setting, known=self._known[number], **options)
        layer = self.layers[number]
        found = {WHOLE: measure(layer, spec, rows=self.rows, **given)}
        for arrival, one in ((PIECES, spec), (STALE, stale(spec))):
            if one is not None:
                rows = [middle(self.rows)]
                found[arrival] = measure(layer, one, rows=rows, pieces=True, **given)
        return found


def in_turn(texts: list[list[Layer]]) -> list[Layer]:
    """Layers of all texts, in an order in which any first few are of different texts and depths."""
    depth = len(texts[0])
    return [each[(at + step) % depth] for step in range(depth) for at, each in enumerate(texts)]


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--written", type=int, default=32, help="sampled tokens whose queries ask")
    parser.add_argument("--index", nargs="+", help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--layers", type=int, default=6, help="every so many")
    parser.add_argument("--first", type=int, help="measure so many layers of all texts, at most")
    parser.add_argument("--generated", type=int, default=2048, help="of the text, in pieces")
    parser.add_argument("--sampled", action="store_true", help="these are the model's own")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--local-window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all, about")
    parser.add_argument("--cpu", action="store_true", help="time searches on the CPU, too")
    add_model(parser)
    parser.add_argument("--add", action="store_true", help="to what --json holds already")
    parser.add_argument("--plot", type=output(*PICTURES))
    return parser.parse_args()


def main() -> None:
    """Capture, then measure index by index; print, write and draw."""
    start, given = time.monotonic(), arguments()
    setting = Setting(given.tokens, given.sink, given.local, given.generated)
    specs, rows = given.index or default_specs(), sorted(given.rows)
    old = json.loads(given.json.read_text()) if given.add and given.json.exists() else None
    model, tokenizer = loaded(given)
    with Progress() as progress, watched(clustering(progress)):
        texts: list[list[Layer]] = []
        for text in given.text:
            report = reported(progress, f"{text.stem}, {given.tokens} tokens")
            own = given.generated if given.sampled else 0
            lengths = given.tokens - own, own + given.written
            ids = continued(model, tokenizer, text.read_text(), *lengths)
            captured = capture(model, ids, every=given.layers, progress=report)
            names = [f"{text.stem}, layer {given.layers * at}" for at in range(len(captured))]
            named = zip(captured, names, strict=True)
            texts.append([dataclasses.replace(layer, name=name) for layer, name in named])
        del model
        layers = in_turn(texts)[: given.first]
        told = {spec: punctuated(spec, tokenizer).get("index_options", {}) for spec in specs}
        compared = Comparison(setting, rows, layers, cpu=given.cpu, told=told)
        run = {
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
            "indexes": [],
            "failed": compared.failed,
        }
        result = joined(old, run)  # before anything is measured in another setting
        task = progress.add_task("", total=len(layers) * len(specs))
        for number in range(len(layers)):
            took = 0.0
            for spec in specs:
                spent = time.monotonic() - start
                progress.update(task, description=f"{spent:.0f} s, layer {number + 1}, {spec}")
                if spent <= given.seconds:
                    took += compared.measure(spec, number)
                elif number == 0:
                    compared.failed[spec] = f"not begun: {given.seconds:.0f} s were used up"
                run |= {"seconds": time.monotonic() - start, "load_average": os.getloadavg()[0]}
                run |= {"measured": number + 1, "indexes": compared.lines()}
                result = joined(old, run)
                write(result, given.json)
                progress.advance(task)
            if time.monotonic() - start + took > given.seconds:
                break  # so that all are measured on the same layers
    show(result)
    if given.plot:
        plot(result, given.plot)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
