"""Worker process of `compare_trees.py`: builds a tree's step once, and times it on request.

Commands come on standard input, a JSON list a line: a name, then arguments. Each gets a line of
JSON: what was found, or `error`. What is imported is the tree's own, by PYTHONPATH.
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
"""After `start`."""


@dataclass
class Bench:
    """A step of one tree, and its times. Methods are commands and give what is written as JSON."""

    timed: Timed
    geometry: Geometry
    index: str = "pariskv"
    hit_rate: float = 0.9
    batch: int = 1
    layers: int = 16
    trees: int = 1  # that share the machine
    sizes: dict[str, Any] = field(default_factory=dict)  # more for `Layers`
    tokens: int = 0
    works: dict[str, Any] = field(default_factory=dict)  # by place of rows, and `update`

    def check(self) -> dict[str, Any]:
        """Raises SystemExit where the step is wrong."""
        return {"check": check(self.geometry, self.index, **self.sizes)}

    def build(self, tokens: int, places: list[str]) -> dict[str, Any]:
        """Steps over so many tokens, with rows here or there. Raises SystemExit if wrong."""
        self.tokens, self.works = tokens, {}
        workload.free()
        g, share = self.geometry, 0.4 / self.trees
        layers = workload.layers_that_fit(g, tokens, self.batch, self.layers, share) or 1
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
        """µs of a layer's step with rows at each of these places, of an append, of updates."""
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
    """What answers the other commands, the machine, and where modules come from."""
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
        except (Exception, SystemExit) as error:  # which is told; the driver then ends this process
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(found) + "\n")
        out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints goes to the log
    with torch.no_grad():
        serve(sys.stdin, answers)
