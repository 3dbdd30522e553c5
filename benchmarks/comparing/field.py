"""Compare all indexes on the same keys and queries of a model.

1. The model reads --tokens tokens of each text, and then generates --written tokens. With
   --sampled, the last --generated of the --tokens tokens are not read from the text: the model
   generates them.
2. The text is appended to each index: once in a single call, and once with the last --generated
   tokens in chunks, as if the model generated them. An index with the option `stale` is also
   measured with `stale=true`, in chunks.
3. Each index searches with the queries of the --written tokens. All indexes retrieve the same
   number of tokens. Attention reads these tokens, the sink and the local window.

Indexes also get the token ids of the text, and those that need the ids of punctuation get them from
the tokenizer. On a CUDA device, pariskv runs on its kernels and FAISS on its GPU indexes, where
possible.

All indexes are measured on one layer before the next layer. With --first N, only N layers are
measured. The file --json is written after each layer. With --add, the results of other runs that
are in this file remain in it.
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
from kvindex.core.config import split_spec
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
"""Name of an index -> the options with which it is measured, if these are not only the defaults.

`{k}` stands for the number of tokens to retrieve.
"""

ROWS = (64, 100, 256, 512, 1024)

LEAST = 1e-9
"""Smallest error that is used in a ratio of two errors. It replaces all smaller errors."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `field` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens", type=int, default=7000, help="Number of tokens to read from each text"
    )
    parser.add_argument(
        "--written",
        type=int,
        default=32,
        help="Number of tokens that the model generates after each text. Each index searches "
        "with the queries of these tokens.",
    )
    parser.add_argument(
        "--index", nargs="+", help="Names and options of the indexes to measure (default: all)"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=ROWS,
        help="Numbers of tokens that a search retrieves per KV head",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=6,
        metavar="L",
        help="Measure only every L-th layer of the model",
    )
    parser.add_argument(
        "--first",
        type=int,
        help="Maximum number of layers to measure, counted over all texts (default: no limit)",
    )
    parser.add_argument(
        "--generated",
        type=int,
        default=2048,
        help="Number of tokens at the end of each text that are treated like generated tokens: "
        "they are appended to an index in chunks, after the rest of the text",
    )
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="Replace the last --generated tokens of each text by tokens that the model samples",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="Keep the results of other runs that the --json file already contains",
    )


def default_specs() -> list[str]:
    """Return the names and options of all indexes that are measured by default.

    `exact` and `pariskv` come first. FAISS comes last, because it may abort the process.
    """
    first = {"exact": 0, "pariskv": 1}
    last = {name: 3 for name in kvindex.names() if name.startswith("faiss-")}
    names = sorted(kvindex.names(), key=lambda name: {**first, **last}.get(name, 2))
    return [spec for name in names for spec in SPECS.get(name, (name,))]


def stale(spec: str) -> str | None:
    """Add the option `stale=true` to an index, or return None if the index has no such option.

    With this option, what an index has learned from the prompt (such as centroids) stays fixed.
    """
    name, *around = spec.split("+")
    config = kvindex.get(split_spec(name)[0]).Config
    if "stale" not in {field.name for field in dataclasses.fields(config)}:
        return None
    return "+".join([f"{name}:stale=true", *around])


def middle(rows: Sequence[int]) -> int:
    """Select one element of `rows`, the numbers of tokens that a search retrieves.

    Some measurements are made for one such number only.
    """
    return MIDDLE if MIDDLE in rows else rows[0]


def faster(device: torch.device) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Find out which indexes can run on the GPU, with CUDA kernels of kvindex or of FAISS.

    Returns:
        Name of an index that can run on the GPU -> options that select the GPU. The second result
        has a sentence for each index that has GPU kernels but cannot use them, with the reason.
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
    """Summarize the results of one index over texts and layers.

    The summary has means, medians of times, and the error of the worst layer. `of_exact` is the
    error divided by the error of exact search on the same layer, as a geometric mean over layers.
    Because of this division, a layer with small errors counts as much as any other layer.
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
    """Add the results of a run to earlier results. Return all results.

    If `old` contains a run of the same kind, `new` replaces it. Two runs are of the same kind if
    they have the same text length, LoRA file and option `--sampled`.
    """

    def kind(run: dict[str, Any]) -> tuple[int, bool, str]:
        return run["setting"]["tokens"], run["sampled"], run["lora"] or ""

    others = [run for run in (old or {"runs": []})["runs"] if kind(run) != kind(new)]
    return {"machine": new["machine"], "runs": sorted([*others, new], key=kind)}


@dataclass
class Comparison:
    """A comparison of indexes on keys and queries of a real model, with the results so far.

    Args:
        setting: Division of a text into sink, local window and tokens in the index.
        rows: Numbers of tokens that a search retrieves per KV head.
        layers: Captured layers of all texts: their keys, values and queries.
        index_options: Further options for `kvindex.create`, by the name and options of an index.
        failed: The error messages of the indexes that have failed, by name and options.
    """

    setting: Setting
    rows: list[int]
    layers: list[Layer]
    index_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = [truths(layer, self.setting, self.rows) for layer in self.layers]
        self._faster, self.notes = faster(self.layers[0].keys.device)
        self._facts: dict[str, dict[str, Any]] = {}
        self._found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def measure(self, spec: str, number: int) -> None:
        """Measure one index on layer number `number`. If it fails, store the error message."""
        if spec in self.failed:
            return
        ways = self._faster.get(spec.split("+")[0].split(":")[0], {})
        options = {**ways, **self.index_options.get(spec, {})}
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
        """Return a summary for each index and each way of appending the text."""
        return [
            {"index": spec, "arrival": arrival, **self._facts[spec], **summary(cells)}
            for spec, arrivals in self._found.items()
            if spec not in self.failed
            for arrival, cells in arrivals.items()
        ]

    def _once(self, spec: str, options: dict[str, Any]) -> dict[str, float]:
        """Build the index once, so that kernels are compiled and libraries loaded.

        Return the bytes that the index stores per key.
        """
        first, k, index_options = (
            self.layers[0],
            middle(self.rows),
            self.index_options.get(spec, {}),
        )
        next(built(first, spec, self.setting, k=k, **options))
        return sizes(first, spec, self.setting, k, **index_options)

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
    """Let the model read each text and generate tokens, and record its keys, values and queries.

    Return them for each text and each recorded layer.
    """
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
    """Return the captured layers (keys, values and queries) of all texts in one mixed list.

    The first few layers of the list come from different texts, and from different layers of the
    model. So if the option `--first` limits a measurement to these layers, it still covers several
    texts and depths.
    """
    depth = len(texts[0])
    return [each[(at + step) % depth] for step in range(depth) for at, each in enumerate(texts)]


def run(given: argparse.Namespace) -> None:
    """Run the command `field`: record a model's keys and queries, then measure all indexes.

    Indexes are measured layer by layer. Results are written after each layer, and printed at the
    end.
    """
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
        index_options = {
            spec: punctuated(spec, tokenizer).get("index_options", {}) for spec in specs
        }
        compared = Comparison(setting, rows, layers, index_options=index_options)
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
