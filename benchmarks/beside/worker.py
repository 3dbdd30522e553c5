"""A tree's process: builds a step once and times it when it is asked to.

    PYTHONPATH=TREE:TREE/adapters python -P worker.py

Started by `trees.py`. Commands come on standard input, a JSON list a line: a name, then arguments.
Each gets a line of JSON: what was found, or `error`. It imports nothing of this folder, for the
other modules are those of the tree that is timed, which need not have it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import benchmarks
import kvindex
import kvindex_cuda
from benchmarks.decode import rivals, timing, workload
from benchmarks.decode.correctness import check, sound
from benchmarks.decode.setting import D, G, H, Setting
from kvindex.core.geometry import Geometry
from kvindex_adapters.machine import describe
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.runtime import launch as launching

LAYERS = 16
"""In a row, as in `decode_step.py`."""

OF_MEMORY = 0.8
"""Share of the device's memory that the codes of all trees may take; rows take 4 GiB a tree."""

COMMANDS = ("check", "pin", "dense", "build", "round", "free")
"""After `start`."""


@dataclass
class Bench:
    """A step of one tree, and its times. Methods are commands and give what is written as JSON.

    room_bytes: of the device, for codes.
    """

    setting: Setting
    timed: timing.Timed
    multiprocessors: int
    l2_bytes: int
    room_bytes: int
    batch: int = 1
    layers: int = LAYERS
    rows: dict[str, workload.RowPool] = field(default_factory=dict)
    pool: workload.Pool | None = None  # kept alive: a step knows addresses
    work: workload.Workload | None = None

    @staticmethod
    def on_device(
        *, index: str, hit_rate: float, batch: int = 1, replays: int = 50, trees: int = 1
    ) -> Bench:
        """On this machine's GPU. trees: that share its memory."""
        launching.checked(torch.cuda.current_device())
        shape = dict(q_heads=H, kv_heads=G, head_dim=D)
        geometry = Geometry.of(**shape, dtype=torch.bfloat16, device="cuda")
        card = torch.cuda.get_device_properties(0)
        # an attribute and no option, so that trees of any day have it: no rows as codes of a byte
        workload.NAMES = ("plain",)
        return Bench(
            Setting(geometry, index, hit_rate=hit_rate),
            timing.GraphTimer(replays, timing.Clock(float("inf")), card.L2_cache_size),
            card.multi_processor_count,
            card.L2_cache_size,
            int(OF_MEMORY * card.total_memory) // trees,
            batch,
        )

    def check(self) -> dict[str, Any]:
        """Raises SystemExit where the step is wrong."""
        return {"check": check(self.setting, self.multiprocessors)}

    def pin(self, tokens: int) -> dict[str, Any]:
        """Rows of up to so many tokens, once for all lengths.

        In whole blocks, for layers begin with another one each and read them in a circle.
        """
        rows = min(tokens, workload.ROWS) // BLOCK * BLOCK
        self.rows = workload.row_pools(self.setting, rows)
        return {"rows_tokens": rows}

    def dense(self, tokens: int) -> dict[str, Any]:
        """Attention over all keys and values, or why it was not measured."""
        g, cuda = self.setting.geometry, self.setting.geometry.device.type == "cuda"
        need = 4 * g.kv_heads * g.head_dim * tokens * self.batch
        free = torch.cuda.mem_get_info()[0] if cuda else self.room_bytes
        layers, why = rivals.layers_of_dense(
            need, free, self.layers, replays=50, GB_s=1000, left_s=float("inf")
        )
        found: dict[str, Any] = {"layers": layers}
        try:
            if layers:
                found |= rivals.dense(self.setting, tokens, self.batch, layers, self.timed)
        except torch.cuda.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
        gc.collect()
        torch.cuda.empty_cache()
        return found | ({"note": why} if why else {})

    def build(self, tokens: int) -> dict[str, Any]:
        """Codes of so many tokens and a step over them. Raises SystemExit where it is wrong."""
        start, s = time.monotonic(), self.setting
        self.free()
        heads = s.geometry.kv_heads
        scanned = heads * tokens * s.scanned_bytes
        sequences = workload.sequences_of(scanned, self.layers, self.l2_bytes)
        fit = self.room_bytes // (-(-tokens // BLOCK) * heads * s.layout.head_bytes)
        if fit < 1:
            raise MemoryError(f"the codes of {tokens} tokens do not fit into the device")
        clock = timing.Clock(float("inf"))
        self.pool = workload.Pool.of(s, tokens, min(fit, sequences), clock)
        sizes = tokens, self.batch, self.layers
        self.work = workload.Workload.of(s, *sizes, self.pool, self.rows, self.multiprocessors)
        with timing.Launches() as launches:
            self.work.run("host", launches)
        sound(s, self.work)
        for place in self.work.states:  # compiles what is left
            self.work.run(place)
        return {
            "launches": launches.names,
            "sequences": len(self.pool.blocks),
            "listed": float(self.work.step.listed.float().mean()),
            "build_s": time.monotonic() - start,
        }

    def round(self, places: list[str]) -> dict[str, Any]:
        """µs of a layer, rows at each of these places."""
        assert self.work is not None
        found: dict[str, Any] = {}
        for place in places:
            torch.manual_seed(0)  # which rows the caches forget
            if place == "cached":
                self.work.fill()
            found[place] = self.timed(partial(self.work.run, place), self.layers, self.work.ask)
            if place == "cached":
                cache = self.work.states["cached"][0].cache
                assert cache is not None
                found["hit_rate"] = cache.hit_rate()
        return found

    def free(self) -> dict[str, Any]:
        """Give back all but the rows."""
        self.work = self.pool = None
        gc.collect()
        torch.cuda.empty_cache()
        return {}


def start(options: dict[str, Any]) -> tuple[Bench, dict[str, Any]]:
    """What answers the other commands, the machine, and where modules come from."""
    bench = Bench.on_device(**options)
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
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints goes to the log
    with torch.no_grad():
        serve(sys.stdin, answers)
