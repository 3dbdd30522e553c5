"""Worker process of `compare_trees.py`: builds a checkout's step once, and times it on request.

It reads commands from standard input, one JSON list per line: a name, then arguments. Each command
gets one line of JSON, with the result or with `error`. PYTHONPATH selects the checkout that is
imported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import benchmarks
import kvindex
import kvindex_cuda
from benchmarks import append
from benchmarks.common import workload
from benchmarks.common.correctness import check
from benchmarks.common.decoding import UPDATE, Decoding
from benchmarks.common.timing import GraphTimer, Timed
from kvindex.core.geometry import Geometry
from kvindex_adapters.evaluate.machine import describe

COMMANDS = ("check", "build", "round")
"""Commands after `start`."""


@dataclass
class Bench:
    """A step of one checkout, and its times. Methods are commands, and return values for JSON."""

    timed: Timed
    geometry: Geometry
    index: str = "pariskv"
    hit_rate: float = 0.9
    batch: int = 1
    layers: int = 16
    trees: int = 1  # checkouts that share the machine
    sizes: dict[str, Any] = field(default_factory=dict)  # further options of `Layers`
    tokens: int = 0
    works: dict[str, Any] = field(default_factory=dict)  # by where rows are stored, and `update`

    def check(self) -> dict[str, Any]:
        """Check the step's results. Raise SystemExit if they are wrong."""
        return {"check": check(self.geometry, self.index, **self.sizes)}

    def build(self, tokens: int, places: list[str]) -> dict[str, Any]:
        """Build steps over a number of tokens for each place of the rows. Raise SystemExit if
        wrong."""
        self.tokens, self.works = tokens, {}
        workload.free()
        g, fraction = self.geometry, 0.4 / self.trees
        layers = workload.layers_that_fit(g, tokens, self.batch, self.layers, fraction) or 1
        sizes = dict(tokens=tokens, batch=self.batch, layers=layers, **self.sizes)
        for place in dict.fromkeys(p.replace("cached", "host") for p in places):
            if place in ("host", "device"):
                self.works[place] = workload.Layers(g, self.index, place, **sizes)
                self.works[place].answers()
        if "update" in places:
            self.works["update"] = Decoding(g, self.index, tokens, layers)
            append.steps(self.works["update"], UPDATE)
        return {"layers": layers}

    def round(self, places: list[str]) -> dict[str, Any]:
        """Return µs per layer: of a step for each place of the rows, of an append, of updates."""
        return {place: self._round(place) for place in places}

    def _round(self, place: str) -> Any:
        if place == "append":
            return append.prompt(self.geometry, self.index, self.tokens, "device", 5)
        if place == "update":
            return append.delays(*append.steps(self.works["update"], UPDATE))["updated"]
        work = self.works["host" if place == "cached" else place]
        if place != "cached":
            return self.timed(work.run, len(work), work.ask)
        work.fill()
        return self.timed(work.run, len(work), partial(work.ask, hit_rate=self.hit_rate))


def start(options: dict[str, Any]) -> tuple[Bench, dict[str, Any]]:
    """Return the object that answers commands, the machine, and the files of imported modules."""
    timed, heads = GraphTimer(options.pop("replays")), ("q_heads", "kv_heads")
    sizes = {name: options.pop(name) for name in heads}
    bench = Bench(timed, replace(workload.geometry("cuda"), **sizes), **options)
    modules = [str(Path(module.__file__ or "")) for module in (kvindex, kvindex_cuda, benchmarks)]
    return bench, {"machine": describe("cuda"), "modules": modules}


def serve(lines: Iterable[str], out: TextIO, begin: Callable[..., tuple[Any, Any]] = start) -> None:
    """Answer commands until there are no more."""
    bench = None
    for line in lines:
        name, *given = json.loads(line)
        try:
            if name == "start":
                bench, found = begin(*given)
            elif bench is None or name not in COMMANDS:
                raise ValueError(f"got {name!r}, allowed are 'start' and then {COMMANDS}")
            else:
                found = getattr(bench, name)(*given)
        except (Exception, SystemExit) as error:  # the driver gets it, and ends this process
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # everything that is printed goes to the log
    with torch.no_grad():
        serve(sys.stdin, answers)
